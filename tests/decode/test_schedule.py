"""Requests that share passes: each answer is the one its request has alone, and none can harm another."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_target_model, save_model
from draftsmith.data import DraftsmithError
from draftsmith.decode import Decoder, SamplingParams, schedule
from draftsmith.decode.loop import Generation
from draftsmith.decode.policies import make_policy
from draftsmith.decode.sampling import GumbelNoise
from draftsmith.decode.schedule import Batch, Request
from draftsmith.decode.stack import KVCache

PROMPTS = ["Hello world", "SELECT a FROM b", "x", "A longer prompt, of which a batch has to hold every token."]
POLICIES = ["ar", "fixed(3)", "mtv(3,2,1)", "lookup(3)", "hybrid(4)", "paper", "goodput"]


@pytest.fixture
def folder(printable: Path) -> Path:
    return printable


@pytest.fixture
def decoder(plain: Decoder) -> Decoder:
    return plain


def options(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 20, "ignore_eos": True, **changes})


MIXED = [options(), options(temperature=1.0, seed=4, max_tokens=33), options(max_tokens=1),
         options(temperature=0.8, seed=9, top_p=0.9, frequency_penalty=0.5, stop=("e",), min_tokens=5)]


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_batch_answers_as_each_request_alone(decoder: Decoder, policy: str, slots: int) -> None:
    together = decoder.generate_batch(PROMPTS, MIXED, policy, slots)
    for prompt, params, (answer,) in zip(PROMPTS, MIXED, together, strict=True):
        alone = decoder.generate(prompt, params, policy)
        assert (answer.token_ids, answer.text, answer.finish_reason) == (
            alone.token_ids, alone.text, alone.finish_reason)
        answer.stats.check()


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_n_answers_with_a_seed_differ_and_repeat(decoder: Decoder, slots: int) -> None:
    params = options(temperature=1.0, seed=3, n=4)
    answers = [[a.token_ids for a in group] for group in decoder.generate_batch(PROMPTS[:2], params, "mtv(2,2)", slots)]
    assert [len(group) for group in answers] == [4, 4]
    assert all(len({tuple(ids) for ids in group}) == 4 for group in answers)
    assert answers == [[a.token_ids for a in g] for g in decoder.generate_batch(PROMPTS[:2], params, "ar", 3)]
    first = decoder.generate(PROMPTS[0], dataclasses.replace(params, n=1))
    assert answers[0][0] == first.token_ids
    with pytest.raises(DraftsmithError, match="generate_batch gives several"):
        decoder.generate(PROMPTS[0], params)


def test_a_prompt_asked_for_several_answers_is_read_once(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    forward = decoder.runner.forward
    monkeypatch.setattr(decoder.runner, "forward",
                        lambda ids, *a, **k: (reads.append(ids.shape[1]), forward(ids, *a, **k))[1])
    decoder.generate_batch(PROMPTS[:2], options(temperature=1.0, n=3, max_tokens=2), "ar", 6)
    assert reads == [len(decoder.prompt_ids(PROMPTS[0])), len(decoder.prompt_ids(PROMPTS[1])), 1]


@pytest.mark.parametrize("rows", [1, 4])
def test_a_request_near_the_targets_context_fits_beside_one_that_drafts(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr(decoder.runner, "context", 40)
    prompts = [list(range(3, 3 + 40 - rows)), [5, 6, 7]]
    found = decoder.generate_batch(prompts, options(max_tokens=30), "fixed(16)", 2)
    assert [len(group[0].token_ids) for group in found] == [rows, 30]
    assert found[1][0].token_ids == decoder.generate([5, 6, 7], options(max_tokens=30), "ar").token_ids


@pytest.mark.parametrize("slots", [1, 3])
def test_an_error_of_one_request_leaves_the_others(decoder: Decoder, slots: int) -> None:
    def fails_at_five(answer: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(answer) == 5:
            raise RuntimeError("user code")
        return logits

    batch = Batch(decoder.runner, decoder.tokenizer, slots, 80)
    params = [options(), options(logits_processors=[fails_at_five]), options(temperature=1.0, seed=2)]
    requests = [decoder.request(decoder.prompt_ids("abc"), p, "fixed(2)") for p in params]
    for request in requests:
        batch.submit(request)
    while batch.busy:
        batch.step()
    assert [type(r.error) for r in requests] == [type(None), RuntimeError, type(None)]
    for i in (0, 2):
        assert requests[i].answer.output.token_ids == decoder.generate("abc", params[i], "ar").token_ids
    with pytest.raises(RuntimeError, match="user code"):
        decoder.generate_batch(["abc"], params[1], "fixed(2)", slots)


def test_a_cancelled_request_frees_its_slot_at_once(decoder: Decoder) -> None:
    batch = Batch(decoder.runner, decoder.tokenizer, 2, 80)
    requests = [decoder.request(decoder.prompt_ids(p), options(max_tokens=40), "fixed(2)") for p in PROMPTS[:3]]
    for request in requests:
        batch.submit(request)
    batch.step()
    batch.cancel(requests[0])
    seen = {id(request) for request, _ in batch.step()}
    assert seen == {id(requests[1]), id(requests[2])}
    batch.cancel(requests[2])
    while batch.busy:
        batch.step()
    assert requests[1].answer.output.token_ids == decoder.generate(PROMPTS[1], options(max_tokens=40)).token_ids
    assert len(requests[0].answer.output.token_ids) < 10


def test_a_request_too_long_for_the_batch_is_refused_alone(decoder: Decoder) -> None:
    batch = Batch(decoder.runner, decoder.tokenizer, 2, 40)
    requests = [decoder.request(decoder.prompt_ids("abc"), options(max_tokens=n), "fixed(4)") for n in (20, 200)]
    for request in requests:
        batch.submit(request)
    while batch.busy:
        batch.step()
    assert len(requests[0].answer.output.token_ids) == 20
    assert isinstance(requests[1].error, DraftsmithError)
    assert "batch made for 40" in str(requests[1].error)


def test_a_failed_pass_ends_its_requests_and_no_others(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(decoder.runner, decoder.tokenizer, 2, 60)
    requests = [decoder.request(decoder.prompt_ids(p), options(), "fixed(2)") for p in PROMPTS[:3]]
    for request in requests:
        batch.submit(request)
    with monkeypatch.context() as patch:
        patch.setattr(Batch, "_pass", lambda *_: (_ for _ in ()).throw(MemoryError("full")))
        batch.step()
    while batch.busy:
        batch.step()
    assert [type(r.error) for r in requests] == [MemoryError, MemoryError, type(None)]
    assert requests[2].answer.output.token_ids == decoder.generate(PROMPTS[2], options(), "ar").token_ids


def turn(batch: Batch, decoder: Decoder, text: list[int], policy: str) -> Request:
    """Ask one request of a batch, and run it to its end."""
    request = decoder.request(text, options(), policy)
    batch.submit(request)
    while batch.busy:
        batch.step()
    return request


@pytest.mark.parametrize("policy", POLICIES)
def test_the_next_turn_of_a_conversation_is_read_from_where_the_last_one_ended(decoder: Decoder, policy: str) -> None:
    """Two conversations over two slots; each finds its own again, drafted and branched tokens included."""
    batch = Batch(decoder.runner, decoder.tokenizer, 2, 300)
    talks = [decoder.prompt_ids(word * 20) for word in ("ab c ", "xyz, ")]
    for number in range(3):
        for i, talk in enumerate(talks):
            found = turn(batch, decoder, talk, policy)
            assert found.answer.output.token_ids == decoder.generate(talk, options(), "ar").token_ids
            # All but the end: of an answer the last token has not been read, and `paper` wants 33 rows.
            new = 33 if policy == "paper" else 21
            assert found.answer.output.stats.cached_tokens >= (len(talk) - new - 20 if number else 0)
            assert bool(found.answer.output.stats.cached_tokens) == bool(number)
            talks[i] = [*talk, *found.answer.output.token_ids, *decoder.prompt_ids(" and then?")]


def test_what_a_slot_holds_is_right_after_a_cancelled_answer_and_forgotten_after_a_failed_one(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, forward = decoder.prompt_ids("Some instructions, " * 8), decoder.runner.forward
    expected = decoder.generate(prompt, options(), "ar").token_ids

    def failing(*args: Any, **more: Any) -> None:
        forward(*args, **more)
        raise MemoryError

    for ending in ("cancelled", "failed in a pass", "failed in a prompt"):
        batch = Batch(decoder.runner, decoder.tokenizer, 1, 300)
        first = decoder.request(prompt, options(), "fixed(3)")
        batch.submit(first)
        with monkeypatch.context() as patch:
            if ending == "failed in a prompt":
                patch.setattr(decoder.runner, "forward", failing)
            batch.step()
            if ending == "failed in a pass":
                patch.setattr(decoder.runner, "forward", failing)
                batch.step()
        if ending == "cancelled":
            batch.cancel(first)
        assert not batch.busy
        again = turn(batch, decoder, prompt, "fixed(3)")
        assert again.answer.output.token_ids == expected
        assert (again.answer.output.stats.cached_tokens > 0) == (ending == "cancelled")


def test_idle_slots_keep_what_they_hold_while_others_run(decoder: Decoder) -> None:
    """A pass over slots 0 to 2 runs over slot 1 too, after what lies there, and forgets what no longer fits."""
    batch = Batch(decoder.runner, decoder.tokenizer, 3, 120)
    long = decoder.prompt_ids("Some instructions, " * 6)[:100]
    requests = [decoder.request(p, options(max_tokens=n), "fixed(3)")
                for p, n in ((decoder.prompt_ids("x"), 90), (long, 2), (decoder.prompt_ids("y"), 90))]
    for request in requests:
        batch.submit(request)
    while batch.busy:
        batch.step()
    again = turn(batch, decoder, [*long[:90], *decoder.prompt_ids("!")], "ar").answer.output
    assert again.stats.cached_tokens >= 90
    assert again.token_ids == decoder.generate([*long[:90], *decoder.prompt_ids("!")], options(), "ar").token_ids


@pytest.mark.parametrize("policy", POLICIES)
def test_a_long_prompt_is_read_in_pieces_while_others_write(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    monkeypatch.setattr(schedule, "PIECE", 40)
    long = decoder.prompt_ids("Some instructions, " * 8)[:130]
    batch = Batch(decoder.runner, decoder.tokenizer, 3, 300)
    first = decoder.request(decoder.prompt_ids("Hello"), options(max_tokens=60), policy)
    batch.submit(first)
    batch.step()
    second = decoder.request(long, options(), policy)
    batch.submit(second)
    before, steps = len(first.answer.output.token_ids), 0
    while not second.answer or not second.answer.output.tokens:
        batch.step()
        steps += 1
        assert len(first.answer.output.token_ids) >= before + steps
    assert steps == 4
    while batch.busy:
        batch.step()
    for request, prompt, n in ((first, decoder.prompt_ids("Hello"), 60), (second, long, 20)):
        assert request.answer.output.token_ids == decoder.generate(prompt, options(max_tokens=n), policy).token_ids
        assert request.answer.output.stats.drafted == decoder.generate(prompt, options(max_tokens=n), policy
                                                                       ).stats.drafted or policy == "goodput"


def test_several_answers_to_a_long_prompt_read_it_once(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is read in pieces, and where the answer that was to read it is cancelled half-way."""
    monkeypatch.setattr(schedule, "PIECE", 40)
    long, forward, read = decoder.prompt_ids("Some instructions, " * 8)[:130], decoder.runner.forward, []

    def counted(ids: torch.Tensor, *rest: Any, **more: Any) -> Any:
        read.append(ids.shape[1])
        return forward(ids, *rest, **more)

    monkeypatch.setattr(decoder.runner, "forward", counted)
    expected = [a.token_ids for a in decoder.generate_batch([long], options(temperature=1.0, seed=5, n=3), "ar", 3)[0]]
    assert sum(n for n in read if n > 1) == 130
    read.clear()
    batch = Batch(decoder.runner, decoder.tokenizer, 3, 300)
    requests = [decoder.request(long, options(temperature=1.0, seed=5), "ar", i, group=long) for i in range(3)]
    for request in requests:
        batch.submit(request)
    batch.step()
    batch.cancel(requests[0])
    while batch.busy:
        batch.step()
    assert [r.answer.output.token_ids for r in requests[1:]] == expected[1:]
    assert sum(n for n in read if n > 1) == 40 + 130  # the second could not know what the first had read


