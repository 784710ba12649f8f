"""Teacher rows are exact, shards come back as written, and a cache that does not fit is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.data import DraftsmithError
from draftsmith.data.teacher_cache import (
    CacheManifest,
    CacheWriter,
    Document,
    TeacherCache,
    teacher_rows,
)

FIELDS = ("tokens", "branch", "row_token", "top_ids", "top_logp", "tail")


def make_manifest(**changes: Any) -> CacheManifest:
    return CacheManifest(
        **{
            "target": {"name": "tiny"},
            "tokenizer_hash": "t1",
            "corpus_hash": "c1",
            "k": 4,
            "temperature": 0.5,
            "settings": {"seed": 0},
            **changes,
        }
    )


def make_document(seed: int) -> Document:
    """A prompt and two answers of random lengths, with rows for the answers."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 6, 3)
    branch = np.repeat(np.arange(3), sizes)
    rows = np.arange(sizes[0] - 1, len(branch) - 1)
    return Document(
        rng.integers(0, 50, len(branch)),
        branch,
        rows,
        rng.integers(0, 50, (len(rows), 4)),
        rng.normal(size=(len(rows), 4)).astype(np.float32),
        rng.random(len(rows)).astype(np.float32),
    )


def write_cache(folder: Path, shards: int = 3, finish: bool = True, **changes: Any) -> list[Document]:
    """A cache with two documents a shard."""
    writer, documents = CacheWriter(folder, make_manifest(**changes)), [make_document(i) for i in range(2 * shards)]
    for s in range(shards):
        writer.write_shard(s, documents[2 * s : 2 * s + 2])
    if finish:
        writer.finish(shards)
    return documents


def assert_holds(cache: TeacherCache, documents: list[Document]) -> None:
    assert len(cache) == len(documents)
    for i, document in enumerate(documents):
        for name in FIELDS:
            assert np.array_equal(getattr(cache[i], name), getattr(document, name)), (i, name)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_teacher_rows_against_float64(temperature: float) -> None:
    logits = torch.randn(7, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 4
    ids, logp, tail = teacher_rows(logits.float(), 5, temperature)
    exact = torch.log_softmax(logits.float().double() / temperature, -1)
    want, order = exact.sort(-1, descending=True)
    assert torch.equal(ids.long(), order[:, :5])
    torch.testing.assert_close(logp.double(), want[:, :5], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(tail.double(), want[:, 5:].exp().sum(-1), rtol=1e-5, atol=0.0)
    torch.testing.assert_close(logp.exp().sum(-1) + tail, torch.ones(7))


@pytest.mark.parametrize("mass", [1e-3, 1e-6, 1e-9, 1e-12])
def test_the_tail_mass_keeps_its_digits_however_small_it_is(mass: float) -> None:
    """1 - sum(top-k) in float32 would be 0 or noise below 1e-7."""
    rest = torch.log(torch.full((60,), mass / 60, dtype=torch.float64))
    logits = 0.5 * torch.cat([torch.log(torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)), rest])
    _, _, tail = teacher_rows(logits[None].float(), 3, 0.5)
    exact = torch.softmax(logits.float().double() / 0.5, -1)[3:].sum()
    torch.testing.assert_close(tail[0].double(), exact, rtol=2e-5, atol=0.0)


def test_a_k_beyond_the_vocabulary_keeps_it_whole_without_a_tail() -> None:
    ids, logp, tail = teacher_rows(torch.randn(3, 6), 16, 1.0)
    assert ids.shape == logp.shape == (3, 6)
    assert tail.tolist() == [0.0, 0.0, 0.0]


def test_documents_come_back_as_written(tmp_path: Path) -> None:
    documents = write_cache(tmp_path)
    cache = TeacherCache(tmp_path, {"k": 4, "temperature": 0.5, "corpus_hash": "c1", "tokenizer_hash": "t1"})
    assert_holds(cache, documents)
    assert [(s["documents"], s["rows"]) for s in cache.manifest.shards] == [
        (2, len(documents[i].tail) + len(documents[i + 1].tail)) for i in (0, 2, 4)
    ]


def test_tokens_of_answers_and_of_prompts_are_counted_apart(tmp_path: Path) -> None:
    documents = write_cache(tmp_path)
    expected = np.zeros((2, 64), int)
    for document in documents:
        for token, branch in zip(document.tokens, document.branch, strict=True):
            expected[int(branch == 0), token] += 1
    answers, prompts = TeacherCache(tmp_path).token_counts(64)
    assert answers.tolist() == expected[0].tolist()
    assert prompts.tolist() == expected[1].tolist()


def test_writing_goes_on_with_the_shards_that_are_missing(tmp_path: Path) -> None:
    documents = write_cache(tmp_path, shards=2, finish=False)
    # Killed between writing a shard and recording it: the stray shard is written again.
    (tmp_path / "shard-00002.safetensors").write_bytes(b"never recorded")
    writer = CacheWriter(tmp_path, make_manifest())
    assert writer.missing(3) == [2]
    with pytest.raises(DraftsmithError, match="shard 2 has not been written"):
        writer.finish(3)
    documents += [make_document(8), make_document(9)]
    writer.write_shard(2, documents[4:])
    writer.finish(3)
    assert_holds(TeacherCache(tmp_path), documents)
    assert CacheWriter(tmp_path, make_manifest()).missing(3) == []


def test_shards_may_be_written_in_any_order_and_by_several_writers(tmp_path: Path) -> None:
    documents = [make_document(i) for i in range(6)]
    writers = [CacheWriter(tmp_path, make_manifest()), CacheWriter(tmp_path, make_manifest())]
    for number in (2, 0, 1):
        writers[number % 2].write_shard(number, documents[2 * number : 2 * number + 2])
    writers[1].finish(3)
    assert_holds(TeacherCache(tmp_path), documents)
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".json", *3 * [".safetensors"]]


