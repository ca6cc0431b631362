"""Room that the ranks of a node share: its host memory, and the disk that a run offloads to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from duoka.plan.memory import FITS, TIGHT
from duoka.units import format_bytes

Verdict = Literal["fits", "tight", "does not fit"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
NO_ROOM: Verdict = "does not fit"


@dataclass(frozen=True)
class Room:
    """What the ranks of a node keep in one place, and what is free there."""

    needed_bytes: int = 0
    available_bytes: int | None = 0  # None: not known, as of another machine
    place: str = "a node's host memory"

    @property
    def verdict(self) -> Verdict:
        if self.available_bytes is None:
            return "fits"
        if self.needed_bytes > TIGHT * self.available_bytes:
            return "does not fit"
        return "tight" if self.needed_bytes > FITS * self.available_bytes else "fits"

    def sentence(self) -> str:
        needed = f"{format_bytes(self.needed_bytes)} in {self.place}"
        if self.available_bytes is None:
            return f"{needed}, whose free room is not known here"
        relation = {"fits": "of", "tight": "tight in", "does not fit": "which does not fit in"}[self.verdict]
        return f"{needed}, {relation} {format_bytes(self.available_bytes)}"
