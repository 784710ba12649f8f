"""Answers that follow a grammar: a logits processor on llguidance (extra `[grammar]`).

    params = SamplingParams(logits_processors=[json_schema({"type": "object", ...}, decoder)])

The processor is a function of the answer so far, as `SamplingParams` asks: rows of a block that continue each other
only move the parser along, others rewind it.
"""

from __future__ import annotations

import copy
import functools
import json
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from draftsmith.data import DraftsmithError

if TYPE_CHECKING:
    from .decoder import Decoder


class Grammar:
    """A grammar over a decoder's tokens. May serve several requests, one after the other or in turns."""

    def __init__(self, grammar: str, decoder: Decoder) -> None:
        """`grammar`: compiled by `LLMatcher.grammar_from_*`. Raises `DraftsmithError` if it is not valid."""
        from llguidance import LLMatcher

        if problem := LLMatcher.validate_grammar(grammar, None):
            raise DraftsmithError(f"the grammar is not valid: {problem.strip().splitlines()[0]}")
        self.eos_ids, self.read = sorted(decoder.eos_ids), list[int]()
        self.make = functools.partial(LLMatcher, _tokens(decoder), grammar)
        self.matcher: Any = self.make()
        self._check()

    def another(self) -> Grammar:
        """The same grammar with a parser of its own, for an answer that is written beside this one's."""
        other = copy.copy(self)
        other.matcher, other.read = self.make(), []
        return other

    def _check(self) -> None:
        """A parser that has failed, at its limits for instance, allows nothing any more: say so, and start anew."""
        if self.matcher.is_error():
            problem = self.matcher.get_error() or "its parser failed"
            self.matcher, self.read = self.make(), []
            raise DraftsmithError(f"the grammar cannot be followed: {problem.strip().splitlines()[0]}")

    def __call__(self, answer: list[int], logits_V: torch.Tensor) -> torch.Tensor:
        """Logits for the token after `answer`; -inf for what the grammar forbids there."""
        self._follow(answer)
        allowed = torch.zeros(len(logits_V), dtype=torch.bool)
        if self.matcher.is_stopped():  # complete: nothing but an end may follow
            allowed[self.eos_ids] = True
        else:
            bits = np.unpackbits(np.frombuffer(self.matcher.compute_bitmask(), np.uint8), bitorder="little")
            self._check()
            size = min(len(bits), len(logits_V))
            allowed[:size] = torch.from_numpy(bits[:size].astype(bool))
        return logits_V.masked_fill(~allowed.to(logits_V.device), float("-inf"))

    def _follow(self, answer: list[int]) -> None:
        """Bring the parser to the end of an answer."""
        same = 0
        while same < min(len(self.read), len(answer)) and self.read[same] == answer[same]:
            same += 1
        if same < len(self.read) and not self.matcher.rollback(len(self.read) - same):
            self.matcher.reset()
            same = 0
        rest = answer[same:]
        taken = self.matcher.try_consume_tokens(rest) if rest else 0
        self.read = answer[: same + taken]
        self._check()
        if taken < len(rest) and not self.matcher.is_stopped():
            raise DraftsmithError(f"the grammar does not allow token {rest[taken]} at place {same + taken} of the "
                                  "answer")


def json_schema(schema: dict[str, Any] | str, decoder: Decoder) -> Grammar:
    """Answers that are JSON and valid against a schema."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return _grammar("json_schema", text, decoder)


def regex(pattern: str, decoder: Decoder) -> Grammar:
    """Answers that match a regular expression from end to end."""
    return _grammar("regex", pattern, decoder)


def lark(rules: str, decoder: Decoder) -> Grammar:
    """Answers of a context-free grammar in Lark's notation."""
    return _grammar("lark", rules, decoder)


def _grammar(kind: str, text: str, decoder: Decoder) -> Grammar:
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise DraftsmithError("grammars need llguidance: pip install 'draftsmith[grammar]'") from error
    try:
        compiled: str = getattr(LLMatcher, f"grammar_from_{kind}")(text)
    except ValueError as error:
        raise DraftsmithError(f"the grammar is not valid: {str(error).strip().splitlines()[0]}") from error
    return Grammar(compiled, decoder)


# By decoder, which it must not keep alive.
_known: weakref.WeakKeyDictionary[Decoder, Any] = weakref.WeakKeyDictionary()


def _tokens(decoder: Decoder) -> Any:
    """The tokenizer as llguidance reads it; takes a second for a large one."""
    import llguidance.hf

    if decoder not in _known:
        try:
            _known[decoder] = llguidance.hf.from_tokenizer(decoder.tokenizer, eos_token=sorted(decoder.eos_ids) or None)
        except ValueError as error:
            raise DraftsmithError(f"grammars cannot read this target's tokenizer: {error}") from error
    return _known[decoder]
