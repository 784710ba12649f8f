"""The quickstart's prompts: reproducible, distinct, and held-out ones that ask about unseen tables."""

from __future__ import annotations

import re
from typing import Any

import pytest
from draftsmith.data.quickstart_prompts import KINDS, SPLITS, build

MOST = {"train": 2400, "heldout": 720}


def contents(split: str, count: int, seed: int = 0, kind: str | None = None) -> list[str]:
    return [r["messages"][0]["content"] for r in build(split, count, seed) if kind in (None, r["kind"])]


def table_names(prompt: str) -> set[str]:
    """Names of the tables in a prompt, written `name(column, column, ...)`."""
    return set(re.findall(r"\b([a-z_]+)\([a-z_]+, ", prompt))


def record_keys(prompt: str) -> frozenset[str]:
    """The keys of the JSON skeleton in a prompt."""
    return frozenset(re.findall(r'"(\w+)": ""', prompt))


@pytest.mark.parametrize("split", SPLITS)
def test_the_same_seed_gives_the_same_prompts_and_another_seed_others(split: str) -> None:
    assert build(split, 200, seed=3) == build(split, 200, seed=3)
    assert contents(split, 200, seed=3) != contents(split, 200, seed=4)


@pytest.mark.parametrize("split", SPLITS)
def test_fewer_prompts_are_a_prefix_of_more(split: str) -> None:
    whole = build(split, MOST[split])
    for count in (0, 1, 33, MOST[split] - 1):
        assert build(split, count) == whole[:count]


@pytest.mark.parametrize("split", SPLITS)
def test_prompts_and_ids_are_distinct_and_kinds_alternate(split: str) -> None:
    rows = build(split, MOST[split])
    assert len({r["messages"][0]["content"] for r in rows}) == len({r["id"] for r in rows}) == MOST[split]
    assert [r["kind"] for r in rows[:4]] == [*KINDS, *KINDS]
    for row in rows:
        assert [m["role"] for m in row["messages"]] == ["user"]
        assert not re.search(r"[{}]", row["messages"][0]["content"]) or row["kind"] == "json"


def test_heldout_tables_and_records_never_occur_in_training() -> None:
    found: dict[str, tuple[set[str], set[frozenset[str]]]] = {}
    for split in SPLITS:
        sql, records = contents(split, MOST[split], kind="sql"), contents(split, MOST[split], kind="json")
        assert all(table_names(p) for p in sql)
        assert all(record_keys(p) for p in records)
        found[split] = set().union(*map(table_names, sql)), set(map(record_keys, records))
    assert len(found["heldout"][0]) == 11
    assert not found["train"][0] & found["heldout"][0]
    assert not found["train"][1] & found["heldout"][1]


@pytest.mark.parametrize("split", SPLITS)
def test_a_short_prefix_already_spreads_over_many_schemas(split: str) -> None:
    first = contents(split, 40, kind="sql")
    assert len({frozenset(table_names(p)) for p in first}) >= min(15, len(first), 8)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("beyond", [True, False])
def test_a_count_out_of_range_is_refused_with_the_most_there_are(split: str, beyond: bool) -> None:
    with pytest.raises(ValueError, match=f"0 to {MOST[split]}"):
        build(split, MOST[split] + 1 if beyond else -1)


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="'train' or 'heldout', not 'test'"):
        build("test", 1)


def test_rows_are_chat_samples() -> None:
    row: dict[str, Any] = build("train", 1)[0]
    assert sorted(row) == ["id", "kind", "messages"]
