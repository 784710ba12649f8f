"""What a generation reports: its tokens, each with where it came from, and its counters."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Token:
    """An emitted token and where it came from: "accepted", "correction", "bonus" or "ar".

    p: the target's probability of it after all processing; q: the draft's, for accepted tokens. logprob: of the
    target's own logits, and top_logprobs (id, logprob) of the likeliest, where `SamplingParams.logprobs` asks.
    """

    id: int
    source: str
    p: float
    q: float | None = None
    variant: str | None = None
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] = field(default_factory=list)
    replaced: list[int] = field(default_factory=list)


@dataclass
class Stats:
    """Counters of one generation. `cached_tokens`: of the prompt's, those that lay in the target's cache already;
    `steps`: target passes after the prefill; `parts`: seconds by
    `profile.PARTS`; `variants`: rounds by variant; `draft_rows`: positions that each variant computed, the prompt's
    included, and `draft_heads` those of them that reached the head; `draft_lag`: positions that only the deep layers
    computed, to catch up with the shallow ones."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    rejected: int = 0
    wasted: int = 0
    corrections: int = 0
    bonus: int = 0
    ar: int = 0
    trimmed: int = 0
    emitted: int = 0
    steps: int = 0
    ttft: float = 0.0
    seconds: float = 0.0
    target_seconds: float = 0.0
    draft_seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    accepted_by_position: list[int] = field(default_factory=lambda: [0] * 16)
    judged_by_position: list[int] = field(default_factory=lambda: [0] * 16)
    variants: dict[str, int] = field(default_factory=dict)
    draft_rows: dict[str, int] = field(default_factory=dict)
    draft_heads: dict[str, int] = field(default_factory=dict)
    draft_lag: int = 0
    policy: dict[str, float] = field(default_factory=dict)

    @property
    def acceptance_rate(self) -> float | None:
        """accepted / (accepted + rejected); None when nothing was judged."""
        judged = self.accepted + self.rejected
        return self.accepted / judged if judged else None

    @property
    def tokens_per_step(self) -> float | None:
        """Emitted tokens a target pass after the prefill; the prefill's own token is left out."""
        return (self.emitted - 1) / self.steps if self.steps else None

    def check(self) -> None:
        """The counters reconcile (DESIGN, section 7, rule 7)."""
        assert self.drafted >= self.verified >= self.accepted + self.rejected
        assert self.verified == self.accepted + self.rejected + self.wasted
        assert self.emitted == self.accepted + self.corrections + self.bonus + self.ar - self.trimmed
