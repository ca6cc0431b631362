"""The terminal that `duoka top` draws on: redrawn in place, keys without Enter, left as it was found."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from duoka.runs.folder import open_plain
from duoka.watch.curve import can_draw
from duoka.watch.follow import FollowedRun
from duoka.watch.screen import (
    LEAST_COLUMNS,
    Frame,
    Line,
    clip,
    foot,
    logs_view,
    nodes_view,
    overview,
    plain_line,
    ranks_view,
)
from duoka.watch.standing import Standing, read_standing

_CODES = {
    "bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34", "magenta": "35", "cyan": "36",
}  # fmt: skip
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_LEFT, _RIGHT = "\x1b[D", "\x1b[C"
_VIEWS = {"o": "overview", "r": "ranks", "n": "nodes", "l": "logs"}
_QUIT = ("q", "\x03", "\x04")  # also Ctrl-C and Ctrl-D
_LOG_BYTES = 32 * 1024
_READ_S = 0.5  # between two drawings: a long log is shown while it is being read


@dataclass
class _Watching:
    """What the user looks at."""

    followed: FollowedRun
    price_per_hour: float | None
    view: str = "overview"
    log: int = 0
    logs: list[Path] = field(default_factory=list)

    def press(self, key: str) -> None:
        self.view = _VIEWS.get(key, self.view)
        if key in (_LEFT, _RIGHT) and self.logs:
            self.log = (self.log + (1 if key == _RIGHT else -1)) % len(self.logs)

    def look(self) -> Standing:
        self.followed.catch_up(_READ_S)
        return read_standing(self.followed, price_per_hour=self.price_per_hour)

    def draw(self, now: Standing, frame: Frame) -> list[Line]:
        if self.view == "ranks":
            return ranks_view(now, frame)
        if self.view == "nodes":
            return nodes_view(now, frame)
        if self.view == "logs":
            self.logs = log_files(self.followed)
            path = self.logs[self.log % len(self.logs)] if self.logs else None
            return logs_view(now, frame, path, last_lines(path) if path else [])
        return overview(now, self.followed.history.steps, frame)

    def says(self) -> str:
        if not self.followed.is_behind:
            return ""
        return f"reading the log: {self.followed.share_read:.0%}"


def can_redraw(keys: IO[str], out: IO[str], env: Mapping[str, str] = os.environ) -> bool:
    """A screen whose cursor can be moved; a shell inside an editor calls itself dumb, and would show the codes."""
    return keys.isatty() and out.isatty() and env.get("TERM") != "dumb"


def watch_in_place(followed: FollowedRun, *, price_per_hour: float | None, every_s: float | None = None) -> None:
    """Until q: redraw at every sign of life, key and change of size."""
    watching = _Watching(followed, price_per_hour)
    colors = not os.environ.get("NO_COLOR")
    with _raw_terminal(sys.stdin, sys.stdout) as out:
        while True:
            frame = frame_of(out)
            now = watching.look()
            out.write(_paint(watching.draw(now, frame), watching.says(), frame, colors))
            out.flush()
            wait_s = 0.0 if followed.is_behind else max(every_s or 0.0, followed.next_look_s)
            key = _read_key(wait_s)
            if key in _QUIT:
                return
            watching.press(key)


def watch_in_lines(followed: FollowedRun, out: IO[str], *, every_s: float = 10.0) -> Standing:
    """Where no terminal is: a line whenever something has changed, until the run has ended."""
    said = ""
    while True:
        followed.catch_up()
        now = read_standing(followed)
        line = plain_line(now)
        if line != said:
            out.write(line + "\n")
            out.flush()
            said = line
        if now.is_over:
            return now
        time.sleep(max(every_s, followed.next_look_s))


def frame_of(out: IO[str]) -> Frame:
    size = shutil.get_terminal_size((LEAST_COLUMNS, 40))
    # One narrower than the screen: a letter in the last column would wrap on some terminals.
    return Frame(max(20, size.columns - 1), size.lines, plain=not can_draw("█─·▁", getattr(out, "encoding", None)))


def as_text(lines: list[Line], frame: Frame) -> list[str]:
    """Without styles."""
    return ["".join(text for text, _ in clip(line, frame.width)).rstrip() for line in lines]


def log_files(followed: FollowedRun) -> list[Path]:
    folder = followed.run.logs
    return sorted(folder.glob("*.log")) if folder.is_dir() else []


def last_lines(path: Path) -> list[str]:
    """The end of a log, whatever bytes are in it; of a line that was overwritten (a progress bar) its last form."""
    try:
        with open_plain(path) as file:
            file.seek(max(0, file.seek(0, 2) - _LOG_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError as error:
        return [f"{path} cannot be read: {error.strerror}"]
    return [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")][: -1 if text.endswith("\n") else None]


def _paint(lines: list[Line], says: str, frame: Frame, colors: bool) -> str:
    """Each line over the one that was there, the rest of the screen wiped: no flicker."""
    shown = [*lines[: frame.height - 1], *([[]] * (frame.height - 1 - len(lines))), foot(says)]
    rows = ["".join(_styled(text, style, colors) for text, style in clip(line, frame.width)) for line in shown]
    return "\x1b[H" + "\x1b[K\r\n".join(rows) + "\x1b[K\x1b[J"


def _styled(text: str, style: str, colors: bool) -> str:
    codes = ";".join(_CODES[name] for name in style.split() if colors or name in ("bold", "dim"))
    return f"\x1b[{codes}m{text}\x1b[0m" if codes and text else text


@contextlib.contextmanager
def _raw_terminal(keys: IO[str], out: IO[str]) -> Iterator[IO[str]]:
    """A screen of its own, and keys as they are pressed; both given back however it ends."""
    import termios
    import tty

    before = termios.tcgetattr(keys)
    try:
        tty.setcbreak(keys)
        out.write(_ENTER)
        yield out
    finally:
        with contextlib.suppress(OSError, termios.error):  # it was closed, and SIGHUP may be on its way upwards
            out.write(_LEAVE)
            out.flush()
            termios.tcsetattr(keys, termios.TCSADRAIN, before)


def _read_key(wait_s: float) -> str:
    """The key that was pressed in this time; a change of the window's size ends the wait too (EINTR)."""
    keys = sys.stdin.fileno()
    ready, _, _ = select.select([keys], [], [], wait_s)
    # An arrow is three bytes at once.
    return os.read(keys, 8).decode("utf-8", "replace") if ready else ""
