"""Real launches of the jobs, for whole-run tests and proofs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command(job: str, recipe: Path, *overrides: str, ranks: int = 1) -> list[str]:
    """The `deepspeed` command of a job on some ranks of this machine."""
    return ["deepspeed", "--num_accelerators", str(ranks), "--master_port", str(free_port()), f"train/{job}.py",
            "--recipe", str(recipe), *overrides]


def environment(ranks: int = 1) -> dict[str, str]:
    """The interpreter's own scripts first, two threads in all, no network."""
    return {**os.environ, "OMP_NUM_THREADS": str(max(1, 2 // ranks)), "HF_HUB_OFFLINE": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def run(*command: str, check: bool = True, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment(ranks), check=False)
    if check and done.returncode:
        raise AssertionError(f"{command} exited {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done


def launch(job: str, recipe: Path, *overrides: str, ranks: int = 1,
           check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a job to its end; with `check` a failure raises, with the end of what it said. Raises for memory that the
    ranks shared and left behind, too."""
    asked = command(job, recipe, *overrides, ranks=ranks)
    done = run(*asked, check=check, ranks=ranks)
    port = asked[asked.index("--master_port") + 1]
    if left := list(Path("/dev/shm").glob(f"*_{port}_*")):
        raise AssertionError(f"{job} left {[path.name for path in left]} in memory")
    return done


def start(job: str, recipe: Path, log: Path, *overrides: str, ranks: int = 1) -> subprocess.Popen[bytes]:
    """Start a job in a process group of its own, its output appended to `log`."""
    with log.open("ab") as out:
        return subprocess.Popen(command(job, recipe, *overrides, ranks=ranks), cwd=ROOT, stdout=out, stderr=out,
                                start_new_session=True, env=environment(ranks))
