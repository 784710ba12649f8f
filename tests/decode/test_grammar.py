"""Answers under a grammar of llguidance: valid whatever drafts, and the same for every policy."""

from __future__ import annotations

import gc
import json
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.data import DraftsmithError
from draftsmith.decode import Decoder, SamplingParams, grammar

pytest.importorskip("llguidance", reason="the extra [grammar] is not installed")

POLICIES = ["ar", "fixed(4)", "mtv(3,2,1)", "lookup(3)", "paper", "goodput"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "rows": {"type": "integer", "maximum": 99}},
    "required": ["name", "rows"],
    "additionalProperties": False,
}


def write(decoder: Decoder, made: grammar.Grammar, policy: str, **changes: Any) -> str:
    params = SamplingParams(**{"max_tokens": 120, "logits_processors": [made], **changes})
    output = decoder.generate("Describe the table:", params, policy)
    assert output.finish_reason == "stop"
    return output.text


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 4}, {"temperature": 1.0}],
                         ids=["greedy", "seeded", "sampled"])
def test_an_answer_is_json_of_the_schema(decoder: Decoder, policy: str, sampling: dict[str, Any]) -> None:
    made = grammar.json_schema(SCHEMA, decoder)
    text = write(decoder, made, policy, **sampling)
    value = json.loads(text)
    assert set(value) == {"name", "rows"}
    assert isinstance(value["name"], str)
    assert value["rows"] <= 99
    if sampling != {"temperature": 1.0}:
        assert text == write(decoder, made, "ar", **sampling)  # the same object serves the next request


@pytest.mark.parametrize("policy", ["fixed(4)", "mtv(2,2)"])
def test_an_answer_matches_a_pattern(decoder: Decoder, policy: str) -> None:
    text = write(decoder, grammar.regex(r"[A-Z]{3}-[0-9]{4}", decoder), policy, temperature=1.0, seed=1)
    assert re.fullmatch(r"[A-Z]{3}-[0-9]{4}", text)


def test_an_answer_is_a_sentence_of_a_grammar(decoder: Decoder) -> None:
    rules = 'start: "SELECT " column " FROM " /[a-z]{1,5}/\ncolumn: "a" | "b"'
    text = write(decoder, grammar.lark(rules, decoder), "goodput", temperature=1.0, seed=2)
    assert re.fullmatch(r"SELECT [ab] FROM [a-z]{1,5}", text)


def test_requests_of_a_batch_take_turns_with_one_grammar(decoder: Decoder) -> None:
    made = grammar.json_schema(SCHEMA, decoder)
    params = SamplingParams(max_tokens=120, temperature=1.0, seed=9, n=3, logits_processors=[made])
    (answers,) = decoder.generate_batch(["Describe the table:"], params, "fixed(3)", slots=3)
    assert len({a.text for a in answers}) == 3
    for answer in answers:
        assert set(json.loads(answer.text)) == {"name", "rows"}


@pytest.mark.parametrize(("make", "text"), [
    (grammar.regex, "[a-"), (grammar.lark, "start: missing"), (grammar.json_schema, '{"type": "nonsense"}'),
    (grammar.json_schema, "{"),
])
def test_a_grammar_that_is_none_is_refused(decoder: Decoder, make: Any, text: str) -> None:
    with pytest.raises(DraftsmithError, match="the grammar is not valid"):
        make(text, decoder)


def test_a_text_that_the_grammar_cannot_read_is_named_and_spoils_nothing(decoder: Decoder) -> None:
    made = grammar.regex("[a-c]{4}", decoder)
    free = torch.zeros(decoder.runner.vocab_size)
    a, z = decoder.prompt_ids("az")
    with pytest.raises(DraftsmithError, match=f"does not allow token {z} at place 1|cannot be followed"):
        made([a, z], free)
    allowed = torch.isfinite(made([a], free)).nonzero()[:, 0].tolist()
    assert allowed == [decoder.prompt_ids(x)[0] for x in "abc"]


def test_a_grammar_does_not_keep_its_decoder(bundle_folder: Path) -> None:
    decoder = Decoder.load(bundle_folder)
    made, known = grammar.regex("a+", decoder), weakref.ref(decoder)
    del decoder
    gc.collect()
    assert known() is None
    assert made.matcher is not None
