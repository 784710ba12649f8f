"""The loop on a tiny real model: whose text it is, where it ends, what is counted, and bad input."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import assemble, make_draft, make_tokenizer, save_target
from draftsmith.data import DraftsmithError
from draftsmith.decode import Decoder, GenerationOutput, SamplingParams
from draftsmith.decode.loop import Generation
from draftsmith.decode.target import load_target
from draftsmith.decode.text import TextStream
from draftsmith.distill.init import build_draft
from transformers import AutoModelForCausalLM

POLICIES = ["ar", "fixed(1)", "fixed(4)", "fixed(16)", "fixed(3,2L)", "mtv(3,2,1)", "mtv(8,4,2,2,2)", "lookup(4)",
            "hybrid(4)", "paper", "goodput"]
PROMPTS = ["Hello world", "SELECT a FROM b", "\u00e9"]
LENGTH = 36
JAPANESE = "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0\u3067\u3059"


@pytest.fixture(scope="module")
def twin(printable: Path, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A decoder whose draft is the target itself: every layer, the whole vocabulary."""
    target = load_target(str(printable), dtype=torch.float64)
    draft = build_draft(target.model, [0, 1, 2, 3, 4], 2, (1.0, 1.5), torch.arange(259), [torch.arange(90)[None]])
    return assemble(printable, tmp_path_factory.mktemp("twin") / "bundle", draft, variant="5L")


def generate(decoder: Decoder, policy: str, prompt: Any = PROMPTS[0], **changes: Any) -> GenerationOutput:
    params = SamplingParams(**{"max_tokens": LENGTH, "ignore_eos": True, **changes})
    return decoder.generate(prompt, params, policy)


@pytest.fixture(scope="module")
def stock(printable: Path) -> dict[str, list[int]]:
    """Greedy ids of stock `transformers`, by prompt."""
    model = AutoModelForCausalLM.from_pretrained(printable, dtype=torch.float64)
    model.generation_config.eos_token_id = None
    tokenizer, texts = make_tokenizer(), {}
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer(prompt).input_ids])
        texts[prompt] = model.generate(ids, max_new_tokens=LENGTH, do_sample=False)[0, ids.shape[1] :].tolist()
    return texts


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_text_is_the_targets_own(plain: Decoder, stock: dict[str, list[int]], policy: str, prompt: str) -> None:
    output = generate(plain, policy, prompt)
    assert len(set(stock[prompt])) > 5
    assert output.token_ids == stock[prompt]
    assert output.finish_reason == "length"


