"""The enumeration catches what it is meant to catch: each planted fault moves the distribution."""

from __future__ import annotations

import pytest
from enumeration import CASES, CAUGHT, distance
from planted import MUTANTS, Mutant


@pytest.mark.parametrize(("mutant", "rule"), [(m, rule) for m in MUTANTS for rule in m.rules],
                         ids=[f"{m.name}-{m.case}-{rule}" for m in MUTANTS for rule in m.rules])
def test_a_planted_fault_is_caught(mutant: Mutant, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.fault(monkeypatch)
    assert distance(CASES[mutant.case], rule) > CAUGHT
