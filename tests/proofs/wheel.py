"""The built wheel, installed in an environment of its own outside the checkout, decodes without deepspeed and
datasets. With a bundle (runs/quickstart/bundle by default, where it exists) it also generates."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from _verdict import ROOT, conclude

CHECK = """
import importlib.util, pathlib, sys
import draftsmith.decode, draftsmith.data, draftsmith.distill
from draftsmith.decode import Decoder, SamplingParams
from draftsmith.decode import bundle, cli, loop, report, validate
root = pathlib.Path(sys.argv[1]).resolve()
assert root not in pathlib.Path(draftsmith.decode.__file__).resolve().parents, draftsmith.decode.__file__
present = [m for m in ("deepspeed", "datasets") if importlib.util.find_spec(m)]
assert not present, present
if len(sys.argv) > 2:
    out = Decoder.load(sys.argv[2]).generate([{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=8))
    print(len(out.token_ids), "tokens")
print("ok")
"""


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        conclude("wheel", False, f"{' '.join(command[:4])} ... failed: {(done.stderr or done.stdout).strip()[-600:]}")
    return done.stdout


def main() -> None:
    bundle = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "runs/quickstart/bundle").resolve()
    shutil.rmtree(ROOT / "build", ignore_errors=True)  # a stale one keeps modules that are gone
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(work), str(ROOT), cwd=work)
        wheel = next(work.glob("draftsmith-*.whl"))
        run(sys.executable, "-m", "venv", "env", cwd=work)
        python = str(work / "env/bin/python")
        pip = (python, "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt"))
        run(*pip, "torch", cwd=work)
        run(*pip, f"{wheel}", cwd=work)
        arguments = [str(bundle)] if bundle.is_dir() else []
        printed = run(python, "-c", CHECK, str(ROOT), *arguments, cwd=work)
        shown = run(str(work / "env/bin/draftsmith"), "--help", cwd=work)
        passed = printed.strip().endswith("ok") and "generate" in shown
    conclude(
        "wheel",
        passed,
        f"{wheel.name} imports outside the checkout without deepspeed and datasets"
        + (f" and generates from {bundle.name}" if arguments else ""),
    )


if __name__ == "__main__":
    main()
