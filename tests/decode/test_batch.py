"""Answers written in batches: each is the one its prompt has alone, however slots are shared and refilled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_target_model
from draftsmith.decode import batch
from draftsmith.decode.batch import Answer, write_answers
from draftsmith.decode.device import Engine
from draftsmith.decode.runner import LeanRunner, ModuleRunner
from draftsmith.decode.target import Target

LENGTHS = [3, 9, 9, 12, 5, 9, 30, 2]


@pytest.fixture(scope="module")
def runner() -> LeanRunner:
    model = make_target_model(seed=3).double()
    return LeanRunner(Target("t", model, None, Engine(torch.device("cpu"), torch.float64)))


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 256, (n,), generator=generator).tolist() for n in LENGTHS]


def write(runner: Any, slots: int, answers: int, max_tokens: int = 6, eos: frozenset[int] = frozenset(),
          which: list[int] | None = None) -> dict[tuple[int, int], Answer]:
    numbers = list(range(len(LENGTHS))) if which is None else which
    texts = [prompts()[n] for n in numbers]
    found = list(write_answers(runner, texts, answers, [0.0, 0.9], max_tokens, eos, slots, 7, 4, 0.5, numbers))
    assert len(found) == len(texts) * answers
    return {(numbers[a.job], a.index): a for a in found}


@pytest.mark.parametrize("answers", [1, 2, 5])
@pytest.mark.parametrize("slots", [1, 2, 3, 8, 64])
def test_a_batch_writes_what_each_prompt_gets_alone(runner: LeanRunner, slots: int, answers: int) -> None:
    alone = {k: a for n in range(len(LENGTHS)) for k, a in write(runner, 1, answers, which=[n]).items()}
    eos = frozenset({next(iter(alone.values())).ids[2], alone[3, 0].ids[0], alone[6, 0].ids[0]})
    alone = {k: a for n in range(len(LENGTHS)) for k, a in write(runner, 1, answers, eos=eos, which=[n]).items()}
    assert len({len(a.ids) for a in alone.values()}) > 2  # they end at different times, some at once
    together = write(runner, slots, answers, eos=eos)
    assert together.keys() == alone.keys()
    for key, answer in together.items():
        assert answer.ids == alone[key].ids
        for mine, other in ((answer.top_logp, alone[key].top_logp), (answer.tail, alone[key].tail)):
            assert np.allclose(mine, other, atol=1e-6)


@pytest.mark.parametrize(("rows", "spread", "expected"), [
    (2048, 32, [[30, 12, 9, 9, 9, 5, 3, 2]]),
    (2048, 4, [[30], [12, 9, 9, 9], [5, 3, 2]]),
    (20, 32, [[30], [12], [9, 9], [9, 5], [3, 2]]),
])
def test_prompts_of_similar_length_are_read_in_one_pass(
    runner: LeanRunner, monkeypatch: pytest.MonkeyPatch, rows: int, spread: int, expected: list[list[int]]
) -> None:
    monkeypatch.setattr(batch, "PREFILL_ROWS", rows)
    monkeypatch.setattr(batch, "PREFILL_SPREAD", spread)
    reads: list[list[int]] = []
    read = batch._Batch._read
    monkeypatch.setattr(batch._Batch, "_read", lambda self, slots, rests, placed: (
        reads.append([len(rest) for rest in rests]), read(self, slots, rests, placed))[1])
    plain = write(runner, 1, 1)
    reads.clear()
    together = write(runner, 8, 1)
    assert reads == expected
    assert {k: a.ids for k, a in together.items()} == {k: a.ids for k, a in plain.items()}


def beginning_alike() -> list[list[int]]:
    """Questions about two schemas, and one about none, mixed."""
    generator = torch.Generator().manual_seed(4)

    def draw(n: int) -> list[int]:
        return torch.randint(3, 256, (n,), generator=generator).tolist()

    schemas = [draw(80), draw(100)]
    return [schemas[0] + draw(3), draw(7), schemas[1] + draw(2), schemas[0] + draw(5), schemas[1] + draw(9),
            schemas[0] + draw(1), schemas[0][:70] + draw(4)]


def test_a_runner_of_one_slot_shares_what_lies_in_it(runner: LeanRunner) -> None:
    texts = beginning_alike()
    model = make_target_model(seed=3).double()
    module = ModuleRunner(Target("t", model, None, Engine(torch.device("cpu"), torch.float64)))
    assert module.max_batch == 1
    lean, stock = ({(a.job, a.index): a.ids for a in write_answers(r, texts, 2, [0.0, 0.9], 6, frozenset(), 8, 7)}
                   for r in (runner, module))
    assert lean == stock


def test_rows_padded_to_the_longest_stay_within_the_cache(runner: LeanRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Near the end of the context, a short rest behind a long beginning beside a longer rest behind a short one."""
    monkeypatch.setattr(runner, "context", 128)
    generator = torch.Generator().manual_seed(6)
    near, far = (torch.randint(3, 256, (n,), generator=generator).tolist() for n in (120, 80))
    texts = [near + [1, 2], near + [1, 3], far + [4] * 30, far + [5] * 31, near[:70] + [9] * 8]
    found = list(write_answers(runner, texts, 1, [0.0], 4, frozenset(), 4, 7))
    alone = {n: next(iter(write_answers(runner, [text], 1, [0.0], 4, frozenset(), 1, 7))).ids
             for n, text in enumerate(texts)}
    assert {a.job: a.ids for a in found} == alone


