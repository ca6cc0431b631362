"""pipeline.json in a pipeline's folder: what each stage was run with, what it took and found; and the folder's lock."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from duoka.cluster.pipeline.nodes import Node
from duoka.errors import ConfigError, StorageError
from duoka.runs.cache import try_lock
from duoka.runs.find import STAGES_FILE
from duoka.runs.folder import RunFolder, read_json, write_json_atomic
from duoka.runs.status import read_status

RESULT = "result.json"


class Manifest:
    """Read once, written after each change, in one step."""

    def __init__(self, root: Path) -> None:
        self.root, self.file = root, root / STAGES_FILE
        found = read_json(self.file) or {}
        self.stages: dict[str, dict[str, Any]] = found.get("stages", {})
        self.generations: dict[str, int] = found.get("generations", {})
        self.forcing: str | None = found.get("forcing")
        self.order: list[str] = found.get("order", list(self.stages))  # of the file, when it was last run

    def write(self) -> None:
        facts = {
            "version": 1, "order": self.order, "stages": self.stages, "generations": self.generations,
            "forcing": self.forcing,
        }  # fmt: skip
        write_json_atomic(self.file, facts)

    def note(self, node: Node, state: str, **values: Any) -> None:
        known = self.stages.get(node.name, {})
        kept = known if known.get("folder") == node.folder else {}
        facts = {"folder": node.folder, "kind": node.spec.kind, "facts": dict(node.facts), "state": state}
        self.stages[node.name] = {**kept, **facts, **values}
        self.write()

    def is_done(self, node: Node) -> bool:
        """As the stage's own folder says; of a damaged one nothing here says otherwise."""
        folder = self.root / node.folder
        if node.spec.kind == "train":
            run = RunFolder(folder)
            status = read_status(run)
            return status is not None and status.state == "done" and run.final.is_dir()
        mark = {"eval": RESULT, "chat": RESULT, "export": "config.json", "tokenizer": "tokenizer.json"}[node.spec.kind]
        return (folder / mark).is_file()

    def result(self, node: Node) -> dict[str, Any]:
        """Scores of an eval stage, by stage and task; answers of a chat stage, by stage and question."""
        found = read_json(self.root / node.folder / RESULT)
        return found or {}


@contextmanager
def hold_pipeline(root: Path) -> Iterator[None]:
    """Refuse a second `duoka run` on the folder, as long as this process lives."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        file = os.open(root / ".pipeline.lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise StorageError(f"cannot write in {root}: {error.strerror or error}", fix="set output: elsewhere") from None
    try:
        if not try_lock(file):
            what = f"another process runs the stages in {root}"
            raise ConfigError(what, fix="wait for it (duoka run FILE --status), or set another output:")
        yield
    finally:
        os.close(file)