def test_what_was_read_of_a_cancelled_prompt_is_kept(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "PIECE", 40)
    long = decoder.prompt_ids("Some instructions, " * 8)[:130]
    batch = Batch(decoder.runner, decoder.tokenizer, 2, 300)
    request = decoder.request(long, options(), "ar")
    batch.submit(request)
    for _ in range(2):
        batch.step()
    batch.cancel(request)
    assert not batch.busy
    again = turn(batch, decoder, long, "ar").answer.output
    assert again.stats.cached_tokens == 80
    assert again.token_ids == decoder.generate(long, options(), "ar").token_ids


def test_a_prompt_that_was_overwritten_is_not_copied(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second answer to a prompt whose slot a failed prefill has used since."""
    prompt, other = decoder.prompt_ids(PROMPTS[0]), decoder.prompt_ids(PROMPTS[3])
    batch = Batch(decoder.runner, decoder.tokenizer, 2, 100)
    batch.slots[1] = Request(lambda *_: None)  # so that all starts in slot 0
    prefill = Generation.prefill

    def fails_late(self: Generation, *rest: Any) -> Any:
        tokens = prefill(self, *rest)
        if self.prompt_length == len(other):
            raise MemoryError
        return tokens

    monkeypatch.setattr(Generation, "prefill", fails_late)
    requests = [decoder.request(prompt, options(max_tokens=1), "ar", group=prompt),
                decoder.request(other, options(), "ar"), decoder.request(prompt, options(), "ar", group=prompt)]
    for request in requests:
        batch.submit(request)
    batch._fill([])
    batch.slots[1] = None
    while batch.busy:
        batch.step()
    assert requests[2].answer.output.token_ids == decoder.generate(PROMPTS[0], options(), "ar").token_ids


@pytest.mark.parametrize("narrow", [True, False])
def test_a_pass_runs_over_the_slots_that_are_taken(decoder: Decoder, monkeypatch: pytest.MonkeyPatch,
                                                   narrow: bool) -> None:
    """Else one client of a server with many slots would wait for all of them; where graphs are of whole caches, idle
    slots run along. A pass over one slot is a pass of one request and teaches its cost, another is not."""
    learned: list[int] = []
    passes: list[int] = []
    monkeypatch.setattr(type(decoder.costs), "update_verify", lambda self, n, *_: learned.append(n))
    monkeypatch.setattr(decoder.runner, "narrow", narrow)
    forward = decoder.runner.forward
    monkeypatch.setattr(decoder.runner, "forward", lambda ids, cache, keep=None, *rest, **more: (
        passes.append(len(ids)) if keep is None else None, forward(ids, cache, keep, *rest, **more))[1])
    each = [options(max_tokens=n) for n in (2, 30, 4, 20)]
    outputs = decoder.generate_batch(PROMPTS, each, "fixed(2)", 4)
    assert (min(passes), max(passes)) == ((1, 4) if narrow else (4, 4))
    assert bool(learned) == narrow
    for prompt, params, [output] in zip(PROMPTS, each, outputs, strict=True):
        assert output.token_ids == decoder.generate(prompt, params, "ar").token_ids


def test_a_finished_request_is_freed_without_the_collector(decoder: Decoder) -> None:
    """Caches are large and cycles are collected late."""
    decoder.generate(PROMPTS[0], options(), "goodput")
    gc.collect()
    gc.disable()
    try:
        for policy in POLICIES:
            decoder.generate(PROMPTS[0], options(), policy)
            decoder.generate_batch(PROMPTS, options(temperature=1.0, seed=1), policy)
        assert not [x for x in gc.get_objects() if isinstance(x, (Generation, KVCache, GumbelNoise))]
    finally:
        gc.enable()


def test_a_policy_object_goes_on_from_what_it_has_learned(decoder: Decoder) -> None:
    policy = make_policy("goodput", decoder.context)
    decoder.generate(PROMPTS[0], options(), policy)
    learned = policy.state()
    assert learned != make_policy("goodput", decoder.context).state()
    again = make_policy("goodput", decoder.context)
    again.restore(learned)
    texts = [decoder.generate(PROMPTS[1], options(), p).token_ids for p in (again, "ar")]
    assert texts[0] == texts[1]
    assert again.state() != learned


def test_mistaken_calls_are_named(decoder: Decoder) -> None:
    with pytest.raises(DraftsmithError, match="takes a list of prompts"):
        decoder.generate_batch("hello")
    with pytest.raises(DraftsmithError, match="not 5"):
        decoder.generate(5)  # type: ignore[arg-type]
    with pytest.raises(DraftsmithError, match="not 1"):
        decoder.generate_batch([1, 2, 3])  # type: ignore[list-item]
    with pytest.raises(DraftsmithError, match="slots must be 1 or more, not 0"):
        decoder.generate_batch(["a"], slots=0)
    with pytest.raises(DraftsmithError, match="2 prompts but 1 sampling"):
        decoder.generate_batch(["a", "b"], [options()])
    with pytest.raises(DraftsmithError, match="the prompt is empty"):
        decoder.generate_batch(["a", []])
    with pytest.raises(DraftsmithError, match="n must be 1 or more, not 0"):
        SamplingParams(n=0)
    assert decoder.generate_batch([]) == []


@pytest.mark.parametrize(("policy", "requests"), [("ar", 1000), ("goodput", 200)])
def test_many_requests_leave_memory_flat(decoder: Decoder, policy: str, requests: int) -> None:
    """Objects of the loop must not outlive their request."""
    decoder.generate_batch(PROMPTS, options(), policy)
    gc.collect()
    before = len(gc.get_objects())
    decoder.generate_batch([PROMPTS[0]] * requests, options(max_tokens=2), policy)
    gc.collect()
    assert len(gc.get_objects()) < before + 200
    assert not [x for x in gc.get_objects() if isinstance(x, Generation)]


# Decoders without a bundle


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stock model of the same tokenizer, with a vocabulary padded further."""
    out = tmp_path_factory.mktemp("small")
    return save_model(out, make_target_model(seed=8, num_hidden_layers=1, vocab_size=272))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "seeded"])
