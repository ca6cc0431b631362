"""Which format a record seems to be in, from its keys and roles: for files named directly, and for fixes.

Every answer can be written into dataset_info.json. Nothing here reads a file.
"""

from __future__ import annotations

from typing import Any

from duoka.data.read.example import BadRecord, SetFormat
from duoka.data.read.formats import FORMATS
from duoka.data.read.messages import begins_as_list, listed

LABELS = ("kto_tag", "label")
_ANSWERS = ("output", "response", "completion", "answer")
# Other names of columns than alpaca's own, by published sets (Dolly, OpenOrca): passed over, their text would be lost.
_ALIASES = {"query": ("input", "context"), "system": ("system", "system_prompt")}


def detect_format(record: Any) -> SetFormat | None:
    """The format that a record seems to be in; None when nothing fits."""
    if not isinstance(record, dict):
        return None
    if "chosen" in record and "rejected" in record:
        return _detect_preference(record)
    found = _detect_alpaca(record) or _detect_messages(record)
    if found is not None:
        return found
    if isinstance(record.get("text"), str):
        return SetFormat("text", {"text": "text"}, kind="text")
    if isinstance(record.get("prompt"), str):
        return SetFormat("alpaca", {"prompt": "prompt"}, kind="prompt")
    # By a column's name alone: reading the record says what is wrong with it, and later ones may be whole.
    return SetFormat("text", {"text": "text"}, kind="text") if record.get("text", "") is None else None


def _detect_alpaca(record: dict[str, Any]) -> SetFormat | None:
    question = next((name for name in ("instruction", "prompt", "question") if isinstance(record.get(name), str)), "")
    answer = next((name for name in _ANSWERS if name in record), "")
    if not question or not answer:
        return None
    columns = _alpaca_columns(record) | {"prompt": question, "response": answer}
    return _with_label(SetFormat("alpaca", columns), record)


def _alpaca_columns(record: dict[str, Any]) -> dict[str, str]:
    """Alpaca's own, or texts that the record has in their place."""
    found = {
        role: next((name for name in names if name in record and isinstance(record[name] or "", str)), names[0])
        for role, names in _ALIASES.items()
    }
    return dict(FORMATS.get("alpaca").columns) | found


def _with_label(form: SetFormat, record: dict[str, Any]) -> SetFormat:
    """A yes or no beside the answer is a label of it."""
    for name in LABELS:
        if isinstance(record.get(name), bool) or str(record.get(name)).lower() in ("true", "false"):
            return SetFormat(form.name, {**form.columns, "kto_tag": name}, form.tags, "labeled")
    return form


def _detect_messages(record: dict[str, Any]) -> SetFormat | None:
    for column, cell in record.items():
        turns = _listed(cell, column)
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
            continue
        name = _style_of(turns)
        if name is None:
            continue
        # Of every record, whether this one has them or not: a later one's would be passed over without a word.
        columns = {"messages": column, "system": _alpaca_columns(record)["system"], "tools": "tools"}
        roles = [turn["role" if name == "messages" else "from"] for turn in turns]
        form = SetFormat(name, columns, _detect_tags(name, roles))
        if column == "prompt" and isinstance(_listed(record.get("completion"), "completion"), list):
            return _with_label(SetFormat(name, {**columns, "completion": "completion"}, form.tags), record)
        if column == "prompt" and turns and roles[-1] in ("user", "human"):
            return SetFormat(name, columns, form.tags, "prompt")
        return _with_label(form, record)
    return _detect_broken(record)


def _listed(cell: Any, column: str) -> Any:
    """Text that is a list of messages as that list, but for a document's."""
    try:
        return cell if column == "text" else listed(cell, column)
    except BadRecord:
        return None


def _detect_broken(record: dict[str, Any]) -> SetFormat | None:
    """By a column's name alone where its text begins as a list and is none, or where it is empty: reading it says what
    is wrong with it."""
    for column, name in (("messages", "messages"), ("conversations", "sharegpt")):
        if begins_as_list(record.get(column)) or record.get(column, "") in (None, []):
            return SetFormat(name, FORMATS.get(name).columns, FORMATS.get(name).tags)
    return None


def _style_of(turns: list[dict[str, Any]]) -> str | None:
    for name, role_tag, content_tag in (("messages", "role", "content"), ("sharegpt", "from", "value")):
        if all(role_tag in turn for turn in turns) and any(content_tag in turn for turn in turns):
            return name
    return None


def _detect_preference(record: dict[str, Any]) -> SetFormat | None:
    margin = record.get("margin")  # a later record may have one
    is_number = margin is None or (isinstance(margin, (int, float)) and not isinstance(margin, bool))
    columns = {"chosen": "chosen", "rejected": "rejected", **({"margin": "margin"} if is_number else {})}
    chosen = _listed(record["chosen"], "chosen")
    # UltraFeedback's `messages` are the better conversation once more, and no prompt.
    others = {key: cell for key, cell in record.items() if key not in columns and _listed(cell, key) != chosen}
    found = _detect_messages(others)
    if found is not None:
        return SetFormat(found.name, {**found.columns, **columns}, found.tags, "preference")
    question = next((name for name in ("instruction", "prompt", "question") if isinstance(record.get(name), str)), "")
    chosen = record["chosen"] if question else chosen
    turns = [turn for turn in (chosen if isinstance(chosen, list) else [chosen]) if isinstance(turn, dict)]
    if question:
        more = {key: name for key, name in _alpaca_columns(record).items() if key not in ("prompt", "response")}
        # Tags tell how the answers are written, when they are messages and not text.
        tags = FORMATS.get(_style_of(turns) or "messages").tags if turns else {}
        return SetFormat("alpaca", {**more, "prompt": question, **columns}, tags, "preference")
    name = _style_of(turns) if turns else None
    if name is None:
        return None
    roles = [turn["role" if name == "messages" else "from"] for turn in turns]
    columns |= {"system": _alpaca_columns(record)["system"], "tools": "tools"}
    return SetFormat(name, columns, _detect_tags(name, roles), "preference")


def _detect_tags(name: str, roles: list[Any]) -> dict[str, str]:
    tags = dict(FORMATS.get(name).tags)
    for tag, words in {"user_tag": ("user", "human"), "assistant_tag": ("assistant", "gpt", "bot", "model")}.items():
        tags[tag] = next((word for word in words if word in roles), tags[tag])
    if "tool" in roles:
        tags["observation_tag"] = "tool"
    return tags
