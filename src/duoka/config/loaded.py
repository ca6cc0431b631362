"""What `load_config` gives: a valid config, and where each of its values was written."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from duoka.config.schema import RunConfig


@dataclass(frozen=True)
class Loaded:
    """A valid config, and where each of its values was written."""

    config: RunConfig
    path: Path
    origins: dict[str, str]  # dotted key -> "sft.yaml:12", "default", "command line"
    notes: tuple[str, ...] = ()
    base: Path = Path(".")  # relative paths of the config: from the current folder, then from here
    task: str = "train"  # prepare: another tool's file that asks for tokens only
    secrets: dict[str, str] = field(default_factory=dict)  # dotted key -> its text with ${env:NAME} not filled in