def test_a_stock_model_drafts(folder: Path, small: Path, tmp_path: Path, family: str, sampling: dict[str, Any]) -> None:
    draft = small
    if family != "llama":
        draft = save_model(tmp_path / "draft", make_target_model(seed=8, family=family))
    pair = Decoder.pair(str(folder), str(draft))
    expected = Decoder.pair(str(folder)).generate("Hello", options(**sampling), "ar").token_ids
    for policy in ("fixed(3)", "mtv(2,2)", "hybrid(3)", "goodput", "paper"):
        output = pair.generate("Hello", options(**sampling), policy)
        assert output.token_ids == expected
        if policy == "fixed(3)":
            assert output.stats.drafted > 0


def test_a_target_drafts_for_itself_as_a_stock_model(folder: Path) -> None:
    pair = Decoder.pair(str(folder), str(folder))
    assert pair.generate("Hello", options(max_tokens=31), "fixed(4)").stats.acceptance_rate == 1.0


def test_a_target_alone_has_the_lookup(folder: Path) -> None:
    alone = Decoder.pair(str(folder))
    prompt = "abcdefgh abcdefgh abcdefgh"
    texts = [alone.generate(prompt, options(), policy).token_ids for policy in (None, "ar", "lookup(4)", "goodput")]
    assert all(text == texts[0] for text in texts)
    with pytest.raises(DraftsmithError, match="needs a draft"):
        alone.generate(prompt, options(), "fixed(4)")
    with pytest.raises(DraftsmithError, match=r"did you mean 'lookup\(4\)'"):
        alone.generate(prompt, options(), "lookp(4)")
    assert "target pass" in alone.describe_costs()


