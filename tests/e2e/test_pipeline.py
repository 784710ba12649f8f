"""The whole pipeline on a tiny target, every job through a real `deepspeed` launch."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from draftsmith.data.io import write_jsonl
from draftsmith.data.teacher_cache import TeacherCache
from draftsmith.data.traces import read_traces
from launching import launch, run, start
from tiny import write_tiny_recipe

JOBS = ("respond", "distill", "trace", "gate")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which all four jobs have run."""
    folder = tmp_path_factory.mktemp("pipeline")
    recipe = write_tiny_recipe(folder)
    for job in JOBS:
        launch(job, recipe)
    return folder


def test_each_stage_leaves_what_the_next_needs_and_learns(folder: Path) -> None:
    out = folder / "out"
    for name in (
        "teacher/manifest.json",
        "draft/draft.safetensors",
        "traces.parquet",
        "bundle/draftsmith.json",
        "bundle/gate.safetensors",
    ):
        assert (out / name).is_file(), name
    lines = [json.loads(line) for line in (out / "distill.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert len(losses) == 40
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert any("heldout/acceptance_4L" in line for line in lines)
    assert any(line.get("heldout/sample") for line in lines)
    assert all(0 < line["train/peak_share"] < 1 for line in lines if "train/loss" in line)
    assert (out / "report/gate.png").stat().st_size > 10_000


def cache_rows(folder: Path) -> list[tuple[list[int], list[int]]]:
    cache = TeacherCache(folder)
    return [(cache[i].tokens.tolist(), cache[i].top_ids[:, 0].tolist()) for i in range(len(cache))]


def test_two_ranks_write_the_answers_of_one(folder: Path) -> None:
    """Shards are dealt out by number; sampled text is keyed by prompt and answer, not by rank."""
    launch("respond", folder / "recipe.yaml", f"out={folder}/answers", ranks=2)
    one, two = cache_rows(folder / "out/teacher"), cache_rows(folder / "answers/teacher")
    assert len(one) == 40
    assert one == two


def test_two_ranks_score_text_as_one_does(folder: Path) -> None:
    texts, out = folder / "texts.jsonl", f"out={folder}/scored"
    write_jsonl(texts, [{"id": str(i), "text": f"some text number {i}"} for i in range(18)])
    options = ["respond.mode=score", f"prompts.train={texts}", "respond.shard_documents=4", "prompts.train_count=18"]
    run(sys.executable, "train/respond.py", "--recipe", str(folder / "recipe.yaml"), f"{out}1", *options)
    launch("respond", folder / "recipe.yaml", f"{out}2", *options, ranks=2)
    one, two = cache_rows(folder / "scored1/teacher"), cache_rows(folder / "scored2/teacher")
    assert len(one) == 18
    assert one == two


def test_two_ranks_trace_what_one_does(folder: Path) -> None:
    copy = folder / "traced"
    shutil.copytree(folder / "out", copy)
    (copy / "traces.parquet").unlink()
    launch("trace", folder / "recipe.yaml", f"out={copy}", ranks=2)
    one, two = read_traces(folder / "out/traces.parquet"), read_traces(copy / "traces.parquet")
    assert one.prompt_N == two.prompt_N
    assert one.position_N.tolist() == two.position_N.tolist()
    assert one.accepted_N.tolist() == two.accepted_N.tolist()
    np.testing.assert_allclose(one.acceptance_NAH, two.acceptance_NAH, atol=1e-4)


def test_a_dead_rank_ends_the_job_with_one_line_and_a_restart_goes_on(folder: Path) -> None:
    import psutil

    out = folder / "widowed"
    shutil.copytree(folder / "out/teacher", out / "teacher")
    options = (f"out={out}", "distill.steps=60", "distill.save_every=5", "distill.eval_prompts=0")
    job = start("distill", folder / "recipe.yaml", folder / "widowed.log", *options, ranks=2)
    checkpoints, until = out / "checkpoints/distill", time.monotonic() + 120
    while not list(checkpoints.glob("step-*")) and time.monotonic() < until:
        time.sleep(0.05)
    ranks = [p for p in psutil.Process(job.pid).children(recursive=True) if "--local_rank=1" in p.cmdline()]
    ranks[-1].kill()
    assert job.wait(timeout=120) != 0
    said = (folder / "widowed.log").read_text()
    assert "distill: rank 0: another rank is gone" in said
    assert "Run the same command again" in said
    again = launch("distill", folder / "recipe.yaml", *options, ranks=2)
    assert "distill: resuming after step" in again.stderr
    assert (out / "draft/draft.safetensors").is_file()


@pytest.mark.parametrize("stage", [1, 3])
def test_one_rank_goes_on_where_two_were(folder: Path, stage: int) -> None:
    """What ZeRO spread over two ranks, with as many blocks a step on one."""
    out, again = folder / f"pair{stage}", folder / f"single{stage}"
    shutil.copytree(folder / "out/teacher", out / "teacher")
    options = (f"distill.zero_stage={stage}", "distill.steps=8", "distill.save_every=4", "distill.eval_prompts=0",
               "distill.micro_batch=1", "distill.narrow_weight=0")
    launch("distill", folder / "recipe.yaml", f"out={out}", *options, "distill.accumulation=1", ranks=2)
    shutil.copytree(out, again)
    shutil.rmtree(again / "checkpoints/distill/step-00000008")
    shutil.rmtree(again / "draft")
    told = launch("distill", folder / "recipe.yaml", f"out={again}", *options, "distill.accumulation=2")
    assert "resuming after step 4" in told.stderr
    first, second = ([json.loads(line) for line in (place / "distill.jsonl").read_text().splitlines()]
                     for place in (out, again))
    assert [row["step"] for row in second] == [row["step"] for row in first]
    for a, b in zip(first[1:], second[1:], strict=True):  # the first line is of before the first step
        assert b["train/loss"] == pytest.approx(a["train/loss"], abs=1e-4)
    assert not list((again / "checkpoints/distill").glob(".*"))


def test_tensorboard_has_losses_acceptance_learning_rate_and_speed(folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder / "out" / "tb" / "distill"))
    board.Reload()
    tags = set(board.Tags()["scalars"])
    assert {
        "train/loss_4L",
        "train/loss_2L",
        "train/loss_4L_width_0.75",
        "train/lr",
        "train/tokens_per_second",
        "heldout/acceptance_4L",
    } <= tags


def test_finished_stages_are_skipped(folder: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in (folder / "out").rglob("*.safetensors")}
    for job in JOBS:
        # Plain python works as the launcher does.
        done = run(sys.executable, f"train/{job}.py", "--recipe", str(folder / "recipe.yaml"))
        assert "nothing to do" in done.stderr, job
    assert before == {p: p.stat().st_mtime_ns for p in (folder / "out").rglob("*.safetensors")}


def test_validation_passes_and_reports(folder: Path) -> None:
    done = run(sys.executable, "scripts/validate_acceptance.py", str(folder / "out/bundle"))
    report = folder / "out/report"
    assert "| **fixed(3)** (default) |" in done.stdout
    assert "the target's own text" in (report / "report.md").read_text()
    assert (report / "report.png").stat().st_size > 10_000
    found = json.loads((report / "report.json").read_text())
    assert found["misses"] == []
    assert found["summary"]["transformers"]["identical"] == found["summary"]["transformers"]["prompts"]


def test_validation_fails_with_a_sentence_when_a_threshold_is_missed(folder: Path) -> None:
    recipe = write_tiny_recipe(folder / "strict", validate={"thresholds": {"acceptance": 1.0, "tokens_per_step": 5}})
    done = run(
        sys.executable,
        "scripts/validate_acceptance.py",
        str(folder / "out/bundle"),
        "--recipe",
        str(recipe),
        "--out",
        str(folder / "strict/report"),
        check=False,
    )
    assert done.returncode == 1
    assert "MISS: tokens per step must be at least 5" in done.stderr
    assert "Traceback" not in done.stderr


def test_export_is_a_stock_model_that_assists(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    out = folder / "exported"
    run(sys.executable, "scripts/export.py", str(folder / "out/bundle"), "--variant", "2layer", "--out", str(out))
    target = AutoModelForCausalLM.from_pretrained(folder / "target")
    assistant = AutoModelForCausalLM.from_pretrained(out)
    assert assistant.config.num_hidden_layers == 2
    ids = torch.tensor([[72, 101, 108, 108, 111]])
    plain = target.generate(ids, max_new_tokens=12, do_sample=False)
    assisted = target.generate(ids, max_new_tokens=12, do_sample=False, assistant_model=assistant)
    assert plain.tolist() == assisted.tolist()


def test_export_of_an_unknown_variant_names_the_known_ones(folder: Path) -> None:
    done = run(
        sys.executable,
        "scripts/export.py",
        str(folder / "out/bundle"),
        "--variant",
        "3layer",
        "--out",
        str(folder / "x"),
        check=False,
    )
    assert done.returncode == 1
    assert "no variant '3layer'" in done.stderr
    assert "4layer and 2layer" in done.stderr
    assert "Traceback" not in done.stderr


def test_command_line_generates_as_a_program(folder: Path) -> None:
    """What it prints is tested in tests/decode/test_cli.py; here, that it runs and how it ends."""
    command = (sys.executable, "-m", "draftsmith.decode.cli", "generate")
    done = run(*command, str(folder / "out/bundle"), "red sea", "--max-tokens", "12", "--stats")
    assert done.stdout.endswith("\n")
    assert "tokens per step" in done.stderr
    refused = run(*command, "nowhere", "hi", check=False)
    assert refused.returncode == 1
    assert refused.stderr.endswith("draftsmith: nowhere: no such bundle folder\n")
    assert "Traceback" not in refused.stderr
