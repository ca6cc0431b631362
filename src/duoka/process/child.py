"""Commands of duoka that another one starts and waits for."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Mapping, Sequence

LEAVES_WITHIN_S = 60.0  # a run saves meanwhile


def run_to_end(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    told: str | None = None,
    read: bool = True,
    read_errors: bool = True,
    limit_s: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """`command` to its end, told `told` on its stdin (None: nothing); what it says is read, or goes where ours does.

    When this process is asked to leave, or `limit_s` is over, so is the command, and it is waited for:
    `subprocess.run` kills it at once, which leaves a run unsaved and temporary folders in /tmp. Raises
    subprocess.TimeoutExpired, and all that a signal's handler raises.
    """
    process = subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL if told is None else subprocess.PIPE,
        stdout=subprocess.PIPE if read else None,
        stderr=subprocess.PIPE if read_errors else None,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    try:
        out, err = process.communicate(told, timeout=limit_s)
    except BaseException:  # a signal's handler raises what it likes; raised again
        _let_leave(process)
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _let_leave(process: subprocess.Popen[str]) -> None:
    """A Ctrl-C in the terminal has reached it too; a second one ends it at once."""
    try:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.communicate(timeout=LEAVES_WITHIN_S)
    finally:
        process.kill()
        process.wait()
