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
# Limits are set by the program's own process before it reads the program: a function run between fork and exec
# (preexec_fn) may hang in a process with threads.
_RUN = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({memory}, {memory}))
resource.setrlimit(resource.RLIMIT_FSIZE, ({file}, {file}))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
exec(compile(sys.stdin.read(), "answer.py", "exec"), {{"__name__": "__main__"}})
print("\\n{passed}")
"""


def passes(program: str, deadline_s: float = DEADLINE_S) -> bool:
    """Whether a program runs to its end, without an error, before the deadline."""
    passed = f"passed-{os.urandom(8).hex()}"  # a program that leaves early with exit code 0 has not passed
    code = _RUN.format(memory=_MEMORY_BYTES, file=_FILE_BYTES, passed=passed)
    with tempfile.TemporaryDirectory(prefix="duoka-code-") as folder:
        worker = subprocess.Popen(
            [sys.executable, "-I", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, cwd=folder, env={"PATH": os.defpath}, start_new_session=True, text=True,
            errors="replace",
        )  # fmt: skip
        try:
            said, _ = worker.communicate(program, timeout=deadline_s)
        except subprocess.TimeoutExpired:
            said = ""
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.kill()
            worker.wait()
            for pipe in (worker.stdin, worker.stdout):
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()
    return worker.returncode == 0 and said.rstrip().endswith(passed)
