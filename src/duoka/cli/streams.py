"""stdin, stdout and stderr as a user's shell gives them: closed, full, of another alphabet. Called by `run`."""

from __future__ import annotations

import contextlib
import io
import os
import sys


def open_closed_streams() -> None:
    """Streams that a caller closed (`duoka ... <&-`) are empty ones: Python has None for them, and the next file that
    is opened would get their number, and what is printed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        with contextlib.suppress(OSError):
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115


class _Whole(io.TextIOWrapper):
    """stdout that holds nothing back (PYTHONUNBUFFERED). Python's own loses the end of a text, without an error, where
    the disk fills in its middle."""

    def write(self, text: str) -> int:
        super().write(text)
        self.flush()
        return len(text)


class _Notes(io.TextIOWrapper):
    """stderr, whose words are lost where they find no room: a full disk under a log must not end what is logged."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


def print_what_can_be_printed() -> None:
    """Chinese on a terminal that knows only ASCII shows as \\u8baf, and is no crash."""
    if type(sys.stderr) is io.TextIOWrapper and sys.stderr is sys.__stderr__:  # nobody has put another in its place
        raw = open(sys.stderr.fileno(), "wb", buffering=0, closefd=False)  # noqa: SIM115
        sys.stderr = _Notes(raw, encoding=sys.stderr.encoding, write_through=True)
    if type(sys.stdout) is io.TextIOWrapper and sys.stdout is sys.__stdout__ and sys.stdout.write_through:
        whole = open(sys.stdout.fileno(), "wb", closefd=False)  # noqa: SIM115
        sys.stdout = _Whole(whole, encoding=sys.stdout.encoding)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            with contextlib.suppress(OSError, ValueError):
                reconfigure(errors="backslashreplace")


def drop_stdout(*, only_if_refused: bool = False) -> None:
    """What stdout still holds goes nowhere, always or only where it is not taken: else Python tries once more at its
    end, prints an error of its own, and leaves with 120."""
    with contextlib.suppress(OSError, ValueError):
        if only_if_refused:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                return
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
