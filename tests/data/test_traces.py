"""Trace files come back as written; damaged and foreign files are refused by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draftsmith.data import DraftsmithError
from draftsmith.data.traces import HORIZON, Traces, read_meta, read_traces, write_traces

ARRAYS = ("position_N", "features_NF", "acceptance_NAH", "variant_N", "drafted_N", "accepted_N", "confidence_N")
META = {"variants": ["2L", "4L@0.75", "4L"], "step_seconds": [0.1, 0.2, 0.3], "temperature": 0.0, "inputs": "é"}


def make_traces(n: int) -> Traces:
    rng = np.random.default_rng(0)
    acceptance = rng.random((n, 3, HORIZON)).astype(np.float32)
    acceptance[-1, :, 5:] = np.nan  # past the end of the text
    features = rng.normal(size=(n, 6)).astype(np.float32)
    return Traces(
        [f"p{i // 2}" for i in range(n)],
        np.arange(n) * 8,
        features,
        acceptance,
        rng.integers(0, 3, n),
        rng.integers(4, 9, n),
        rng.integers(0, 4, n),
        np.where(np.arange(n) == 3, np.nan, rng.random(n)).astype(np.float32),
        META,
    )


@pytest.fixture
def written(tmp_path: Path) -> Path:
    write_traces(tmp_path / "traces.parquet", make_traces(50))
    return tmp_path / "traces.parquet"


def test_round_trip_with_nan_and_metadata(written: Path) -> None:
    expected, found = make_traces(50), read_traces(written)
    assert found.prompt_N == expected.prompt_N
    for name in ARRAYS:
        assert getattr(found, name).shape == getattr(expected, name).shape
        assert np.array_equal(getattr(found, name), getattr(expected, name), equal_nan=True), name
    assert np.isnan(found.acceptance_NAH).sum() == 9
    assert found.meta == read_meta(written) == META


def test_taking_rows_keeps_the_columns_together() -> None:
    traces = make_traces(9)
    rows = np.arange(9) % 3 == 1
    taken = traces.take(rows)
    assert len(taken) == 3
    assert taken.prompt_N == [traces.prompt_N[i] for i in (1, 4, 7)]
    assert taken.meta == META
    for name in ARRAYS:
        assert np.array_equal(getattr(taken, name), getattr(traces, name)[[1, 4, 7]], equal_nan=True)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
@pytest.mark.parametrize("reader", [read_traces, read_meta])
def test_a_truncated_file_is_named(reader: Any, share: float, written: Path) -> None:
    content = written.read_bytes()
    written.write_bytes(content[: int(share * len(content))])
    with pytest.raises(DraftsmithError, match=r"traces\.parquet: "):
        reader(written)


def test_rows_damaged_under_a_sound_footer_are_named(written: Path) -> None:
    content = bytearray(written.read_bytes())
    content[4:60] = bytes(56)
    written.write_bytes(bytes(content))
    with pytest.raises(DraftsmithError, match=r"traces\.parquet: truncated or damaged"):
        read_traces(written)


def test_a_foreign_parquet_file_is_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "corpus.parquet"
    pq.write_table(pa.table({"text": ["a", "b"]}), path)
    with pytest.raises(DraftsmithError, match=r"corpus\.parquet: .*not an acceptance trace"):
        read_traces(path)


def test_a_file_of_an_earlier_release_is_refused_with_what_to_do(written: Path) -> None:
    import pyarrow.parquet as pq

    pq.write_table(pq.read_table(str(written)).drop_columns(["confidence"]), str(written))
    with pytest.raises(DraftsmithError, match=r"traces\.parquet: written by an earlier release; delete it"):
        read_traces(written)


def test_a_missing_file_is_named_with_what_makes_it(tmp_path: Path) -> None:
    with pytest.raises(DraftsmithError, match=r"absent\.parquet: no such trace file; run train/trace\.py"):
        read_traces(tmp_path / "absent.parquet")


LIMITED = """
import resource, sys
import numpy as np
from draftsmith.data import DraftsmithError
from draftsmith.data.traces import Traces, write_traces

n = 500
rng = np.random.default_rng(0)
columns = np.zeros(n), rng.random((n, 6)), rng.random((n, 3, 8)), *np.zeros((4, n))
traces = Traces(["p"] * n, *columns, {"variants": ["a", "b", "c"]})
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    write_traces(sys.argv[1], traces)
except DraftsmithError as error:
    print(error)
    sys.exit(7)
"""


def test_a_write_that_does_not_fit_the_disk_is_a_clear_error_and_keeps_the_old_file(written: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(written)], capture_output=True, text=True, timeout=120, check=False
    )
    assert len(read_traces(written)) == 50
    assert list(written.parent.iterdir()) == [written]
    assert done.returncode == 7, f"a traceback instead of a clear error: {done.stderr}"
    assert "traces.parquet" in done.stdout