@pytest.mark.parametrize("slots", [1, 2, 3, 16])
@pytest.mark.parametrize("answers", [1, 2])
def test_what_prompts_share_is_read_once_and_changes_nothing(
    runner: LeanRunner, monkeypatch: pytest.MonkeyPatch, slots: int, answers: int
) -> None:
    texts, reads = beginning_alike(), []
    read = batch._Batch._read
    monkeypatch.setattr(batch._Batch, "_read", lambda self, slots, rests, placed: (
        reads.extend(len(rest) for rest in rests), read(self, slots, rests, placed))[1])

    def run(which: list[int], slots: int) -> dict[tuple[int, int], Answer]:
        found = write_answers(runner, [texts[n] for n in which], answers, [0.0, 0.9], 6, frozenset(), slots, 7, 4, 0.5,
                              which)
        return {(which[a.job], a.index): a for a in found}

    alone = {key: a for n in range(len(texts)) for key, a in run([n], 1).items()}
    reads.clear()
    together = run(list(range(len(texts))), slots)
    assert {key: a.ids for key, a in together.items()} == {key: a.ids for key, a in alone.items()}
    for key, answer in together.items():
        assert np.allclose(answer.top_logp, alone[key].top_logp, atol=1e-6)
    assert len(reads) == len(texts) * answers
    # Each schema whole once, the question without one, and of all others what is their own.
    whole = [n for n in reads if n > 30]
    assert len(whole) == 2


MEMORY = """
import torch
from conftest import make_target_model
from draftsmith.decode.batch import write_answers
from draftsmith.decode.device import Engine
from draftsmith.decode.runner import LeanRunner
from draftsmith.decode.target import Target

def resident():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) / 1024

model = make_target_model(vocab_size=40000, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                          num_attention_heads=1, num_key_value_heads=1, eos_token_id=None)
runner = LeanRunner(Target("t", model, None, Engine(torch.device("cpu"), torch.float32)))
kept = []
for answer in write_answers(runner, [[5, 6, 7 + i] for i in range(48)], 1, [0.0], 24, frozenset(), 16, 0, 8, 0.5):
    kept.append(answer)
    if len(kept) == 16:
        before = resident()
print(resident() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="resident memory cannot be read here")
def test_answers_do_not_leave_holes_in_the_heap() -> None:
    """Kept rows that lay between the logits of one pass and of the next made memory grow by a pass's logits each
    time: 120 MB here."""
    tests = str(Path(__file__).resolve().parents[1])
    done = subprocess.run([sys.executable, "-c", MEMORY], env={**os.environ, "PYTHONPATH": tests}, check=True,
                          capture_output=True, text=True)
    assert float(done.stdout) < 40
