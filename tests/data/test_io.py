"""Writers leave the old file, the new file or none; readers name the file and the line that is wrong."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from draftsmith.data import DraftsmithError, io

WRITERS = ["file", "folder"]


def put(kind: str, path: Path, text: str) -> None:
    """Write `text` to `path` (a file, or a folder with one file)."""
    if kind == "file":
        io.write_text(path, text)
    else:
        with io.atomic_dir(path) as aside:
            (aside / "inner.txt").write_text(text)


def read(kind: str, path: Path) -> str:
    return (path if kind == "file" else path / "inner.txt").read_text()


def run_python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("kind", WRITERS)
def test_a_successful_write_replaces_the_old_content_and_leaves_nothing_beside_it(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "thing"
    put(kind, path, "old")
    put(kind, path, "new")
    assert read(kind, path) == "new"
    assert list(path.parent.iterdir()) == [path]


def test_a_replaced_folder_does_not_keep_files_of_the_old_one(tmp_path: Path) -> None:
    with io.atomic_dir(tmp_path / "thing") as aside:
        (aside / "stale.txt").write_text("old")
    put("folder", tmp_path / "thing", "new")
    assert [p.name for p in (tmp_path / "thing").iterdir()] == ["inner.txt"]


@pytest.mark.parametrize("kind", WRITERS)
def test_an_exception_inside_the_block_keeps_the_old_content_and_no_leftovers(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "thing"
    put(kind, path, "old")

    def stop_half_way() -> None:
        with (io.atomic_path if kind == "file" else io.atomic_dir)(path) as aside:
            (aside if kind == "file" else aside / "inner.txt").write_text("half")
            raise KeyError("stop")

    with pytest.raises(KeyError):
        stop_half_way()
    assert read(kind, path) == "old"
    assert list(tmp_path.iterdir()) == [path]


KILLED = """
import os, signal, sys
from pathlib import Path
from draftsmith.data import io

kind, path, renames = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
rename = os.replace

def killed(*args):
    global renames
    if renames == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    renames -= 1
    rename(*args)

os.replace = killed
with (io.atomic_path if kind == "file" else io.atomic_dir)(path) as aside:
    (aside if kind == "file" else aside / "inner.txt").write_text("new" * 1000)
"""


@pytest.mark.parametrize("kind", WRITERS)
def test_killed_between_writing_and_renaming_leaves_the_old_content(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "thing"
    put(kind, path, "old")
    assert run_python(KILLED, kind, str(path), "0").returncode == -signal.SIGKILL
    assert read(kind, path) == "old"
    put(kind, path, "after")  # and the next run is not disturbed by what the dead one left
    assert read(kind, path) == "after"


def test_killed_between_the_two_renames_of_a_folder_leaves_no_mixture(tmp_path: Path) -> None:
    path = tmp_path / "thing"
    put("folder", path, "old")
    assert run_python(KILLED, "folder", str(path), "1").returncode == -signal.SIGKILL
    assert not path.exists() or read("folder", path) == "old"
    put("folder", path, "after")
    assert read("folder", path) == "after"


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("failing", ["fsync", "rename"])
def test_a_full_disk_is_a_clear_error_and_keeps_the_old_content(
    kind: str, failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "thing"
    put(kind, path, "old")
    real = os.replace

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def full_for_the_new_content(source: Any, to: Any) -> None:
        if Path(source).name.endswith(".tmp"):
            full()
        real(source, to)

    if failing == "fsync":
        monkeypatch.setattr(os, "fsync", full)
    else:
        monkeypatch.setattr(os, "replace", full_for_the_new_content)
    with pytest.raises(DraftsmithError, match="thing.*No space left"):
        put(kind, path, "new")
    monkeypatch.undo()
    assert path.exists(), "the old content is gone from its place"
    assert read(kind, path) == "old"
    assert list(tmp_path.iterdir()) == [path]


LIMITED = """
import resource, sys
from draftsmith.data import DraftsmithError, io

resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    io.write_json(sys.argv[1], ["x" * 100] * 1000)
except DraftsmithError as error:
    print(error)
    sys.exit(7)
"""


def test_a_write_that_the_system_cuts_short_keeps_the_old_file(tmp_path: Path) -> None:
    """A real refused write: the file-size limit is hit in the middle of the new content."""
    path = tmp_path / "thing.json"
    io.write_json(path, "old")
    done = run_python(LIMITED, str(path))
    assert done.returncode == 7, done.stderr
    assert str(path) in done.stdout
    assert io.read_json(path) == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", WRITERS)
def test_a_parent_that_cannot_be_made_is_a_clear_error(kind: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DraftsmithError, match="cannot write"):
        put(kind, tmp_path / "file" / "thing", "new")


@pytest.mark.parametrize("value", [float("nan"), {"loss": float("inf")}, [1.0, float("-inf")]])
def test_json_with_nan_or_infinity_is_refused_and_the_old_file_stays(value: Any, tmp_path: Path) -> None:
    io.write_json(tmp_path / "a.json", {"old": 1})
    with pytest.raises(ValueError, match="JSON"):
        io.write_json(tmp_path / "a.json", value)
    assert io.read_json(tmp_path / "a.json") == {"old": 1}


def test_json_round_trip_does_not_depend_on_key_order(tmp_path: Path) -> None:
    io.write_json(tmp_path / "a.json", {"b": [1, None, "é"], "a": 0.1})
    io.write_json(tmp_path / "b.json", {"a": 0.1, "b": [1, None, "é"]})
    assert io.read_json(tmp_path / "a.json") == {"a": 0.1, "b": [1, None, "é"]}
    assert io.sha256_file(tmp_path / "a.json") == io.sha256_file(tmp_path / "b.json")


@pytest.mark.parametrize("content", [b'{"a": [1, 2', b"", b'{"a": "\xff"}'], ids=["truncated", "empty", "not utf-8"])
def test_a_damaged_json_file_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    path.write_bytes(content)
    with pytest.raises(DraftsmithError, match=r"facts\.json: not valid JSON"):
        io.read_json(path)


@pytest.mark.parametrize("reader", [io.read_json, io.read_jsonl])
def test_a_missing_file_is_named(reader: Any, tmp_path: Path) -> None:
    with pytest.raises(DraftsmithError, match="absent.*no such file"):
        reader(tmp_path / "absent")


def test_jsonl_round_trip_skips_blank_lines(tmp_path: Path) -> None:
    rows = [{"text": "é\nü"}, {"text": ""}]
    io.write_jsonl(tmp_path / "rows.jsonl", rows)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write("\n\n")
    assert io.read_jsonl(tmp_path / "rows.jsonl") == rows


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "cut', "not valid JSON"),
        (b"[1, 2]", "expected an object, got list"),
        (b'{"text": "\xe2\x82', "UTF-8"),
    ],
    ids=["truncated", "not an object", "cut in a character"],
)
def test_a_bad_jsonl_line_is_named_by_its_number(line: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line + b"\n")
    with pytest.raises(DraftsmithError, match=r"(?i)rows\.jsonl, line 3: .*" + reason):
        io.read_jsonl(path)


def test_content_hash_of_json_ignores_key_order_but_not_values() -> None:
    value = {"b": [1, 2], "a": {"y": None, "x": 0.5}}
    assert io.sha256_json(value) == io.sha256_json(json.loads('{"a": {"x": 0.5, "y": null}, "b": [1, 2]}'))
    assert io.sha256_json(value) != io.sha256_json({**value, "b": [2, 1]})


def test_nearest_suggests_a_close_word_and_lists_the_known_ones_otherwise() -> None:
    assert "'steps'" in io.nearest("stpes", ["steps", "block"])
    assert "block, steps" in io.nearest("zzzz", ["steps", "block"])
    assert io.nearest("zzzz", []) == ""
