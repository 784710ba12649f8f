"""From a text file to a decoder with nothing but it: a target trained from scratch, a draft of its own shape."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml
from conftest import make_tokenizer
from draftsmith.decode import Decoder, SamplingParams
from launching import launch, run
from transformers import AutoModelForCausalLM

JOBS = ("prepare", "target", "distill", "trace", "gate")
SENTENCES = ["the red cat sat on the mat", "a blue dog ran to the sea", "the old map shows the sun", "we eat jam"]
HELD_OUT = ["on the mat sat the cat", "to the sea ran a dog", "the sun shows the map", "at noon we eat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which all five jobs have run on a file of sentences, training on two ranks (the draft by ZeRO 3)."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = [f"{SENTENCES[i % 4]}. {SENTENCES[(i * 7 + 1) % 4]}." for i in range(160)]
    for name, some in (("text", texts), ("heldout", HELD_OUT)):
        (folder / f"{name}.txt").write_text("\n\n".join(some))
    make_tokenizer().save_pretrained(folder / "tokenizer")
    recipe = {
        "name": "corpus", "out": str(folder / "out"), "target": {"name": str(folder / "out/target")},
        "prompts": {"train": str(folder / "text.txt"), "heldout": str(folder / "heldout.txt"), "text_words": 3,
                    "train_count": 1},
        "corpus": {"shard_documents": 64},
        "pretrain": {"tokenizer": str(folder / "tokenizer"), "layers": 2, "heads": 2, "hidden": 32, "intermediate": 64,
                     "block": 64, "steps": 60, "micro_batch": 4, "lr": 0.01, "warmup": 5, "heldout_blocks": 2,
                     "save_every": 30, "eval_every": 60, "precision": "fp32"},
        "draft": {"layers": 4, "exit": 2, "vocab": 320, "own": {"hidden": 16, "heads": 2, "intermediate": 24}},
        "distill": {"teacher": "online", "online_k": 16, "epochs": 8, "block": 64, "micro_batch": 2, "lr": 0.01,
                    "warmup": 2, "eval_prompts": 2, "eval_tokens": 8, "eval_every": 1000, "precision": "fp32",
                    "zero_stage": 3},
        "trace": {"prompts": 8, "max_tokens": 16}, "gate": {"steps": 10, "hidden": 8, "batch": 16},
        "bundle": {"policy": "fixed(2)"},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    for job in JOBS:
        if job in ("target", "distill"):
            launch(job, folder / "recipe.yaml", ranks=2)
        else:
            run(sys.executable, f"train/{job}.py", "--recipe", str(folder / "recipe.yaml"))
    return folder


def losses(folder: Path, job: str) -> list[float]:
    lines = [json.loads(line) for line in (folder / f"out/{job}.jsonl").read_text().splitlines()]
    return [line["train/loss"] for line in lines if "train/loss" in line]


def test_target_and_draft_learn(folder: Path) -> None:
    for job in ("target", "distill"):
        found = losses(folder, job)
        assert sum(found[-3:]) < 0.6 * sum(found[:3]), job
    last = json.loads((folder / "out/target.jsonl").read_text().splitlines()[-1])
    assert last["heldout/loss"] < 3


def test_the_target_is_a_stock_model(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "out/target")
    assert (model.config.num_hidden_layers, model.config.num_attention_heads, model.config.vocab_size) == (2, 2, 320)


def test_the_draft_decodes_what_the_target_says(folder: Path) -> None:
    decoder = Decoder.load(folder / "out/bundle")
    plain, drafted = (decoder.generate("the red", SamplingParams(max_tokens=24), name) for name in ("ar", "fixed(3)"))
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.accepted > 0


def test_finished_jobs_have_nothing_to_do(folder: Path) -> None:
    for job in ("prepare", "target", "distill"):
        done = run(sys.executable, f"train/{job}.py", "--recipe", str(folder / "recipe.yaml"))
        assert "nothing to do" in done.stderr, job


def test_a_changed_corpus_is_noticed(folder: Path) -> None:
    text = folder / "text.txt"
    before = text.read_text()
    text.write_text(before + "\n\none more")
    done = run(sys.executable, "train/prepare.py", "--recipe", str(folder / "recipe.yaml"), check=False)
    text.write_text(before)
    assert done.returncode == 1
    assert "tokenized corpus made with files = " in done.stderr
    assert "Traceback" not in done.stderr


def test_the_estimate_names_every_job_and_starts_none(folder: Path, tmp_path: Path) -> None:
    done = run(sys.executable, "train/distill.py", "--recipe", str(folder / "recipe.yaml"), f"out={tmp_path}/new",
               f"target.name={folder}/out/target", "corpus.documents=160", "--estimate")
    assert [line.split()[0] for line in done.stdout.splitlines()[1:4]] == ["prepare", "target", "distill"]
    assert "order of magnitude" in done.stdout
    assert not (tmp_path / "new").exists()
