"""Data for the data room's tests: conversations in every format, configs, files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from duoka.config.schema import RunConfig
from duoka.data.read.formats import FORMATS, SetFormat

TURNS = [
    ("system", "You are terse."),
    ("user", "Say 多卡 and an emoji"),
    ("assistant", "多卡 😀 𠀀𪚥"),
    ("user", "Again,\n  with a list:\n1. a\n2. b"),
    ("assistant", "1. a\n2. b"),
]


def form_of(name: str, **columns_and_tags: dict[str, str]) -> SetFormat:
    row = FORMATS.get(name)
    columns = columns_and_tags.get("columns", row.columns)
    return SetFormat(name, columns, {**row.tags, **columns_and_tags.get("tags", {})})


def messages_record(turns: list[tuple[str, str]] = TURNS) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def sharegpt_record(turns: list[tuple[str, str]] = TURNS) -> dict[str, Any]:
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    return {"conversations": [{"from": names[role], "value": text} for role, text in turns]}


def alpaca_record() -> dict[str, Any]:
    """TURNS as alpaca writes it: the last question in two parts."""
    first, second = TURNS[3][1].split("\n", 1)
    return {
        "system": TURNS[0][1],
        "history": [[TURNS[1][1], TURNS[2][1]]],
        "instruction": first,
        "input": second,
        "output": TURNS[4][1],
    }


def write_jsonl(path: Path, records: list[Any]) -> Path:
    lines = (record if isinstance(record, str) else json.dumps(record, ensure_ascii=False) for record in records)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def simple_records(count: int) -> list[dict[str, Any]]:
    return [
        messages_record([("user", f"question {n}"), ("assistant", f"answer {n} " * (n % 7 + 1))]) for n in range(count)
    ]


def write_ten_thousand(path: Path) -> Path:
    """10,000 records, of which one was cut short: that in line 7,655."""
    records: list[Any] = simple_records(10_000)
    records[7_654] = '{"messages": [{"role": "user", "content": "q"}'
    return write_jsonl(path, records)


def config_for(*names: Any, train: dict[str, Any] | None = None, **data: Any) -> RunConfig:
    sets = [str(name) if isinstance(name, Path) else name for name in names]
    return RunConfig.model_validate({"model": "demo", "data": {"train": sets, **data}, "train": train or {}})