def test_a_draft_that_lacks_the_last_tokens_of_the_target(folder: Path, tmp_path: Path) -> None:
    save_model(tmp_path, make_target_model(seed=8, num_hidden_layers=1, vocab_size=200, pad_token_id=None))
    pair = Decoder.pair(str(folder), str(tmp_path))
    prompt = [255, 3, 254, 9]
    for policy in ("fixed(3)", "mtv(2,2)", "paper"):
        assert pair.generate(prompt, options(), policy).token_ids == pair.generate(prompt, options(), "ar").token_ids


def test_a_draft_of_another_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    save_model(tmp_path, make_target_model(seed=8, num_hidden_layers=1))
    file = tmp_path / "tokenizer.json"
    swapped = file.read_text().replace('"!": ', '"@@": ').replace('"#": ', '"!": ').replace('"@@": ', '"#": ')
    assert swapped != file.read_text()
    file.write_text(swapped)
    with pytest.raises(DraftsmithError, match="another tokenizer than the target"):
        Decoder.pair(str(folder), str(tmp_path))


def test_a_finished_request_keeps_no_cache(decoder: Decoder) -> None:
    """Thousands may wait to be collected."""
    batch = Batch(decoder.runner, decoder.tokenizer, 2, 80)
    requests = [decoder.request(decoder.prompt_ids(p), options(max_tokens=n), "fixed(2)")
                for p, n in zip(PROMPTS[:3], (1, 9, 9), strict=True)]
    for request in requests:
        batch.submit(request)
    while batch.busy:
        batch.step()
    assert [(r.answer.generation.cache, r.answer.generation.proposer) for r in requests] == [(None, None)] * 3


@pytest.mark.parametrize("slots", [1, 2])
def test_every_request_has_one_last_chunk(decoder: Decoder, slots: int) -> None:
    batch = Batch(decoder.runner, decoder.tokenizer, slots, 80)
    requests = [decoder.request(decoder.prompt_ids(p), options(max_tokens=n), "fixed(2)")
                for p, n in zip(PROMPTS, (1, 2, 3, 9), strict=True)]
    for request in requests:
        batch.submit(request)
    chunks: dict[int, list[Any]] = {id(r): [] for r in requests}
    while batch.busy:
        for request, chunk in batch.step():
            chunks[id(request)].append(chunk)
    for request in requests:
        made = chunks[id(request)]
        assert [c.done for c in made] == [False] * (len(made) - 1) + [True]
        assert "".join(c.text for c in made) == request.answer.output.text
