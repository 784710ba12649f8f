"""Every outcome of the production loop, enumerated over scripted models in float64, against the target alone."""

from __future__ import annotations

import sys

from _verdict import ROOT, conclude
from draftsmith.train.stage import run_job
from tqdm import tqdm

sys.path.insert(0, str(ROOT / "tests" / "decode"))

from enumeration import CASES, EXACT, Tables, enumerate_texts, reference_texts, total_variation  # noqa: E402


def main() -> None:
    rows, worst, missing = [], 0.0, []
    for name, case in tqdm(CASES.items(), desc="exact", unit="case"):
        tables = Tables(case.vocab)
        expected = reference_texts(case, tables)
        for rule in ("block", "token"):
            for ahead in (False, True):
                texts, events = enumerate_texts(case, tables, ahead, rule)
                off = total_variation(texts, expected)
                worst = max(worst, off)
                missing += [f"{name}: no {event}" for event in case.must if not events[event]]
                rows.append((name, rule, "drafted ahead" if ahead else "", len(texts), off))
    print("\n| case | rule | | texts | total variation |\n|---|---|---|---|---|")
    for name, rule, ahead_text, count, off in rows:
        print(f"| {name} | {rule} | {ahead_text} | {count} | {off:.1e} |")
    conclude("exact", worst < EXACT and not missing,
             f"{len(rows)} enumerations, largest total variation {worst:.1e}, bar {EXACT:.0e}"
             + (f"; not reached: {', '.join(missing)}" if missing else ""), worst=worst)


if __name__ == "__main__":
    run_job(main, "exact")
