"""The comparison: every method on every prompt, interleaved in one process, who goes first in turn.

A run is a journal of records. "prompt": what a prompt was; "tuned": a length or tree that was chosen on other prompts;
"row": one method on one prompt; "judged": what was found out about a prompt's answers afterwards, untimed. Whatever is
missing from the journal is measured; nothing that is there is measured again.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from draftsmith.data import DraftsmithError
from draftsmith.data.chat import chat_ids
from draftsmith.data.io import sha256_json

from ..decoder import Decoder
from ..identity import Divergence, compare
from ..meter import PerplexityMeter, log_probs_at, log_probs_in_head
from ..sampling import GumbelNoise, SamplingParams
from .energy import Energy
from .interleave import rotated
from .journal import Journal
from .methods import OUTSIDE, Answer, Method, ours, outside, work_of
from .statistics import paired_ratio
from .tasks import Chosen, Item

PLAIN = "ar"
LENGTHS = (1, 2, 3, 4, 6, 8)
SHAPES = ("mtv(2,1)", "mtv(2,2,1)", "mtv(3,2,1,1)", "mtv(2,1,1,1,1)")
TUNED = {"dsd": tuple(f"fixed({k})" for k in LENGTHS), "mtv": SHAPES}
WARM_UP = 16  # tokens
Progress = Callable[[Iterable[Any], int, str], Iterable[Any]]


@dataclass
class Settings:
    """How a comparison is run. `methods`: `dsd` and `mtv` stand for the best of `TUNED` on other prompts of the task;
    policies of ours by name; those of `OUTSIDE`."""

    methods: Sequence[str]
    max_tokens: int | None = None  # None: the task's own
    tuning_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0


@dataclass
class Conversation:
    """The prompts of an item's turns, and the answers to them."""

    prompts: list[list[int]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)


