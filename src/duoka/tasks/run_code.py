"""Programs that a model wrote, run in a process of their own that is killed at a deadline, with all that it started.

A limit on memory, an empty environment, an empty folder. It is no sandbox: the program may read files and use the
network as this user may. So it runs only when the user has asked for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile

DEADLINE_S = 5.0
_MEMORY_BYTES = 1 << 30
_FILE_BYTES = 16 << 20
_MOST_SAID = 4000
# Limits are set by the program's own process before it reads the program: a function run between fork and exec
# (preexec_fn) may hang in a process with threads.
_RUN = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({memory}, {memory}))
resource.setrlimit(resource.RLIMIT_FSIZE, ({file}, {file}))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
exec(compile(sys.stdin.read(), "answer.py", "exec"), {{"__name__": "__main__"}})
{last}
"""


def passes(program: str, deadline_s: float = DEADLINE_S) -> bool:
    """Whether a program runs to its end, without an error, before the deadline."""
    passed = f"passed-{os.urandom(8).hex()}"  # a program that leaves early with exit code 0 has not passed
    code, said = _run(program, deadline_s, f"print('\\n{passed}')", with_errors=False)
    return code == 0 and said.rstrip().endswith(passed)


def output_of(program: str, deadline_s: float = DEADLINE_S) -> str:
    """What a program prints, its error included, as far as a reader wants it; never raises."""
    code, said = _run(program, deadline_s, "", with_errors=True)
    said = said if len(said) <= _MOST_SAID else f"{said[:_MOST_SAID]}... ({len(said):,} letters)"
    if code is None:
        said += f"\n(ended after {deadline_s:g} s)"
    elif code < 0:
        said += f"\n(ended by signal {-code})"
    return said.strip() or "(it prints nothing)"


def _run(program: str, deadline_s: float, last: str, *, with_errors: bool) -> tuple[int | None, str]:
    """(exit code, None at the deadline; what it printed). Printed to a file, whose size is bounded."""
    code = _RUN.format(memory=_MEMORY_BYTES, file=_FILE_BYTES, last=last)
    with tempfile.TemporaryDirectory(prefix="duoka-code-") as folder, tempfile.TemporaryFile() as out:
        worker = subprocess.Popen(
            [sys.executable, "-I", "-c", code], stdin=subprocess.PIPE, stdout=out,
            stderr=out if with_errors else subprocess.DEVNULL, cwd=folder, env={"PATH": os.defpath},
            start_new_session=True, text=True, errors="replace",
        )  # fmt: skip
        ended: int | None = None
        try:
            worker.communicate(program, timeout=deadline_s)
            ended = worker.returncode
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.kill()
            worker.wait()
            with contextlib.suppress(OSError):
                if worker.stdin is not None:
                    worker.stdin.close()
        out.seek(0)
        return ended, out.read(_FILE_BYTES).decode("utf-8", "replace")
