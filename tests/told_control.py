"""A control for boards in tests that does nothing and writes down what a page wished for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from duoka.runs.folder import RunFolder
from duoka.watch.control import Draft

PLAN = {
    "verdict": "fits", "layout": {"name": "single", "precision": "bf16"}, "batch": "16 samples per step",
    "steps": {"total": 24, "is_exact": False}, "memory": {"peak_bytes": 1 << 30, "available_bytes": 1 << 34},
    "tokens_per_s": 1000, "total_s": 15, "parameters": 134_515_008, "trained": 2_442_240, "warnings": [], "notes": [],
    "smaller": [],
}  # fmt: skip


class ToldControl:
    def __init__(self, *, answer: str = "asked pid 1 to save and leave", chat: tuple[int, str] | None = None) -> None:
        self.told: list[tuple[str, str]] = []
        self.begun: list[Mapping[str, Any]] = []
        self._answer, self._chat = answer, chat

    def _take(self, act: str, name: str) -> str:
        self.told.append((act, name))
        return self._answer

    def form(self) -> Mapping[str, Any]:
        return {"fields": [], "first": [], "filled": {}}

    def plan(self, draft: Draft) -> Mapping[str, Any]:
        return {"yaml": "model: demo\n", "plan": PLAN, "notes": []}

    def start(self, folder: Path, draft: Draft) -> str:
        return self._take("start", draft.name)

    def stop(self, run: RunFolder) -> str:
        return self._take("stop", run.name)

    def go_on(self, run: RunFolder) -> str:
        return self._take("go on", run.name)

    def export(self, run: RunFolder, kind: str) -> str:
        return self._take(f"export {kind}", run.name)

    def chat(self, run: RunFolder) -> str:
        return self._take("chat", run.name)

    def jobs(self) -> Sequence[Mapping[str, Any]]:
        return self.begun

    def chat_address(self) -> tuple[int, str] | None:
        return self._chat

    def close(self) -> None:
        self.told.append(("close", ""))