class Comparison:
    """Runs what a journal lacks."""

    def __init__(self, decoder: Decoder, settings: Settings, journal: Journal, trust_remote_code: bool = False,
                 methods: dict[str, Method] | None = None) -> None:
        """`methods`: further ones by name, for what `settings` asks that is none of ours."""
        self.decoder, self.s, self.journal = decoder, settings, journal
        self.added = dict(methods or {})
        self.trust = trust_remote_code
        self.others: dict[str, Method] = {}
        self.done = {(r["task"], r["item"], r["method"]): r for r in journal.of("row")}
        self.judged = {(r["task"], r["item"], name) for r in journal.of("judged") for name in r["score"]}
        self.tuned = {(r["task"], r["method"]): r["chosen"] for r in journal.of("tuned")}
        self.session = 1 + max((r["session"] for r in self.done.values()), default=0)

    def run(self, chosen: Chosen, progress: Progress = lambda x, n, name: x) -> None:
        """Tune, then measure one task."""
        limit = self._limit(chosen)
        items = [item for item in chosen.items if self._fits(item, limit)]
        if len(items) < 2:
            raise DraftsmithError(f"task '{chosen.task.name}': {len(items)} of {len(chosen.items)} prompts fit the "
                                  f"target's context of {self.decoder.runner.context} tokens; 2 are needed")
        self._same_source(chosen)
        self._tune(chosen, progress)
        methods = {name: self._method(chosen.task.name, name) for name in self.s.methods}
        missing = [(i, item) for i, item in enumerate(items) if not self._complete(chosen, item)]
        if missing:
            for method in methods.values():  # the first runs are slower, and not counted
                self._converse(chosen, items[0], method, min(WARM_UP, limit))
        for i, item in progress(missing, len(missing), chosen.task.name):
            for name in rotated(list(methods), i):
                if (chosen.task.name, item.id, name) not in self.done:
                    self._measure(chosen, item, name, methods[name])
            self._judge(chosen, item)

    def _complete(self, chosen: Chosen, item: Item) -> bool:
        keys = [(chosen.task.name, item.id, name) for name in self.s.methods]
        return all(key in self.done and key in self.judged for key in keys)

    def _same_source(self, chosen: Chosen) -> None:
        """Prompts are known by their names: a source that has changed would pair different ones."""
        name = chosen.task.name
        before = {r["item"]: r["content"] for r in self.journal.of("prompt") if r["task"] == name}
        for item in chosen.items:
            content = sha256_json(asdict(item))
            if before.get(item.id, content) != content:
                raise DraftsmithError(f"task '{name}': prompt '{item.id}' is not what it was when rows were measured; "
                                      "choose another 'out'")
            if item.id not in before:
                self.journal.add({"what": "prompt", "task": name, "item": item.id, "content": content})

    def _limit(self, chosen: Chosen) -> int:
        return self.s.max_tokens or chosen.task.max_tokens

    def _fits(self, item: Item, limit: int) -> bool:
        prompt = self._prompt(item, [])
        return bool(prompt) and len(prompt) + limit <= self.decoder.runner.context

    def _prompt(self, item: Item, answers: list[Answer]) -> list[int]:
        """Ids of the turn after those that were answered."""
        tokenizer = self.decoder.tokenizer
        if item.text is not None:
            return list(tokenizer(item.text).input_ids)
        messages = [{"role": "system", "content": item.system}] if item.system else []
        for turn, answer in zip(item.turns, [*(a.text for a in answers), None], strict=False):
            messages.append({"role": "user", "content": turn})
            if answer is not None:
                messages.append({"role": "assistant", "content": answer})
        if not getattr(tokenizer, "chat_template", None):  # a model that was not taught to chat: what was said, as text
            return list(tokenizer("\n\n".join(m["content"] for m in messages)).input_ids)
        return chat_ids(tokenizer, messages)

    def _params(self, chosen: Chosen, item: Item, limit: int) -> SamplingParams:
        # A seed of its own for each prompt: with the same one all would draw the same noise.
        seed = self.s.seed * 1_000_003 + hash_of(item.id) if self.s.temperature else None
        return SamplingParams(max_tokens=limit, temperature=self.s.temperature, stop=chosen.task.stop, seed=seed)

    def _converse(self, chosen: Chosen, item: Item, method: Method, limit: int) -> Conversation:
        """All turns, as far as they fit the context."""
        talk = Conversation()
        for _ in range(max(1, len(item.turns))):
            prompt = self._prompt(item, talk.answers)
            if len(prompt) + limit > self.decoder.runner.context:
                break
            talk.prompts.append(prompt)
            talk.answers.append(method(prompt, self._params(chosen, item, limit)))
        return talk

    def _method(self, task: str, name: str) -> Method:
        name = self.tuned.get((task, name), name)
        if name in self.added:
            return self.added[name]
        if name in OUTSIDE:
            if not self.others:
                wanted = [n for n in self.s.methods if n in OUTSIDE]
                self.others = outside(self.decoder, wanted, self.trust)
            return self.others[name]
        return ours(self.decoder, name)

    def _tune(self, chosen: Chosen, progress: Progress) -> None:
        """Choose the length and the tree with the most tokens a second on the task's other prompts."""
        task, limit = chosen.task.name, min(self.s.tuning_tokens, self._limit(chosen))
        for name in (n for n in TUNED if n in self.s.methods and (task, n) not in self.tuned):
            items = [item for item in chosen.tuning if self._fits(item, limit)]
            if not items:
                raise DraftsmithError(f"task '{task}': '{name}' is tuned on other prompts, and none is left that fits; "
                                      "it needs a source with more prompts")
            candidates = {candidate: ours(self.decoder, candidate) for candidate in TUNED[name]}
            rates: dict[str, list[float]] = {candidate: [] for candidate in candidates}
            for method in candidates.values():
                self._converse(chosen, items[0], method, min(WARM_UP, limit))
            for i, item in progress(list(enumerate(items)), len(items), f"{task}: tuning {name}"):
                for candidate in rotated(list(rates), i):
                    talk = self._converse(chosen, item, candidates[candidate], limit)
                    rates[candidate].append(sum(len(a.ids) for a in talk.answers)
                                            / sum(a.seconds for a in talk.answers))
            first = next(iter(rates.values()))
            over = {candidate: paired_ratio(values, first).mean for candidate, values in rates.items()}
            best = max(over, key=lambda candidate: over[candidate])
            self.tuned[task, name] = best
            self.journal.add({"what": "tuned", "task": task, "method": name, "chosen": best, "over_first": over,
                              "prompts": len(items)})

    def _measure(self, chosen: Chosen, item: Item, name: str, method: Method) -> None:
        energy = Energy()
        talk = self._converse(chosen, item, method, self._limit(chosen))
        row = {"what": "row", "task": chosen.task.name, "item": item.id, "kind": item.kind, "method": name,
               "policy": self.tuned.get((chosen.task.name, name), name), "session": self.session,
               "joules": energy.joules(), **figures_of(self.decoder, talk)}
        self.done[chosen.task.name, item.id, name] = row
        self.journal.add(row)

    @torch.no_grad()
    def _judge(self, chosen: Chosen, item: Item) -> None:
        """Whose text differs from plain decoding's, by how much; the scores; and how far the draft is from the text."""
        task = chosen.task.name
        rows = {name: self.done[task, item.id, name] for name in self.s.methods
                if (task, item.id, name) not in self.judged}
        found: dict[str, Any] = {"what": "judged", "task": task, "item": item.id, "score": {}, "apart": {},
                                 "divergence": {}, "problem": {}}
        scores: dict[str, tuple[float | None, str]] = {}  # one text has one score
        for name, row in rows.items():
            text = row["texts"][-1]
            if text not in scores:
                scores[text] = self._score(chosen, item, text)
            found["score"][name], problem = scores[text]
            if problem:
                found["problem"][name] = problem
        plain = self.done[task, item.id, PLAIN]
        prompts = self._prompts(item, plain)
        for name, row in rows.items():
            first = self._parting(chosen, item, prompts, row, plain)
            if first is not None:
                found["divergence"][name] = {k: min(v, 1e9) for k, v in asdict(first).items()}
            found["apart"][name] = first is not None and not first.excused
        found["perplexity_ratio"] = self._perplexity_ratio(prompts, plain["ids"])
        self.judged.update((task, item.id, name) for name in rows)
        self.journal.add(found)

    @staticmethod
    def _score(chosen: Chosen, item: Item, text: str) -> tuple[float | None, str]:
        try:
            return chosen.task.score(item, text), ""
        except DraftsmithError:
            raise
        except Exception as error:  # of a scorer on what a model wrote: that answer has no score, the others have
            return None, repr(error)

    def _parting(self, chosen: Chosen, item: Item, prompts: list[list[int]], row: dict[str, Any],
                 plain: dict[str, Any]) -> Divergence | None:
        """The first place where an answer leaves plain decoding's. With a seed both draw the same noise."""
        params, score = self._params(chosen, item, 1), None
        if params.seed is not None:
            noise = GumbelNoise(params.seed, self.decoder.runner.vocab_size)

            def score(logits: torch.Tensor, position: int) -> torch.Tensor:
                return torch.log_softmax(logits / params.temperature, -1) + noise.gumbel(position).to(logits.device)

        triples = zip(prompts, row["ids"], plain["ids"], strict=False)
        return next((d for d in (compare(self.decoder.runner, *t, score) for t in triples) if d is not None), None)

    def _prompts(self, item: Item, row: dict[str, Any]) -> list[list[int]]:
        """The prompts of a row's turns, made again from its texts."""
        answers: list[Answer] = []
        prompts = []
        for ids, text in zip(row["ids"], row["texts"], strict=True):
            prompts.append(self._prompt(item, answers))
            answers.append(Answer(ids, text, 0.0, 0.0))
        return prompts

    def _perplexity_ratio(self, prompts: list[list[int]], answers: list[list[int]]) -> float | None:
        """ppl of the draft over ppl of the target, on the first answer; None without a draft."""
        draft, target = self.decoder.draft, self.decoder.runner
        if draft is None or not answers or len(answers[0]) < 2 or len(prompts[0]) + len(answers[0]) > draft.context:
            return None
        text, n = [*prompts[0], *answers[0]], len(answers[0])
        ids, device = text[:-1], target.device
        _, logits = target.forward(torch.tensor([ids], device=device), target.new_cache(1, len(ids)), n)
        cache = draft.new_cache(len(ids), prompts[0])
        rows = {token: row for row, token in enumerate(cache.head_ids.tolist())}
        small = draft.forward(torch.tensor([ids], device=device), cache, draft.shape.variants()[-1], n)
        meter = PerplexityMeter()
        meter.target = dict(enumerate(log_probs_at(logits[0], answers[0])))
        meter.draft = dict(enumerate(log_probs_in_head(small, rows, answers[0])))
        return meter.ratio()


