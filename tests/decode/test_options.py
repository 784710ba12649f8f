"""Generation options: the meaning other engines give them, the same with every policy, refused when senseless."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import torch
from conftest import make_target_model
from draftsmith.data import DraftsmithError
from draftsmith.decode import Decoder, GenerationOutput, SamplingParams
from transformers import AutoModelForCausalLM

POLICIES = ["ar", "fixed(4)", "fixed(3,2L)", "mtv(3,2,2)", "hybrid(3)", "paper", "goodput"]
PROMPT = "one two one two one"
LENGTH = 32

every_policy = pytest.mark.parametrize("policy", POLICIES)


def generate(decoder: Decoder, policy: str, **changes: Any) -> GenerationOutput:
    return decoder.generate(PROMPT, SamplingParams(**{"max_tokens": LENGTH, "ignore_eos": True, **changes}), policy)


@every_policy
@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_repetition_penalty_is_that_of_transformers(decoder: Decoder, policy: str, penalty: float) -> None:
    model = AutoModelForCausalLM.from_pretrained(decoder.target.name)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([decoder.prompt_ids(PROMPT)])
    stock = model.generate(ids, max_new_tokens=LENGTH, do_sample=False, repetition_penalty=penalty)[0, ids.shape[1] :]
    assert generate(decoder, policy, repetition_penalty=penalty).token_ids == stock.tolist()


@every_policy
def test_presence_and_frequency_penalties_push_repeats_away(decoder: Decoder, policy: str) -> None:
    """Token by token, against the formula over the answer so far."""
    found = generate(decoder, policy, presence_penalty=1.0, frequency_penalty=0.5).token_ids
    model, prompt = make_target_model(), decoder.prompt_ids(PROMPT)
    for i, token in enumerate(found):
        logits = model(input_ids=torch.tensor([[*prompt, *found[:i]]])).logits[0, -1].clone()
        for seen, count in Counter(found[:i]).items():
            logits[seen] -= 1.0 + 0.5 * count
        assert int(logits.argmax()) == token, i


@every_policy
def test_bias_forces_and_forbids(decoder: Decoder, policy: str) -> None:
    plain = generate(decoder, policy).token_ids
    assert set(generate(decoder, policy, logit_bias={65: 100.0}).token_ids) == {65}
    forbidden = {token: -100.0 for token in set(plain)}
    assert not set(generate(decoder, policy, logit_bias=forbidden).token_ids) & set(plain)


@every_policy
def test_a_sampled_text_with_a_seed_is_the_same_under_every_option(decoder: Decoder, policy: str) -> None:
    options: dict[str, Any] = dict(temperature=1.0, seed=3, min_p=0.02, repetition_penalty=1.2, frequency_penalty=0.3,
                                   logit_bias={70: 1.0})
    assert generate(decoder, policy, **options).token_ids == generate(decoder, "ar", **options).token_ids


@every_policy
def test_min_p_keeps_only_tokens_near_the_likeliest(decoder: Decoder, policy: str) -> None:
    """At 1 only the likeliest is left, whatever the temperature."""
    assert generate(decoder, policy, temperature=2.0, min_p=1.0).token_ids == generate(decoder, "ar").token_ids


@every_policy
def test_logprobs_are_the_targets_own_whatever_was_drafted(decoder: Decoder, policy: str) -> None:
    output = generate(decoder, policy, logprobs=3, repetition_penalty=1.3)
    ids = torch.tensor([[*decoder.prompt_ids(PROMPT), *output.token_ids]])
    logp = torch.log_softmax(make_target_model()(input_ids=ids).logits[0], -1)
    start = ids.shape[1] - LENGTH - 1
    for i, token in enumerate(output.tokens):
        assert token.logprob == pytest.approx(float(logp[start + i, token.id]), abs=1e-4)
        best = logp[start + i].topk(3)
        assert [t for t, _ in token.top_logprobs] == best.indices.tolist()
        assert [v for _, v in token.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert all(t.logprob is None and not t.top_logprobs for t in generate(decoder, policy).tokens)


class Digits:
    """A grammar over bytes: a JSON list of single digits. Complains when shown a text that cannot be."""

    OPEN, CLOSE, COMMA = ord("["), ord("]"), ord(",")

    def __init__(self, decoder: Decoder) -> None:
        self.text = decoder.tokenizer.decode
        single = decoder.tokenizer.convert_tokens_to_ids
        self.ids = {c: single(c) for c in "[],0123456789"}
        self.end = 258

    def __call__(self, answer: list[int], logits: torch.Tensor) -> torch.Tensor:
        assert self.end not in answer, "a text that has ended is not continued"
        text = self.text(answer)
        if not text:
            allowed = "["
        elif text[-1] in "[,":
            allowed = "0123456789"
        elif text[-1].isdigit():
            allowed = "]" if len(text) > 8 else ",]"
        else:
            assert text[-1] == "]", text
            allowed = ""
        keep = [self.ids[c] for c in allowed] or [self.end]
        out = torch.full_like(logits, float("-inf"))
        out[keep] = logits[keep]
        return out


@every_policy
@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "seed": 4}, {"temperature": 1.5}],
                         ids=["greedy", "seeded", "sampled"])
def test_a_grammar_holds_at_every_position_of_a_block(decoder: Decoder, policy: str, options: dict[str, Any]) -> None:
    output = generate(decoder, policy, logits_processors=[Digits(decoder)], ignore_eos=False, **options)
    assert output.finish_reason == "stop"
    values = json.loads(output.text)
    assert all(0 <= v <= 9 for v in values)
    assert 1 <= len(values) <= 5


@every_policy
def test_a_dead_end_that_is_only_drafted_is_no_error(decoder: Decoder, policy: str) -> None:
    """Drafted tokens that will be rejected lead to texts that the processors need not know how to continue."""
    reference = generate(decoder, "ar").token_ids

    def only_the_reference(answer: list[int], logits: torch.Tensor) -> torch.Tensor:
        known = answer == reference[: len(answer)]
        return logits if known else torch.full_like(logits, float("-inf"))

    assert generate(decoder, policy, logits_processors=[only_the_reference]).token_ids == reference


def test_bias_keys_may_be_strings_as_in_json(decoder: Decoder) -> None:
    assert set(generate(decoder, "ar", logit_bias={"65": 100}).token_ids) == {65}


@every_policy
def test_a_grammar_without_a_way_on_is_a_clear_error(decoder: Decoder, policy: str) -> None:
    def dead_end(answer: list[int], logits: torch.Tensor) -> torch.Tensor:
        return torch.full_like(logits, float("-inf")) if len(answer) >= 5 else logits

    with pytest.raises(DraftsmithError, match="leave no token possible at position"):
        generate(decoder, policy, logits_processors=[dead_end])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_p": 1.5}, "min_p must be in [0, 1], not 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be in"),
        ({"presence_penalty": 3.0}, "presence_penalty must be in [-2, 2]"),
        ({"frequency_penalty": -3.0}, "frequency_penalty must be in [-2, 2]"),
        ({"logit_bias": {3: 101.0}}, "logit_bias values must be in [-100, 100]"),
        ({"logit_bias": {999: 1.0}}, "logit_bias names token id 999, outside the target's vocabulary of 259"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias maps token ids to numbers"),
        ({"logprobs": 21}, "logprobs must be from 0 to 20"),
    ],
)
def test_a_senseless_option_is_refused_by_name(decoder: Decoder, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DraftsmithError) as caught:
        generate(decoder, "ar", **options)
    assert message in str(caught.value)
