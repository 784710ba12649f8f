"""Faults planted into the loop: each has to move the enumerated distribution, or the proof `exact` proves nothing."""

from __future__ import annotations

import sys

import pytest
from _verdict import ROOT, conclude
from draftsmith.train.stage import run_job
from tqdm import tqdm

sys.path.insert(0, str(ROOT / "tests" / "decode"))

from enumeration import CASES, CAUGHT, EXACT, distance  # noqa: E402
from planted import MUTANTS  # noqa: E402


def main() -> None:
    rows = []
    for mutant in tqdm(MUTANTS, desc="mutants", unit="fault"):
        for rule in mutant.rules:
            with pytest.MonkeyPatch.context() as patch:
                mutant.fault(patch)
                rows.append((mutant.name, mutant.case, rule, distance(CASES[mutant.case], rule)))
    sound = max(distance(CASES[case], rule) for case, rule in {(case, rule) for _, case, rule, _ in rows})
    print("\n| planted fault | case | rule | total variation |\n|---|---|---|---|")
    for name, case, rule, off in rows:
        print(f"| {name.replace('_', ' ')} | {case} | {rule} | {off:.4f} |")
    missed = sorted({name for name, _, _, off in rows if off <= CAUGHT})
    conclude("mutants", not missed and sound < EXACT,
             f"{len(rows) - len(missed)} of {len(rows)} planted faults caught (total variation above {CAUGHT:.0e}); "
             f"without a fault {sound:.1e}" + (f"; missed: {', '.join(missed)}" if missed else ""))


if __name__ == "__main__":
    run_job(main, "mutants")
