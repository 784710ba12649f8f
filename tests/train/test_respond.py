"""The job `respond` from within: what an interruption leaves and what comes of it."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from draftsmith.data.io import write_json
from draftsmith.data.teacher_cache import TeacherCache, teacher_rows
from draftsmith.decode.runner import load_runner
from draftsmith.decode.target import load_target
from draftsmith.train import respond
from draftsmith.train.recipe import Recipe, load_recipe
from draftsmith.train.stage import load_prompts
from tiny import write_tiny_recipe


def write(recipe: Recipe) -> TeacherCache:
    respond.run(recipe, load_prompts(recipe, "train"))
    return TeacherCache(recipe.cache_dir)


@pytest.mark.parametrize("left", [[1, 3], [0], [0, 1, 2]])
def test_a_job_that_was_killed_writes_bitwise_what_it_would_have_written(tmp_path: Path, left: list[int]) -> None:
    """Shards 0 to 3, two in flight; `left` are those that were not written yet."""
    path = write_tiny_recipe(tmp_path)
    whole = write(load_recipe(path, [f"out={tmp_path}/whole"]))
    resumed = load_recipe(path, [f"out={tmp_path}/resumed"])
    shutil.copytree(whole.directory, resumed.cache_dir)
    manifest = resumed.cache_dir / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"complete": true', '"complete": false'))
    for number, shard in enumerate(whole.manifest.shards):
        if number in left:
            (resumed.cache_dir / shard["file"]).unlink()
        else:
            write_json(resumed.cache_dir / f"shard-{number:05d}.json", shard)
    again = write(resumed)
    assert [s["sha256"] for s in again.manifest.shards] == [s["sha256"] for s in whole.manifest.shards]
    assert np.array_equal(again[0].tokens, whole[0].tokens)


def test_the_pace_is_of_what_was_computed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a cache that is complete computes nothing, so it tells none."""
    recipe = load_recipe(write_tiny_recipe(tmp_path), ["respond.batch=1", "prompts.train_count=3"])
    cache = write(recipe)
    # One by one without padding: every token but the last of an answer is read once, what prompts share not again.
    read = sum(len(cache[i].tokens) - 1 for i in range(len(cache)))
    said = "".join(capsys.readouterr())
    computed = int(re.search(r"respond: ([\d,]+) positions computed in .* of what one large product", said)[1])
    assert 0.8 * read <= computed <= read
    write(recipe)
    assert "positions computed" not in "".join(capsys.readouterr())


def test_rows_of_prompts_are_the_targets_and_each_is_written_once(tmp_path: Path) -> None:
    path = write_tiny_recipe(tmp_path)
    plain = write(load_recipe(path, [f"out={tmp_path}/plain"]))
    recipe = load_recipe(path, [f"out={tmp_path}/more", "respond.prompt_rows=true", "respond.precision=fp32"])
    cache = write(recipe)
    runner = load_runner(load_target(recipe.target.name))
    counted, texts = Counter(), set()
    for document in (cache[i] for i in range(len(cache))):
        prompt = document.tokens[document.branch == 0].tolist()
        texts |= {tuple(prompt[: i + 1]) for i in range(len(prompt) - 1)}
        logits = runner.forward(torch.tensor([prompt]), runner.new_cache(1, len(prompt)), len(prompt))[1][0]
        ids, logp, tail = teacher_rows(logits, recipe.respond.k, recipe.distill.temperature)
        for row, token in enumerate(document.row_token):
            if token < len(prompt) - 1:
                counted[tuple(prompt[: token + 1])] += 1
                assert document.top_logp[row] == pytest.approx(logp[token].numpy(), abs=1e-4)
                assert document.tail[row] == pytest.approx(float(tail[token]), abs=1e-5)
    assert counted == dict.fromkeys(texts, 1)
    assert len(texts) > len(cache)
    # Answers are what they were, with the rows that they had.
    for i in range(len(cache)):
        assert np.array_equal(cache[i].tokens, plain[i].tokens)
        assert np.array_equal(cache[i].row_token[-len(plain[i].row_token) :], plain[i].row_token)