def test_a_rollback_off_by_one_changes_the_text(
    plain: Decoder, stock: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison above would notice: positions shift when the cache keeps a rejected token."""
    monkeypatch.setattr(Generation, "_rollback", lambda self, *_: self.cache.crop(len(self.tokens)))
    output: list[int] = []
    chunks = plain.stream(PROMPTS[0], SamplingParams(max_tokens=3 * LENGTH, ignore_eos=True), "fixed(1)")
    while len(output) < LENGTH:
        output += [token.id for token, _ in next(chunks).pieces]
    assert output[:LENGTH] != stock[PROMPTS[0]]


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}],
    ids=["greedy", "sampled", "seeded"],
)
def test_the_target_as_its_own_draft_is_always_accepted(twin: Decoder, sampling: dict[str, Any]) -> None:
    stats = generate(twin, "fixed(4,5L)", max_tokens=31, **sampling).stats
    assert stats.acceptance_rate == 1.0
    assert (stats.steps, stats.accepted, stats.bonus) == (6, 24, 6)


@pytest.mark.parametrize("how", ["eos", "stop_token_ids"])
def test_the_end_inside_an_accepted_block_cuts_ids_and_text(
    twin: Decoder, stock: dict[str, list[int]], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = stock[PROMPTS[0]]
    at = next(i for i in range(3, len(ids)) if ids[i] not in ids[:i])  # fixed(8) covers tokens 1 to 8 in one round
    assert 3 <= at < 8
    if how == "eos":
        monkeypatch.setattr(twin, "eos_ids", frozenset({ids[at]}))
        output = generate(twin, "fixed(8)", ignore_eos=False)
    else:
        output = generate(twin, "fixed(8)", stop_token_ids=(ids[at],))
    assert output.token_ids == ids[: at + 1]
    assert output.text == twin.tokenizer.decode(ids[:at])
    assert output.finish_reason == "stop"
    assert output.tokens[-1].source == "accepted"
    assert output.stats.trimmed == 1  # the bonus after it
    assert output.stats.emitted == at + 1


@pytest.mark.parametrize("policy", ["ar", "fixed(8)"])
def test_a_stop_string_inside_an_accepted_block_is_cut_out(
    twin: Decoder, stock: dict[str, list[int]], policy: str
) -> None:
    ids = stock[PROMPTS[0]]
    text = twin.tokenizer.decode(ids)
    stop = text[3:5]
    end = text.index(stop) + len(stop)  # one character a token
    output = generate(twin, policy, stop=("never", stop))
    assert output.token_ids == ids[:end]
    assert output.text == text[: end - len(stop)]
    assert stop not in output.text
    assert output.finish_reason == "stop"
    assert output.stats.trimmed == (0 if policy == "ar" else 9 - (end - 1))


def test_of_two_stop_strings_the_earlier_one_ends_the_text(plain: Decoder, stock: dict[str, list[int]]) -> None:
    text = plain.tokenizer.decode(stock[PROMPTS[0]])
    output = generate(plain, "fixed(4)", stop=(text[20:23], text[7:10]))
    assert output.text == text[: min(text.index(text[20:23]), text.index(text[7:10]))]


def test_half_a_stop_string_at_the_end_belongs_to_the_text(plain: Decoder, stock: dict[str, list[int]]) -> None:
    text = plain.tokenizer.decode(stock[PROMPTS[0]])
    output = generate(plain, "fixed(4)", stop=(text[-2:] + "beyond",))
    assert output.text == text
    assert output.finish_reason == "length"


@pytest.mark.parametrize("count", [0, 1, 2, 3])
@pytest.mark.parametrize("policy", ["ar", "fixed(8)", "paper", "goodput"])
def test_max_tokens_is_never_overshot(twin: Decoder, stock: dict[str, list[int]], policy: str, count: int) -> None:
    output = generate(twin, policy, max_tokens=count)
    assert output.token_ids == stock[PROMPTS[0]][:count]
    assert len(output.text) == count
    assert output.finish_reason == "length"
    assert output.stats.emitted == count


def test_nothing_is_drafted_beyond_max_tokens(twin: Decoder) -> None:
    stats = generate(twin, "fixed(8)", max_tokens=6).stats
    assert (stats.drafted, stats.wasted, stats.trimmed) == (4, 0, 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_of_one_token_works(plain: Decoder, policy: str) -> None:
    alone = generate(plain, "ar", [65], max_tokens=12).token_ids
    assert generate(plain, policy, [65], max_tokens=12).token_ids == alone


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_is_refused(plain: Decoder, prompt: Any) -> None:
    with pytest.raises(DraftsmithError, match="prompt is empty"):
        generate(plain, "fixed(2)", prompt)


def test_a_prompt_longer_than_the_context_is_refused_with_numbers(plain: Decoder) -> None:
    with pytest.raises(DraftsmithError, match="600 tokens.* 512"):
        generate(plain, "fixed(2)", [5] * 600)


def test_a_token_id_outside_the_vocabulary_is_refused(plain: Decoder) -> None:
    with pytest.raises(DraftsmithError, match="token id 300 .* 259"):
        generate(plain, "ar", [5, 300])


@pytest.mark.parametrize("policy", ["ar", "fixed(8)"])
def test_text_ends_where_the_context_ends(plain: Decoder, policy: str) -> None:
    output = generate(plain, policy, [5] * 500, max_tokens=100)
    assert len(output.token_ids) == 12
    assert output.finish_reason == "length"


@pytest.mark.parametrize("policy", ["fixed(4)", "paper", "goodput"])
@pytest.mark.parametrize("prompt", [[7] * 60, [7] * 20], ids=["prompt too long", "text grows too long"])
def test_past_the_drafts_context_the_target_decodes_alone(
    printable: Path, tmp_path: Path, policy: str, prompt: list[int]
) -> None:
    target = load_target(str(printable), dtype=torch.float64)
    draft = make_draft(target)
    draft.config.max_position_embeddings = 40
    decoder = assemble(printable, tmp_path / "bundle", draft)
    output = generate(decoder, policy, prompt, max_tokens=40)
    assert output.token_ids == generate(decoder, "ar", prompt, max_tokens=40).token_ids
    if policy == "fixed(4)":
        assert (output.stats.drafted > 0) == (len(prompt) < 40)


def test_a_target_without_end_of_sequence_writes_to_the_limit(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    decoder = assemble(save_target(tmp_path / "target", tokenizer, eos_token_id=None), tmp_path / "bundle")
    assert decoder.eos_ids == frozenset()
    for policy in ("ar", "fixed(4)"):
        assert len(generate(decoder, policy, ignore_eos=False, min_tokens=5).token_ids) == LENGTH


@pytest.mark.parametrize("policy", ["ar", "fixed(4)", "fixed(4,5L)", "paper"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "seeded"])
def test_min_tokens_forbids_every_end_until_then(
    twin: Decoder, stock: dict[str, list[int]], policy: str, sampling: dict[str, Any]
) -> None:
    ends = set(range(0, 90, 2))  # a likely end at every position
    output = generate(twin, policy, stop_token_ids=tuple(ends), min_tokens=7, **sampling)
    assert len(output.token_ids) >= 8
    assert not ends & set(output.token_ids[:7])
    assert output.token_ids[-1] in ends
    assert output.token_ids == generate(twin, "ar", stop_token_ids=tuple(ends), min_tokens=7, **sampling).token_ids


def test_ignore_eos_keeps_stop_token_ids(
    twin: Decoder, stock: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = stock[PROMPTS[0]]
    monkeypatch.setattr(twin, "eos_ids", frozenset({ids[0]}))
    assert generate(twin, "fixed(2)", ignore_eos=False).token_ids == ids[:1]
    assert generate(twin, "fixed(2)").token_ids == ids
    last = next(i for i in range(2, LENGTH) if ids[i] not in ids[:i])
    assert generate(twin, "fixed(2)", stop_token_ids=(ids[last],)).token_ids == ids[: last + 1]


@pytest.mark.parametrize("when", ["prompt", "later"])
def test_logits_that_are_not_numbers_are_named_with_their_position(
    plain: Decoder, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner: Any = plain.runner
    bad = torch.full_like(runner.norm_weight, float("nan"))
    chunks = plain.stream([5, 6, 7], SamplingParams(temperature=1.0, ignore_eos=True), "ar")
    if when == "later":
        next(chunks)
    monkeypatch.setattr(runner, "norm_weight", bad)
    with pytest.raises(DraftsmithError, match=f"not finite at position {3 if when == 'prompt' else 4} "):
        next(chunks)


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0}, {"temperature": 1.0, "seed": 2}], ids=["greedy", "sampled", "seeded"]
)
def test_a_draft_gone_wrong_never_breaks_the_answer(printable: Path, tmp_path: Path, sampling: dict[str, Any]) -> None:
    target = load_target(str(printable), dtype=torch.float64)
    draft = make_draft(target)
    draft.norms["4"].weight.data.fill_(float("nan"))
    decoder = assemble(printable, tmp_path / "bundle", draft)
    with contextlib.suppress(DraftsmithError):  # a clear message is the other defined result
        assert len(generate(decoder, "fixed(3)", **sampling).token_ids) == LENGTH


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0}, {"temperature": 1.0, "seed": 2}], ids=["greedy", "sampled", "seeded"]
)
@pytest.mark.parametrize("policy", POLICIES)
def test_counters_reconcile(plain: Decoder, policy: str, sampling: dict[str, Any]) -> None:
    output = generate(plain, policy, max_tokens=40, **sampling)
    s = output.stats
    s.check()
    sources = [t.source for t in output.tokens]
    assert s.emitted == len(output.token_ids) == len(output.tokens) == 40
    assert s.drafted >= s.verified == s.accepted + s.rejected + s.wasted
    counted = {"accepted": s.accepted, "correction": s.corrections, "bonus": s.bonus, "ar": s.ar}
    assert {source: sources.count(source) for source in counted} == counted  # nothing is trimmed at max_tokens
    assert s.steps == s.corrections + s.bonus + s.ar - 1
    assert (sum(s.judged_by_position), sum(s.accepted_by_position)) == (s.accepted + s.rejected, s.accepted)
    assert [t.id for t in output.tokens] == output.token_ids
    assert all((t.q is not None) == (t.variant is not None) == (t.source == "accepted") for t in output.tokens)


@pytest.mark.parametrize("how", ["exception", "cancel"])
def test_a_stream_that_is_left_early_leaves_the_decoder_usable(
    plain: Decoder, stock: dict[str, list[int]], how: str
) -> None:
    chunks: Any = plain.stream(PROMPTS[0], SamplingParams(max_tokens=LENGTH, ignore_eos=True), "fixed(4)")
    if how == "cancel":
        next(chunks)
        chunks.close()
    else:
        with contextlib.suppress(ZeroDivisionError):
            for _ in chunks:
                raise ZeroDivisionError
    assert generate(plain, "fixed(4)").token_ids == stock[PROMPTS[0]]


@pytest.mark.parametrize("policy", ["ar", "fixed(4)"])
def test_stream_pieces_add_up_to_the_text(decoder: Decoder, policy: str) -> None:
    """On random bytes, most of them no characters."""
    params = SamplingParams(max_tokens=80, ignore_eos=True)
    chunks = list(decoder.stream("Hello world", params, policy))
    output = chunks[-1].output
    assert "".join(c.text for c in chunks) == output.text == decoder.tokenizer.decode(output.token_ids)
    assert [t.id for c in chunks for t, _ in c.pieces] == output.token_ids


@pytest.mark.parametrize("pad", range(4))
@pytest.mark.parametrize(
    "text",
    [
        JAPANESE * 4,
        "na\u00efve \u20ac5 \U0001f600 caf\u00e9 " * 4,
        "\U0001f468\u200d\U0001f469\u200d\U0001f467" * 6,
    ],
    ids=["Japanese", "mixed", "joined emoji"],
)
def test_streaming_never_splits_a_character(text: str, pad: int) -> None:
    text = "." * pad + text
    tokenizer = make_tokenizer()
    stream = TextStream(tokenizer, (), frozenset())
    pieces = [stream.push(i) for i in tokenizer(text).input_ids]
    assert not [p for p in pieces if "\ufffd" in p]
    assert "".join([*pieces, stream.finish()]) == text


def test_streaming_finds_a_stop_string_of_wide_characters() -> None:
    tokenizer = make_tokenizer()
    stream = TextStream(tokenizer, (JAPANESE[4:6],), frozenset())
    pieces = []
    for i in tokenizer(JAPANESE).input_ids:
        pieces.append(stream.push(i))
        if stream.stopped:
            break
    assert "".join([*pieces, stream.finish()]) == JAPANESE[:4]
    assert len(stream.ids) == 18


def test_bad_parameters_are_named() -> None:
    for change in (
        {"max_tokens": -1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_k": -1},
        {"min_tokens": -1},
        {"stop": ("",)},
    ):
        with pytest.raises(DraftsmithError, match=next(iter(change)).split("_")[0]):
            dataclasses.replace(SamplingParams(), **change)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_long_and_monotonous_text(printable: Path, plain: Decoder, policy: str) -> None:
    """500 tokens, and a prompt that says one word 48 times: offsets that drift show late, or where all looks alike."""
    params = SamplingParams(max_tokens=500, ignore_eos=True)
    expected = plain.generate("serving " * 48, params, "ar").token_ids
    assert len(expected) > 100
    assert plain.generate("serving " * 48, params, policy).token_ids == expected


def test_a_branch_that_was_kept_has_its_provenance(plain: Decoder) -> None:
    output = generate(plain, "mtv(8,8)", max_tokens=60)
    assert output.stats.accepted > 0
    assert {t.source for t in output.tokens} <= {"accepted", "correction", "bonus", "ar"}
    assert sum(t.source == "accepted" for t in output.tokens) == output.stats.accepted - output.stats.trimmed
    assert {t.variant for t in output.tokens if t.source == "accepted"} == {"4L"}
    output = plain.generate("abab abab abab abab", SamplingParams(max_tokens=30, ignore_eos=True), "lookup(4)")
    assert {t.variant for t in output.tokens if t.source == "accepted"} <= {"lookup"}
