"""Rank 0's output: on to the terminal as it is, and into logs/rank00000.log as plain lines.

A child that writes to a terminal gets a terminal (a pty), so that its progress line lives; one whose launcher is
piped gets a pipe. The copy holds no colors and only the last frame of a line that was drawn again and again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pty
import re
import select
import struct
import termios
from pathlib import Path

_ESCAPES = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_()#][0-9A-Za-z]?)")
_UNFINISHED = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b]*\x1b?|[()#]?)$")


class PlainCopy:
    """A terminal's bytes as the lines that stay: whatever a carriage return or an erased line replaced is gone."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._line = b""
        self._broken = False

    def add(self, data: bytes) -> None:
        *lines, self._line = (self._line + data).split(b"\n")
        self._write(b"".join(_plain(line) + b"\n" for line in lines))
        # Endless frames would fill memory: only the last one is kept.
        if len(self._line) > 65536 and b"\r" in self._line:
            self._line = self._line[self._line.rindex(b"\r") :]

    def write_line(self, text: str) -> None:
        self._write(text.encode())

    def close(self) -> None:
        if _plain(self._line):
            self._write(_plain(self._line) + b"\n")
        self._line = b""
        os.close(self._file)

    def _write(self, data: bytes) -> None:
        if not data or self._broken:
            return
        try:
            os.write(self._file, data)
        except OSError:
            # The disk is full or gone: the terminal still shows the output, and the run itself handles the disk.
            self._broken = True


def _plain(line: bytes) -> bytes:
    line = line.rstrip(b"\r")
    frames = [_ESCAPES.sub(b"", _UNFINISHED.sub(b"", frame)) for frame in re.split(rb"\r|\x1b\[2K", line)]
    return next((frame for frame in reversed(frames) if frame), b"")


class Channel:
    """One stream of the child: a pty or a pipe towards the launcher's own stdout or stderr."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.is_terminal = os.isatty(target)
        self._target_open = True
        if self.is_terminal:
            self.reader, self.child_end = pty.openpty()
            self._pass_bytes_unchanged()
            self.copy_size()
        else:
            self.reader, self.child_end = os.pipe()

    def _pass_bytes_unchanged(self) -> None:
        """The real terminal turns newlines into carriage returns and newlines; once is enough."""
        mode = termios.tcgetattr(self.child_end)
        mode[1] &= ~termios.OPOST
        termios.tcsetattr(self.child_end, termios.TCSANOW, mode)

    def copy_size(self) -> None:
        """The child's terminal is as wide as ours."""
        if self.is_terminal:
            with contextlib.suppress(OSError):
                size = fcntl.ioctl(self.target, termios.TIOCGWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
                fcntl.ioctl(self.reader, termios.TIOCSWINSZ, size)

    def close_child_end(self) -> None:
        if self.child_end >= 0:
            os.close(self.child_end)
            self.child_end = -1

    def read(self) -> bytes | None:
        """What is there; None when the child's side is closed."""
        try:
            return os.read(self.reader, 65536) or None
        except OSError as error:
            if error.errno == errno.EIO:  # on Linux: the last writer of a pty has closed it
                return None
            raise

    def pass_on(self, data: bytes) -> None:
        """To the launcher's own stream. A closed reader (a pager, a terminal) does not end the run."""
        while data and self._target_open:
            try:
                data = data[os.write(self.target, data) :]
            except BlockingIOError:
                select.select([], [self.target], [], 1.0)
            except OSError:
                self._target_open = False

    def close(self) -> None:
        self.close_child_end()
        os.close(self.reader)


def open_channels(stdout: int, stderr: int) -> list[Channel]:
    """One shared channel when both go to a terminal (the order of lines stays), else one for each."""
    if os.isatty(stdout) and os.isatty(stderr):
        return [Channel(stdout)]
    return [Channel(stdout), Channel(stderr)]
