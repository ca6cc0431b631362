"""What all nodes print, as one: the first node's output as it is, and of the others only what the first did not say.

Used by fleet.py. Launchers of one run say the same sentences on each machine: they are shown once. A line that differs
carries the names of the nodes that said it.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

HOLD_S = 1.5  # so long a line of another node waits for the first one to say the same
_MOST_KEPT = 2000
_LONGEST_BYTES = 1 << 16


@dataclass
class _Held:
    at: float
    nodes: list[int]
    text: bytes


@dataclass
class OneVoice:
    """`write` gets (0 stdout or 1 stderr, bytes)."""

    names: list[str]
    write: Callable[[int, bytes], None]
    now: Callable[[], float] = time.monotonic
    _said: OrderedDict[bytes, int] = field(default_factory=OrderedDict)  # by the first node, how often
    _matched: dict[int, Counter[bytes]] = field(default_factory=dict)
    _rest: dict[tuple[int, int], bytes] = field(default_factory=dict)  # unfinished lines
    _held: list[_Held] = field(default_factory=list)
    _is_at_start: bool = True  # of a line on the screen

    def add(self, node: int, stream: int, data: bytes) -> None:
        if node == 0 and data:
            self.write(stream, data)
            self._is_at_start = data.endswith(b"\n")
        lines = (self._rest.get((node, stream), b"") + data).split(b"\n")
        self._rest[node, stream] = lines.pop()[-_LONGEST_BYTES:]
        if not data and self._rest[node, stream]:  # the stream's end
            lines.append(self._rest.pop((node, stream)))
        for line in lines:
            if node == 0:
                self._said[line] = self._said.pop(line, 0) + 1
                if len(self._said) > _MOST_KEPT:
                    self._said.popitem(last=False)
            else:
                self._hold(node, line)

    def _hold(self, node: int, line: bytes) -> None:
        for held in self._held:
            if held.text == line and node not in held.nodes:
                held.nodes.append(node)
                return
        self._held.append(_Held(self.now(), [node], line))

    def show(self, *, all_of_it: bool = False) -> None:
        """To be called often: what has waited long enough, with the names of those who said it."""
        left = []
        for held in self._held:
            held.nodes = [node for node in held.nodes if not self._is_matched(node, held.text)]
            if held.nodes and not all_of_it and self.now() - held.at < HOLD_S:
                left.append(held)
            elif held.nodes and held.text.strip():
                names = ", ".join(self.names[node] for node in sorted(held.nodes))
                start = b"" if self._is_at_start else b"\n"
                self.write(1, start + f"[{names}] ".encode() + held.text + b"\n")
                self._is_at_start = True
        self._held = left

    def _is_matched(self, node: int, line: bytes) -> bool:
        matched = self._matched.setdefault(node, Counter())
        if matched[line] < self._said.get(line, 0):
            matched[line] += 1
            return True
        return False