def hash_of(text: str) -> int:
    """A number of a text, the same in every process."""
    return zlib.crc32(text.encode())


def figures_of(decoder: Decoder, talk: Conversation) -> dict[str, Any]:
    """What is kept of an item's answers: sums over its turns, the time to the first token of the first."""
    stats = [a.stats for a in talk.answers if a.stats is not None]
    row: dict[str, Any] = {
        "texts": [a.text for a in talk.answers], "ids": [a.ids for a in talk.answers],
        "tokens": sum(len(a.ids) for a in talk.answers), "seconds": sum(a.seconds for a in talk.answers),
        "ttft": talk.answers[0].ttft if talk.answers else 0.0, "turns": len(talk.answers),
    }
    if not stats:
        return row
    names = ("prompt_tokens", "steps", "drafted", "verified", "accepted", "rejected", "wasted")
    work = [work_of(decoder, s) for s in stats]
    policy: dict[str, float] = {}
    for s in stats:
        for key, value in s.policy.items():
            policy[key] = policy.get(key, 0.0) + value
    order = {v.name: i for i, v in enumerate(decoder.draft.shape.variants())} if decoder.draft else {}
    rounds = [[r.emitted, r.drafted, r.accepted, order[r.variant.name] if r.variant else -1,
               round(1e3 * r.target_seconds, 3), round(1e3 * r.draft_seconds, 3), r.read, turn]
              for turn, a in enumerate(talk.answers) for r in a.rounds]
    return {
        **row, **{name: sum(getattr(s, name) for s in stats) for name in names},
        "accepted_by_position": [sum(column) for column in zip(*(s.accepted_by_position for s in stats), strict=True)],
        "judged_by_position": [sum(column) for column in zip(*(s.judged_by_position for s in stats), strict=True)],
        "parts": {part: sum(s.parts.get(part, 0.0) for s in stats) for part in stats[0].parts},
        "target_flops": sum(w.target for w in work), "draft_flops": sum(w.draft for w in work), "policy_counts": policy,
        "rounds": rounds, "sources": talk.answers[0].sources,
    }