def test_a_shard_without_a_document_leaves_no_file(tmp_path: Path) -> None:
    writer, document = CacheWriter(tmp_path, make_manifest()), make_document(0)
    writer.skip_shard(0)
    writer.write_shard(1, [document])
    writer.finish(2)
    assert_holds(TeacherCache(tmp_path), [document])


@pytest.mark.parametrize(
    ("changed", "value"),
    [
        ("k", 8),
        ("temperature", 1.0),
        ("corpus_hash", "c2"),
        ("tokenizer_hash", "t2"),
        ("target", {"name": "other"}),
        ("settings", {"seed": 1}),
    ],
)
def test_writing_into_a_cache_made_from_something_else_is_refused(changed: str, value: Any, tmp_path: Path) -> None:
    documents = write_cache(tmp_path, finish=False)
    name = "seed" if changed == "settings" else changed
    with pytest.raises(DraftsmithError, match=f"made with {name} = "):
        CacheWriter(tmp_path, make_manifest(**{changed: value}))
    CacheWriter(tmp_path, make_manifest()).finish(3)
    assert_holds(TeacherCache(tmp_path), documents)  # the refused attempt touched nothing


def test_a_setting_that_an_older_cache_does_not_know_is_no_reason_to_refuse_it(tmp_path: Path) -> None:
    documents = write_cache(tmp_path)
    assert CacheWriter(tmp_path, make_manifest(settings={"seed": 0, "new": 1})).manifest.complete
    with pytest.raises(DraftsmithError, match="made with seed = 0, not 1"):
        CacheWriter(tmp_path, make_manifest(settings={"new": 1, "seed": 1}))
    assert_holds(TeacherCache(tmp_path), documents)


@pytest.mark.parametrize(
    ("field", "wanted", "found"),
    [
        ("k", 8, "4"),
        ("temperature", 1.0, "0.5"),
        ("corpus_hash", "c2", "c1"),
        ("tokenizer_hash", "t2", "t1"),
    ],
)
def test_reading_a_cache_that_does_not_fit_names_the_field_and_both_values(
    field: str, wanted: Any, found: str, tmp_path: Path
) -> None:
    write_cache(tmp_path)
    with pytest.raises(DraftsmithError, match=f"{field} = {found}.* asks for {wanted}"):
        TeacherCache(tmp_path, {field: wanted})


def test_an_unfinished_cache_is_refused(tmp_path: Path) -> None:
    write_cache(tmp_path, finish=False)
    with pytest.raises(DraftsmithError, match="unfinished"):
        TeacherCache(tmp_path)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-16])


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncated, "truncated or altered"),
        (flipped, "truncated or altered"),
        (Path.unlink, "missing"),
    ],
)
def test_a_damaged_shard_is_named_and_refused(damage: Any, reason: str, tmp_path: Path) -> None:
    write_cache(tmp_path)
    damage(tmp_path / "shard-00001.safetensors")
    with pytest.raises(DraftsmithError, match=f"shard-00001.safetensors.*{reason}"):
        TeacherCache(tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "no teacher cache here"),
        ('{"version": 1, "k"', "not valid JSON"),
        ('{"version": 99}', "version 99"),
        ('{"version": 1}', "not a manifest of a teacher cache"),
        ("[]", "manifest"),
    ],
    ids=["absent", "truncated", "from the future", "fields missing", "not an object"],
)
@pytest.mark.parametrize("opened_by", [TeacherCache, CacheManifest.load])
def test_a_folder_without_a_sound_manifest_is_refused(
    opened_by: Any, content: str | None, reason: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(DraftsmithError, match=reason):
        opened_by(tmp_path)


LIMITED = """
import resource, sys
import numpy as np
from draftsmith.data import DraftsmithError
from draftsmith.data.teacher_cache import CacheManifest, CacheWriter, Document

n = 2000
document = Document(np.arange(n), np.ones(n, int), np.arange(n), np.zeros((n, 4)), np.zeros((n, 4)), np.zeros(n))
writer = CacheWriter(sys.argv[1], CacheManifest.load(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
try:
    writer.write_shard(1, [document])
except DraftsmithError as error:
    print(error)
    sys.exit(7)
"""


def test_a_shard_that_does_not_fit_the_disk_is_a_clear_error_and_the_cache_can_go_on(tmp_path: Path) -> None:
    """A real refused write, by a limit on the file size, in the middle of the shard."""
    documents = write_cache(tmp_path, shards=1, finish=False)
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    names = ["manifest.json", "shard-00000.json", "shard-00000.safetensors"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    CacheWriter(tmp_path, make_manifest()).finish(1)
    assert_holds(TeacherCache(tmp_path), documents)
    assert done.returncode == 7, f"a traceback instead of a clear error: {done.stderr}"
    assert "shard-00001.safetensors" in done.stdout


def test_the_manifest_names_what_the_cache_was_made_from(tmp_path: Path) -> None:
    write_cache(tmp_path)
    written = json.loads((tmp_path / "manifest.json").read_text())
    expected = {
        "target": {"name": "tiny"},
        "tokenizer_hash": "t1",
        "corpus_hash": "c1",
        "k": 4,
        "temperature": 0.5,
        "complete": True,
    }
    assert {key: written[key] for key in expected} == expected
