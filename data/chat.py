"""Chat templates: prompts as token ids, and loss masks on assistant tokens by spans."""

from __future__ import annotations

import warnings
from typing import Any

from .io import DraftsmithError
from .text import Messages, Sample


def prompt_ids(tokenizer: Any, sample: Sample) -> list[int]:
    """Token ids of a sample as a prompt: the chat template with a generation prompt, or the raw text."""
    if sample.messages is None:
        return list(tokenizer(sample.text).input_ids)
    messages = list(sample.messages)
    while messages and messages[-1]["role"] == "assistant":  # a conversation is prompted up to its last answer
        messages.pop()
    return chat_ids(tokenizer, messages) if messages else []


def encode_prompts(tokenizer: Any, samples: list[Sample], limit: int) -> tuple[list[Sample], list[list[int]]]:
    """The samples usable as prompts, of 1 to `limit` tokens, with their token ids.

    Raises `DraftsmithError` when none is.
    """
    pairs = [(sample, prompt_ids(tokenizer, sample)) for sample in samples]
    kept = [(sample, ids) for sample, ids in pairs if 0 < len(ids) <= limit]
    if not kept:
        raise DraftsmithError(f"none of {len(samples)} prompts has 1 to {limit} tokens")
    return [sample for sample, _ in kept], [ids for _, ids in kept]


def chat_ids(tokenizer: Any, messages: Messages) -> list[int]:
    """Token ids of `messages` followed by the template's generation prompt."""
    if not getattr(tokenizer, "chat_template", None):
        if len(messages) == 1:
            return list(tokenizer(messages[0]["content"]).input_ids)
        raise DraftsmithError("this tokenizer has no chat template: give one text prompt, not several messages")
    text = render(tokenizer, messages, generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def render(tokenizer: Any, messages: Messages, generation_prompt: bool) -> str:
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt))
    except Exception as error:  # jinja raises its own types for a role order that the template refuses
        raise DraftsmithError(f"the chat template refuses these messages: {error}") from error


def assistant_mask(tokenizer: Any, messages: Messages) -> tuple[list[int], list[bool]]:
    """Token ids of a whole conversation and, for each token, whether the assistant wrote it.

    A turn's span runs from the end of the rendering of everything before it, generation prompt
    included, to the end of its end-of-turn token. Returns an all-false mask, with a warning, when the
    template rewrites earlier turns so that spans cannot be told; never a silent all-true one.
    """
    text = render(tokenizer, messages, generation_prompt=False)
    spans: list[tuple[int, int]] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or i == 0:  # nothing that it would answer
            continue
        before = render(tokenizer, messages[:i], generation_prompt=True)
        through = render(tokenizer, messages[: i + 1], generation_prompt=False)
        if not text.startswith(before) or not text.startswith(through):
            warnings.warn("the chat template rewrites earlier turns: no assistant spans, row masked", stacklevel=2)
            spans = []
            break
        # What the template puts after the end-of-turn token (a newline) was not written by the assistant.
        spans.append((len(before), len(through.rstrip())))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = [any(a <= start and end <= b for a, b in spans) and end > start
            for start, end in encoded["offset_mapping"]]
    return list(encoded["input_ids"]), mask
