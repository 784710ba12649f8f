"""Methods under test behind one call: our policies, and `transformers` in its three ways."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from draftsmith.data import DraftsmithError
from draftsmith.distill.variants import Variant

from ..decoder import Decoder
from ..exports.stock import stock_model
from ..flops import layer_weights_of
from ..policies import Policy, Round, make_policy
from ..sampling import SamplingParams
from ..stats import Stats
from ..target import load_target

LOOKUP_TOKENS = 4  # drafted a round by transformers' prompt lookup
OUTSIDE = ("transformers", "transformers-assisted", "transformers-lookup")


@dataclass
class Answer:
    """What a method wrote to a prompt, how long it took, and what it counted, if it counts."""

    ids: list[int]
    text: str
    seconds: float
    ttft: float
    stats: Stats | None = None
    rounds: list[Round] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)  # of the tokens


Method = Callable[[list[int], SamplingParams], Answer]


class Recorder:
    """A policy that also keeps every finished round."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.rounds: list[Round] = []

    def observe(self, finished: Round) -> None:
        self.rounds.append(finished)
        self.policy.observe(finished)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)


def ours(decoder: Decoder, policy: str) -> Method:
    """A policy of ours by name. Raises `DraftsmithError` for one that there is not."""
    make_policy(policy, decoder.context)

    def run(prompt: list[int], params: SamplingParams) -> Answer:
        recorder = Recorder(make_policy(policy, decoder.context))
        output = decoder.generate(prompt, params, cast(Policy, recorder))
        return Answer(output.token_ids, output.text, output.stats.seconds, output.stats.ttft, output.stats,
                      recorder.rounds, [token.source for token in output.tokens])

    return run


class FirstToken:
    """A streamer that notes when the first new token came."""

    def __init__(self) -> None:
        self.calls, self.at = 0, 0.0

    def put(self, value: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == 2:  # the first call hands over the prompt
            self.at = time.perf_counter()

    def end(self) -> None:
        return None


def cut(tokenizer: Any, eos_ids: frozenset[int], stop: Sequence[str], ids: list[int]) -> tuple[int, str, bool]:
    """How many of the ids an answer keeps, the one that completes a stop string being the last; its text; and whether
    there is such a string."""

    def text_of(some: list[int]) -> str:
        return str(tokenizer.decode([i for i in some if i not in eos_ids], skip_special_tokens=True,
                                    clean_up_tokenization_spaces=False))

    text = text_of(ids)
    ends = [at for at in (text.find(s) for s in stop) if at >= 0]
    if not ends:
        return len(ids), text, False
    low, high = 1, len(ids)  # the shortest beginning with a stop string in it
    while low < high:
        middle = (low + high) // 2
        found = text_of(ids[:middle])
        low, high = (low, middle) if any(s in found for s in stop) else (middle + 1, high)
    return low, text[: min(ends)], True


def stock(model: Any, tokenizer: Any, eos_ids: frozenset[int], **options: Any) -> Method:
    """`transformers` generate, greedy, nothing but the target's own choices; `options` choose how it speculates."""
    from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

    class StopStrings(StoppingCriteria):
        """Anywhere in the answer: a block of accepted tokens may go on after one."""

        def __init__(self, begin: int, stop: Sequence[str]) -> None:
            self.begin, self.stop = begin, stop

        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            ids = input_ids[0, self.begin :].tolist()
            return torch.tensor([cut(tokenizer, eos_ids, self.stop, ids)[2]], device=input_ids.device)

    @torch.no_grad()
    def run(prompt: list[int], params: SamplingParams) -> Answer:
        ids, streamer = torch.tensor([prompt], device=model.device), FirstToken()
        # A model's own settings may hold penalties, which are not asked for here.
        settings = GenerationConfig(max_new_tokens=params.max_tokens, do_sample=False,
                                    eos_token_id=sorted(eos_ids) or None, pad_token_id=min(eos_ids, default=0))
        criteria = StoppingCriteriaList([StopStrings(len(prompt), params.stop)] if params.stop else [])
        started = time.perf_counter()
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings, streamer=streamer,
                             stopping_criteria=criteria, **options)
        seconds = time.perf_counter() - started
        new = out[0, len(prompt) :].tolist()
        kept, text, _ = cut(tokenizer, eos_ids, params.stop, new)
        return Answer(new[:kept], text, seconds, max(0.0, streamer.at - started))

    return run


def outside(decoder: Decoder, names: list[str], trust_remote_code: bool = False) -> dict[str, Method]:
    """The references by name, over one stock copy of the target; the draft goes to `transformers` as its export."""
    if not names:
        return {}
    dtype = decoder.target.engine.dtype
    target = load_target(decoder.target.name, dtype, trust_remote_code=trust_remote_code)
    options: dict[str, dict[str, Any]] = {"transformers": {},
                                          "transformers-lookup": {"prompt_lookup_num_tokens": LOOKUP_TOKENS}}
    if "transformers-assisted" in names:
        if decoder.bundle is None:
            raise DraftsmithError("transformers-assisted needs a bundle, whose draft it is given")
        from ..bundle import load_bundle

        bundle = load_bundle(decoder.bundle.folder)  # the decoder took its tensors
        draft = stock_model(bundle, target, Variant(bundle.shape.layers)).to(target.model.device, dtype)
        options["transformers-assisted"] = {"assistant_model": draft}
    return {name: stock(target.model, target.tokenizer, target.eos_ids, **options[name]) for name in names}


@dataclass
class Work:
    """Multiplications and additions of one answer, attention left out."""

    target: float
    draft: float


def work_of(decoder: Decoder, stats: Stats) -> Work:
    """FLOPs of target and draft, from the positions that each computed."""
    config = decoder.target.config
    rows = stats.steps + stats.verified
    head = float(config.vocab_size * config.hidden_size)
    layers = layer_weights_of(config) * config.num_hidden_layers
    target = 2 * (layers * (stats.prompt_tokens + rows) + head * (1 + rows))
    shape, small = decoder.draft.shape if decoder.draft else None, getattr(decoder.draft, "config", None)
    if shape is None or small is None:
        return Work(target, 0.0)
    draft = float(layer_weights_of(small, shape.width(shape.variants()[-1])) * (shape.layers - shape.exit)
                  * stats.draft_lag)
    for name, positions in stats.draft_rows.items():
        variant: Variant = shape.find(name)
        draft += layer_weights_of(small, shape.width(variant)) * variant.depth * positions
        draft += float(shape.head * small.hidden_size) * stats.draft_heads[name]
    return Work(target, 2 * draft)
