"""The training loop on a real DeepSpeed engine: resume is bitwise, damage falls back, units weigh the same."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draftsmith.data import DraftsmithError
from draftsmith.train import checkpoint, stage
from draftsmith.train.loop import Settings, ensure_distributed, fit, learning_rate
from draftsmith.train.stage import Terminated
from torch import nn

SETTINGS = Settings("job", steps=10, lr=0.05, warmup=2, final_lr=0.1, accumulation=2, save_every=3)


@pytest.fixture(scope="module", autouse=True)
def _distributed() -> None:
    ensure_distributed()


class Regression(nn.Module):
    """Sum of squared errors over the rows of a batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2)

    def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = (self.linear(batch) - batch[:, :2]).square().sum()
        return loss, {"part": (loss.detach(), len(batch))}


def batches(step: int, accumulation: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(2 + 3 * a, 3, generator=generator) for a in range(accumulation)]


def interrupted_at(step: int) -> Callable[[int], list[torch.Tensor]]:
    def stop(at: int) -> list[torch.Tensor]:
        if at == step:
            raise KeyboardInterrupt
        return batches(at)

    return stop


def train(folder: Path, source: Any = batches, inputs: str = "x", settings: Settings = SETTINGS) -> dict[str, Any]:
    """Train to the end (or the interruption) and return weights and optimiser state."""
    engine = fit(Regression(), source, len, settings, folder, inputs)
    return {"weights": engine.module.state_dict(), "optimizer": engine.optimizer.state_dict()["state"]}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_interrupted_runs_end_bitwise_like_the_uninterrupted_one(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")
    for step in (1, 5, 8):
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "cut", interrupted_at(step))
    assert same(train(tmp_path / "cut"), whole)
    steps = [json.loads(line)["step"] for line in (tmp_path / "cut/job.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 11)), "the log neither repeats nor loses a step"


@pytest.mark.parametrize("fault", ["truncated", "missing", "no marker"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    tmp_path: Path,
    fault: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = train(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", interrupted_at(7))
    newest = checkpoint.checkpoints(tmp_path / "cut/checkpoints/job")[-1]
    assert newest.name == "step-00000006"
    file = next(newest.rglob("*model_states.pt"))
    if fault == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif fault == "missing":
        file.unlink()
    else:
        (newest / checkpoint.MARKER).unlink()
    assert same(train(tmp_path / "cut"), whole)
    said = capsys.readouterr().err
    assert "resuming after step 3" in said
    if fault != "no marker":  # without its marker it never was a checkpoint
        assert f"{newest} is damaged" in said


def test_a_full_disk_ends_with_a_message_and_keeps_the_earlier_checkpoint(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = checkpoint.fsync_path

    def full(path: Path) -> None:
        if "step-00000006" in str(path):
            raise OSError(28, "No space left on device")
        real(path)

    monkeypatch.setattr(checkpoint, "fsync_path", full)
    with pytest.raises(DraftsmithError, match=r"step-00000006.*No space left"):
        train(tmp_path / "out")
    folder = tmp_path / "out/checkpoints/job"
    assert [p.name for p in folder.iterdir()] == ["step-00000003"]
    monkeypatch.undo()
    assert same(train(tmp_path / "out"), train(tmp_path / "whole"))


def test_without_zero_a_checkpoint_of_any_number_of_ranks_is_gone_on_with(tmp_path: Path) -> None:
    """Spread by ZeRO it is converted first: tests/e2e/test_pipeline.py."""
    whole = train(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", interrupted_at(4))
    (marker,) = (tmp_path / "cut").rglob(checkpoint.MARKER)
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "ranks": 4}))
    assert same(train(tmp_path / "cut"), whole)


def test_a_folder_belongs_to_one_job_at_a_time(tmp_path: Path) -> None:
    import fcntl

    recipe: Any = SimpleNamespace(folder=tmp_path / "out")

    def job() -> None:
        stage.own_folder(recipe)
        stage.own_folder(recipe)  # the same job may ask again
        assert (tmp_path / "out/.lock").read_text() == str(os.getpid())

    stage.run_job(job, "job")
    with (tmp_path / "out/.lock").open("r+") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(DraftsmithError, match=f"another job is writing there .process {os.getpid()}."):
            job()
    stage.run_job(job, "job")


def test_checkpoints_of_another_recipe_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, interrupted_at(4))
    with pytest.raises(DraftsmithError, match="different recipe, data"):
        train(tmp_path, inputs="y")


def poisoned(steps: set[int]) -> Callable[[int], list[torch.Tensor]]:
    """The first micro-batch of these steps has no finite loss."""
    return lambda step: [b * (float("nan") if step in steps and i == 0 else 1.0) for i, b in enumerate(batches(step))]


def test_a_loss_that_is_not_finite_is_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The step goes on with the micro-batch that is sound, at the weight it would have had beside the other."""
    found = train(tmp_path / "cut", poisoned({4, 7}))
    assert all(torch.isfinite(w).all() for w in found["weights"].values())
    assert "step 5: 1 micro-batches without a finite loss, left out" in capsys.readouterr().err
    lines = [json.loads(line) for line in (tmp_path / "cut/job.jsonl").read_text().splitlines()]
    assert [line["train/skipped"] for line in lines] == [float(i in (4, 7)) for i in range(10)]
    assert all(math.isfinite(line["train/loss"]) for line in lines)

    def silent(step: int) -> list[torch.Tensor]:
        """The same rows, of which the poisoned ones have no error to learn from: a linear map of nothing."""
        first, second = batches(step)
        return [first * 0.0 if step in (4, 7) else first, second]

    settings = replace(SETTINGS, clip=0.0)
    engines = [fit(NoBias(), source, len, settings, tmp_path / name, "x").module.state_dict()
               for name, source in (("a", poisoned({4, 7})), ("b", silent))]
    assert same(*engines)


class NoBias(Regression):
    """Rows of zeros have neither loss nor gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2, bias=False)


def test_a_loss_that_stays_not_finite_ends_the_job(tmp_path: Path) -> None:
    settings = replace(SETTINGS, max_skipped=3)
    train(tmp_path / "a", poisoned({1, 2, 4, 5}), settings=settings)  # never three in a row
    with pytest.raises(DraftsmithError, match=r"not been finite for 3 steps \(the last is 7\)"):
        train(tmp_path / "b", poisoned({4, 5, 6, 7}), settings=settings)


def test_a_step_without_a_single_unit_changes_nothing_and_is_no_error(tmp_path: Path) -> None:
    def source(step: int) -> list[torch.Tensor]:
        return [b[: 0 if step == 4 else None] for b in batches(step)]

    assert all(torch.isfinite(w).all() for w in train(tmp_path, source)["weights"].values())


def test_sigterm_ends_the_job_after_its_step_with_a_checkpoint(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")
    before = signal.getsignal(signal.SIGTERM)  # ours to give back, whoever set it

    def asked(step: int) -> list[torch.Tensor]:
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return batches(step)

    with pytest.raises(Terminated, match="stopped after step 5; run the same command again"):
        train(tmp_path / "cut", asked)
    assert [p.name for p in checkpoint.checkpoints(tmp_path / "cut/checkpoints/job")] == [
        "step-00000003", "step-00000005"]
    assert signal.getsignal(signal.SIGTERM) == before
    assert same(train(tmp_path / "cut"), whole)


def test_every_unit_weighs_the_same_whatever_the_micro_batch(tmp_path: Path) -> None:
    """One step over [2 rows, 5 rows] equals one step over all 7; a mean per micro-batch would not."""
    settings = Settings("job", steps=1, lr=0.1, accumulation=2, clip=0.0, betas=(0.0, 0.0))
    split = fit(Regression(), batches, len, settings, tmp_path / "a", "x")
    joined = fit(
        Regression(),
        lambda s: [torch.cat(batches(s))],
        len,
        Settings("job", steps=1, lr=0.1, accumulation=1, clip=0.0, betas=(0.0, 0.0)),
        tmp_path / "b",
        "x",
    )
    # Adam's first step forgets the gradient's size, so compare its second moment, which keeps it.
    moments = [[s["exp_avg_sq"] for s in e.optimizer.state_dict()["state"].values()] for e in (split, joined)]
    for a, b in zip(*moments, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-10)


def test_the_learning_rate_warms_up_and_ends_at_its_share() -> None:
    rates = [learning_rate(SETTINGS, s) for s in range(11)]
    assert rates[0] == pytest.approx(0.025)
    assert rates[1] == rates[2] == pytest.approx(0.05)
    assert all(a > b for a, b in zip(rates[2:], rates[3:], strict=False))
    assert rates[10] == pytest.approx(0.005)
