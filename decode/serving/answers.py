"""Answers as OpenAI's clients read them."""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ..policies import Round
from ..stats import Stats, Token
from .engine import Event

Json = dict[str, Any]


@lru_cache(maxsize=1)
def _byte_letters() -> dict[str, int]:
    """Byte-level tokenizers write bytes that are no printable characters of Latin-1 as those from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(b): b for b in printable}
    others = [b for b in range(256) if b not in set(printable)]
    return letters | {chr(256 + i): b for i, b in enumerate(others)}


class TokenTexts:
    """The text of single tokens, as bytes: half a character's too, and with the space that a word begins with."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.known = tokenizer, dict[int, bytes]()
        anchor = tokenizer("a", add_special_tokens=False).input_ids
        self.anchor: list[int] = list(anchor[-1:])
        self.before = self._decode(self.anchor)

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def __call__(self, token: int) -> bytes:
        if token not in self.known:
            self.known[token] = self._bytes(token)
        return self.known[token]

    def _bytes(self, token: int) -> bytes:
        text = self._decode([*self.anchor, token])  # alone, tokenizers of one kind drop a leading space
        text = text[len(self.before) :] if text.startswith(self.before) else self._decode([token])
        if "\ufffd" not in text:
            return text.encode()
        piece = str(self.tokenizer.convert_ids_to_tokens(token))
        if found := re.fullmatch(r"<0x([0-9A-F]{2})>", piece):
            return bytes([int(found[1], 16)])
        letters = _byte_letters()
        return bytes(letters[c] for c in piece) if all(c in letters for c in piece) else text.encode()


@dataclass
class Answer:
    """One choice, as far as it has come."""

    text: str = ""
    tokens: list[tuple[Token, str]] = field(default_factory=list)
    finish_reason: str | None = None
    stats: Stats | None = None

    def take(self, event: Event) -> None:
        self.text += "".join(text for _, text in event.pieces)
        self.tokens += event.pieces
        self.finish_reason, self.stats = event.finish_reason, event.stats


class Scribe:
    """Writes the answers to one request, whole or in chunks."""

    def __init__(self, model: str, texts: TokenTexts, chat: bool, logprobs: int | None, provenance: bool,
                 alphas: dict[str, float], choices: int = 1, echo: list[str] | None = None) -> None:
        """`alphas`: by variant. `choices`: answers to each prompt. `echo`: for each of them a text to begin with."""
        self.choices = choices
        self.model, self.texts, self.chat, self.logprobs = model, texts, chat, logprobs
        self.provenance, self.alphas, self.echo = provenance, alphas, echo
        self.id = ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12)
        self.created = int(time.time())
        self.begun: dict[int, int] = {}  # choice -> characters of its text sent so far

    def whole(self, answers: dict[int, Answer], prompt_tokens: int) -> Json:
        """The response to a request that does not stream."""
        choices = [self._choice(i, answer) for i, answer in sorted(answers.items())]
        return {**self._head(), "choices": choices, "usage": usage(answers, prompt_tokens, self.choices)}

    def chunk(self, event: Event) -> Json:
        """A piece of one choice."""
        first, before = event.index not in self.begun, self.begun.get(event.index, 0)
        text = "".join(text for _, text in event.pieces)
        choice: Json = {"index": event.index, "finish_reason": event.finish_reason}
        if self.chat:
            choice["delta"] = {**({"role": "assistant"} if first else {}), "content": text}
        else:
            choice["text"] = text = (self.echo[event.index] if first and self.echo else "") + text
        choice["logprobs"] = self._logprobs(event.pieces, before)
        if self.provenance:
            choice["draftsmith"] = self._provenance(event.pieces, event.stats)
            choice["draftsmith"]["round"] = event.round and self._round(event.round)
        self.begun[event.index] = before + len(text)
        return {**self._head(".chunk"), "choices": [choice]}

    def last(self, answers: dict[int, Answer], prompt_tokens: int) -> Json:
        """The chunk after all others, where usage was asked for."""
        return {**self._head(".chunk"), "choices": [], "usage": usage(answers, prompt_tokens, self.choices)}

    def _head(self, part: str = "") -> Json:
        kind = f"chat.completion{part}" if self.chat else "text_completion"  # whose chunks are called no other
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _choice(self, index: int, answer: Answer) -> Json:
        choice: Json = {"index": index, "finish_reason": answer.finish_reason}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": answer.text, "refusal": None}
        else:
            choice["text"] = (self.echo[index] if self.echo else "") + answer.text
        choice["logprobs"] = self._logprobs(answer.tokens, 0)
        if self.provenance:
            choice["draftsmith"] = self._provenance(answer.tokens, answer.stats)
        return choice

    def _logprobs(self, pieces: list[tuple[Token, str]], offset: int) -> Json | None:
        if self.logprobs is None:
            return None
        if self.chat:
            return {"content": [{**self._named(token.id, token.logprob),
                                 "top_logprobs": [self._named(i, value) for i, value in token.top_logprobs]}
                                for token, _ in pieces], "refusal": None}
        offsets = []
        for _, text in pieces:
            offsets.append(offset)
            offset += len(text)
        return {"tokens": [self._text(token.id) for token, _ in pieces],
                "token_logprobs": [token.logprob for token, _ in pieces],
                "top_logprobs": [{self._text(i): value for i, value in token.top_logprobs} for token, _ in pieces],
                "text_offset": offsets}

    def _named(self, token: int, logprob: float | None) -> Json:
        raw = self.texts(token)
        return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}

    def _text(self, token: int) -> str:
        return self.texts(token).decode(errors="replace")

    def _provenance(self, pieces: list[tuple[Token, str]], stats: Stats | None) -> Json:
        tokens = [{"id": token.id, "text": text, "source": token.source, "variant": token.variant, "p": token.p,
                   "q": token.q, "replaced": [self._text(i) for i in token.replaced]} for token, text in pieces]
        return {"tokens": tokens, "stats": stats and figures(stats)}

    def _round(self, finished: Round) -> Json:
        variant = finished.variant.name if finished.variant else "lookup" if finished.drafted else None
        return {"drafted": finished.drafted, "accepted": finished.accepted, "variant": variant,
                "alpha": self.alphas.get(variant or ""), "seconds": finished.draft_seconds + finished.target_seconds}


def usage(answers: dict[int, Answer], prompt_tokens: int, choices: int) -> Json:
    """`prompt_tokens` of all prompts, of which each has so many `choices`."""
    stats = {i: answer.stats for i, answer in answers.items() if answer.stats}
    written = sum(s.emitted for s in stats.values())
    # Of what a prompt's first answer found; the others find all of it.
    cached = sum(s.cached_tokens for i, s in stats.items() if i % choices == 0)
    return {"prompt_tokens": prompt_tokens, "completion_tokens": written, "total_tokens": prompt_tokens + written,
            "prompt_tokens_details": {"cached_tokens": cached}}


def figures(stats: Stats) -> Json:
    names = ("prompt_tokens", "cached_tokens", "emitted", "steps", "drafted", "accepted", "rejected", "wasted",
             "acceptance_rate", "tokens_per_step", "ttft", "seconds", "variants", "policy")
    return {name: getattr(stats, name) for name in names}
