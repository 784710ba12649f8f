"""Running Python that a model wrote: in a process of its own, with limits on time, memory, output and what it touches.

Two layers. The operating system's limits hold whatever the code does: processor and wall time, address space, file
sizes, no core dumps, and the process group is killed at the end. Within the interpreter an audit hook, which code
cannot remove, refuses processes, sockets, signals to others, foreign functions, and any change to files. That is
enough for a model's honest mistakes. It is not a jail for code that attacks the interpreter: for that, run the
benchmark in a container.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass

GUARD = '''
import sys as _sys, os as _os
_secret, _source = _sys.stdin.readline().strip(), _sys.stdin.read()
_report = _os.fdopen(int(_sys.argv[1]), "w")
def _limit(seconds, memory, size):
    import resource as r
    for what, value in ((r.RLIMIT_CPU, seconds), (r.RLIMIT_AS, memory), (r.RLIMIT_FSIZE, size), (r.RLIMIT_CORE, 0),
                        (r.RLIMIT_NOFILE, 64)):
        r.setrlimit(what, (value, value))
_limit(*map(int, _sys.argv[2:5]))
def _guard():
    refused = ("subprocess.", "socket.", "ctypes.", "shutil.", "os.fork", "os.exec", "os.spawn", "os.posix_spawn",
               "os.system", "os.kill", "os.putenv", "os.chmod", "os.chown", "os.link", "os.symlink", "os.rename",
               "os.remove", "os.rmdir", "os.truncate", "os.mkdir", "os.setxattr", "pty.", "signal.pthread_kill",
               "sys.setprofile", "sys.settrace", "ftplib.", "smtplib.", "urllib.", "http.", "mmap.",
               "resource.", "code.__new__", "gc.get_objects", "gc.get_referrers")
    write = _os.O_WRONLY | _os.O_RDWR | _os.O_CREAT | _os.O_TRUNC | _os.O_APPEND
    def hook(event, args):
        if event.startswith(refused):
            raise PermissionError(f"not allowed here: {event}")
        if event == "open":
            path, mode, flags = args
            if (flags or 0) & write or (isinstance(mode, str) and set(mode) & set("wax+")):
                raise PermissionError(f"not allowed here: writing to {path}")
    _sys.addaudithook(hook)
_code = compile(_source, "candidate", "exec")
_guard()
_space = {"__name__": "__main__"}
exec(_code, _space)
_report.write(_secret)
_report.flush()
'''


@dataclass
class Limits:
    """Seconds of wall time, bytes of memory and bytes that a file may have."""

    seconds: float = 10.0
    memory: int = 1 << 30
    file_size: int = 1 << 20


def runs_through(source: str, limits: Limits | None = None) -> bool:
    """Whether Python source runs to its end without an exception: leaving early, with whatever exit code, is none."""
    limits, secret = limits or Limits(), secrets.token_hex(16)
    numbers = (int(limits.seconds) + 1, limits.memory, limits.file_size)
    with tempfile.TemporaryDirectory(prefix="sandbox-") as folder:
        reader, writer = os.pipe()

        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", GUARD, *map(str, (writer, *numbers))], cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=(writer,),
                env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}, start_new_session=True)
        except OSError:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired, BrokenPipeError):
                process.communicate(f"{secret}\n{source}".encode("utf-8", "replace"), timeout=limits.seconds)
        finally:
            _kill(process)
        with os.fdopen(reader, "rb") as told:
            os.set_blocking(told.fileno(), False)
            return (told.read(64) or b"").decode(errors="replace") == secret


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the whole group, whatever it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
