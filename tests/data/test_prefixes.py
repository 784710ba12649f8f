"""Prompts that begin alike: which count as a family, and how much they share."""

from __future__ import annotations

import random

import pytest
from draftsmith.data.prefixes import SHARED, common_prefix, families, worth_sharing


@pytest.mark.parametrize(("a", "b", "expected"), [
    ([], [1], 0), ([1], [1], 1), ([1, 2], [1, 3], 1), ([1, 2, 3], [1, 2], 2), ([2, 1], [1, 2], 0),
])
def test_the_common_prefix_ends_at_the_first_difference(a: list[int], b: list[int], expected: int) -> None:
    assert common_prefix(a, b) == common_prefix(b, a) == expected


def test_what_is_worth_sharing_is_long_or_most_of_a_short_text() -> None:
    assert worth_sharing(SHARED, 10_000)
    assert worth_sharing(5, 10)
    assert not worth_sharing(SHARED - 1, 10_000)
    assert not worth_sharing(4, 10)
    assert not worth_sharing(0, 0)


def test_families_hold_every_text_once_and_only_texts_that_share() -> None:
    rng = random.Random(0)
    schemas = [[rng.randrange(1000) for _ in range(rng.randrange(70, 200))] for _ in range(5)]
    lone = [[2000 + i] * 30 for i in range(4)]
    texts = [[*rng.choice(schemas), *(rng.randrange(1000) for _ in range(20))] for _ in range(40)] + lone
    rng.shuffle(texts)
    found = families(texts)
    assert sorted(i for family in found for i in family) == list(range(len(texts)))
    assert {len(f) for f in found if texts[f[0]] in lone} == {1}
    for family in found:
        for i in family:
            assert common_prefix(texts[family[0]], texts[i]) >= SHARED or texts[i] in lone
    assert len(found) <= len(schemas) + len(lone)


def test_schemas_after_one_system_prompt_are_families_of_their_own() -> None:
    rng = random.Random(1)
    system = [rng.randrange(1000) for _ in range(70)]
    schemas = [system + [rng.randrange(1000) for _ in range(300)] for _ in range(4)]
    texts = [[*schema, *(rng.randrange(1000) for _ in range(9))] for schema in schemas for _ in range(5)]
    rng.shuffle(texts)
    found = families(texts)
    assert sorted(len(family) for family in found) == [5] * 4
    for family in found:
        assert all(common_prefix(texts[family[0]], texts[i]) >= 370 for i in family)


def test_families_of_nothing_and_of_equal_texts() -> None:
    assert families([]) == []
    assert families([[1, 2], [3], [1, 2]]) == [[0, 2], [1]]
