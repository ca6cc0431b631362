"""What the page of `duoka board --control` may do, and how it has to ask. What is done is the commands' own work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from duoka.runs.folder import RunFolder

_MOST_TEXT = 4000  # letters of a value in the form
_MOST_PROCESSES = 1024


@dataclass(frozen=True)
class Draft:
    """A run that is being written in the form: name, YAML values by dotted key, processes (0: as here)."""

    name: str
    values: Mapping[str, str]
    num_processes: int = 0

    @classmethod
    def of(cls, asked: Mapping[str, Any]) -> Draft:
        """From what a page sent. Raises ValueError for what no form of ours sends."""
        values, count = asked.get("values", {}), asked.get("processes", 0)
        if not isinstance(values, dict) or not all(isinstance(one, str) for one in values.values()):
            raise ValueError("values is not an object of texts")
        if any(len(one) > _MOST_TEXT for one in values.values()):
            raise ValueError(f"a value has more than {_MOST_TEXT:,} letters")
        if not isinstance(count, int) or not 0 <= count <= _MOST_PROCESSES:
            raise ValueError(f"processes is {count!r}; write a number from 0 to {_MOST_PROCESSES:,}")
        return cls(str(asked.get("run", "")), values, count)


class Control(Protocol):
    """What a page may do; each act returns what was done, in a sentence, or raises a DuokaError."""

    def form(self) -> Mapping[str, Any]:
        """The keys of a config, as fields of a form."""
        ...

    def plan(self, draft: Draft) -> Mapping[str, Any]:
        """What `duoka plan` says of a draft, and the YAML that it would be; `faults` where it is none."""
        ...

    def start(self, folder: Path, draft: Draft) -> str: ...

    def stop(self, run: RunFolder) -> str: ...

    def go_on(self, run: RunFolder) -> str: ...

    def export(self, run: RunFolder, kind: str) -> str: ...

    def chat(self, run: RunFolder) -> str: ...

    def jobs(self) -> Sequence[Mapping[str, Any]]:
        """What was begun from a page and is no run of the list: exports, the chat, starts that failed."""
        ...

    def chat_address(self) -> tuple[int, str] | None:
        """The port of the chat on this machine and its key, as soon as it answers."""
        ...

    def close(self) -> None:
        """End what does not outlive the board."""
        ...


def act_on_run(control: Control, path: str, run: RunFolder, asked: Mapping[str, Any]) -> str | None:
    """What was done, in a sentence; None: nothing is called so."""
    acts: dict[str, Callable[[RunFolder], str]] = {
        "/api/stop": control.stop, "/api/go-on": control.go_on, "/api/chat": control.chat,
        "/api/export": lambda one: control.export(one, str(asked.get("kind", ""))),
    }  # fmt: skip
    act = acts.get(path)
    return None if act is None else act(run)
