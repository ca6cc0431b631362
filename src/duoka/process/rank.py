"""The first moment of a rank that duoka starts: `python -m duoka.process.rank COMMAND...`, where none is forked
(fork_server.py).

Ties its life to the process that started it, sends its output to its own file (rank 0 keeps what it got, which
the supervisor passes on), and becomes COMMAND. No process stays in between, and torch is not imported.
"""

from __future__ import annotations

import os
import sys
import time

from duoka.process.environ import read_rank_environment
from duoka.process.lifeline import die_with_parent, parent_pid

LOGS_FOLDER = "DUOKA_LOGS"  # where ranks write; set by the supervisor
NUM_RESTARTS = "DUOKA_NUM_RESTARTS"  # how many worlds of this run have failed before; set by the supervisor
START_MARK = "--- duoka: rank"


def start_mark(rank: int, pid: int) -> str:
    """The line that separates one start from the one before it in a rank's log."""
    return f"{START_MARK} {rank}, pid {pid}, {time.strftime('%Y-%m-%d %H:%M:%S')} ---\n"


def log_name(rank: int) -> str:
    return f"rank{rank:05d}.log"


def is_restarted() -> bool:
    """True when this world takes the place of one that failed."""
    return os.environ.get(NUM_RESTARTS, "0") != "0"


def main(command: list[str]) -> None:
    parent = parent_pid()
    if parent is not None:
        die_with_parent(parent)
    send_output_to_log()
    os.execvp(command[0], command)


def send_output_to_log() -> None:
    """Of any rank but the first, where the launcher named a folder."""
    place, logs = read_rank_environment(), os.environ.get(LOGS_FOLDER)
    if place is None or place.rank == 0 or not logs:
        return
    path = os.path.join(logs, log_name(place.rank))
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(file, start_mark(place.rank, os.getpid()).encode())
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)


if __name__ == "__main__":
    main(sys.argv[1:])
