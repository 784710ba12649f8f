"""What the server counts, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..stats import Stats

SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKENS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)


class Metrics:
    """Figures of one engine, in a registry of its own. Rates over time are the reader's: acceptance is
    rate(accepted) / (rate(accepted) + rate(rejected))."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"draftsmith_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"draftsmith_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"draftsmith_{name}", text, registry=registry, buckets=buckets)

        self.requests = counter("requests", "Answers, by how they ended: stop, length, cancelled, error", "outcome")
        self.refused = counter("refused", "Requests refused because the queue was full")
        self.restarts = counter("engine_restarts", "Times that the engine failed as a whole and went on")
        self.slots = gauge("slots", "Answers that can be written at a time")
        self.running = gauge("running", "Answers being written")
        self.waiting = gauge("waiting", "Answers waiting for a slot")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of the prompts of finished answers")
        self.cached_tokens = counter("cached_prompt_tokens", "Those of them that lay in a cache already")
        self.completion_tokens = counter("completion_tokens", "Tokens of finished answers")
        self.tokens = counter("tokens", "The same by where they came from, with those past an answer's end", "source")
        self.drafted = counter("drafted_tokens", "Drafted tokens, by what became of them: accepted, rejected, wasted",
                               "outcome")
        self.steps = counter("target_passes", "Passes of the target after the prompts")
        self.rounds = counter("rounds", "Rounds that speculated, by what proposed", "variant")
        self.policy = gauge("policy_state", "What policies say of themselves, of the last finished answer", "name")
        self.acceptance = histogram("acceptance", "Acceptance rate of an answer", tuple(i / 10 for i in range(1, 11)))
        self.per_step = histogram("tokens_per_step", "Tokens a target pass, of an answer", TOKENS)
        self.first = histogram("time_to_first_token_seconds", "From the request to its first token", SECONDS)
        self.whole = histogram("answer_seconds", "From the request to the end of its answer", SECONDS)
        self.round_seconds = histogram("round_seconds", "A round of all answers, with prompts that it read", SECONDS)

    def finished(self, stats: Stats) -> None:
        """Count a finished answer."""
        self.prompt_tokens.inc(stats.prompt_tokens)
        self.cached_tokens.inc(stats.cached_tokens)
        self.completion_tokens.inc(stats.emitted)
        for source in ("accepted", "corrections", "bonus", "ar"):
            self.tokens.labels(source).inc(getattr(stats, source))
        for outcome in ("accepted", "rejected", "wasted"):
            self.drafted.labels(outcome).inc(getattr(stats, outcome))
        self.steps.inc(stats.steps)
        for variant, rounds in stats.variants.items():
            self.rounds.labels(variant).inc(rounds)
        for name, value in stats.policy.items():
            self.policy.labels(name).set(value)
        if stats.acceptance_rate is not None:
            self.acceptance.observe(stats.acceptance_rate)
        if stats.tokens_per_step is not None:
            self.per_step.observe(stats.tokens_per_step)
        if stats.emitted:
            self.first.observe(stats.ttft)
        self.whole.observe(stats.seconds)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)
