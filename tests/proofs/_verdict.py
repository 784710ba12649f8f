"""What every proof prints and writes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NoReturn

from draftsmith.data.io import write_json

ROOT = Path(__file__).resolve().parents[2]


def conclude(name: str, passed: bool, figures: str, **facts: Any) -> NoReturn:
    """Print `PASS|FAIL name: figures`, write runs/proofs/name.json, exit 0 or 1."""
    found = {"name": name, "passed": bool(passed), "figures": figures, **facts}
    write_json(ROOT / "runs" / "proofs" / f"{name}.json", found)
    print(f"{'PASS' if passed else 'FAIL'} {name}: {figures}", flush=True)
    sys.exit(0 if passed else 1)
