"""Calls of tools that a model makes in answers it is trained with: ours here, a user's functions in other processes.

Such a process is killed at a deadline (worker.py); the model reads that there was no answer in time, and goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from duoka.errors import ConfigError
from duoka.tasks.tools import CALCULATOR, ERROR, arguments_of, no_tool
from duoka.tasks.worker import Worker, ask_all

BUILT_IN = {CALCULATOR.name: CALCULATOR}  # programs that a model wrote are run by no training


class ToolPool:
    """`names` as in rl.tools: ours, and functions of files. Each worker is begun when it is needed."""

    def __init__(self, names: Sequence[str], base: Path, *, deadline_s: float, num_workers: int = 1) -> None:
        self._ours = {name: BUILT_IN[name] for name in names if name in BUILT_IN}
        self._functions = {name.rpartition(":")[2]: name for name in names if name not in BUILT_IN}
        own = tuple(self._functions.values())
        self._workers = [Worker(own, base, deadline_s) for _ in range(num_workers)]

    @cached_property
    def schemas(self) -> list[dict[str, Any]]:
        """What the model is told of them. Raises ConfigError for functions that cannot be tools."""
        found = [tool.schema for tool in self._ours.values()]
        if self._functions:
            told, why = self._workers[0].ask({"schemas": True})
            faults = [why] if told is None else [one["error"] for one in told if "error" in one]
            if faults:
                raise ConfigError(f"rl.tools cannot be loaded: {faults[0]}", fix="mend the file")
            found += told
        return found

    def answer(self, calls: Sequence[Mapping[str, Any]], alive: Callable[[], None] = lambda: None) -> list[str]:
        """What each call answers, in order; `alive` is called as they come."""
        found: dict[int, str] = {}

        def ask(worker: Worker, place: int) -> None:
            found[place] = self._answer(worker, calls[place])

        ask_all(self._workers, range(len(calls)), ask, alive)
        return [found[place] for place in range(len(calls))]

    def _answer(self, worker: Worker, call: Mapping[str, Any]) -> str:
        name, arguments = call["function"]["name"], arguments_of(call)
        if name in self._ours:
            return self._ours[name].answer(arguments)
        if name not in self._functions:
            return no_tool(name, [*self._ours, *self._functions])
        said, why = worker.ask({"tool": self._functions[name], "arguments": arguments})
        return f"{ERROR}{why}" if said is None else str(said)

    def close(self) -> None:
        for worker in self._workers:
            worker.end()
