"""From a word (a key, a code, an error's name, a topic, a line of a log) to the text that explains it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from duoka.config.catalog import Key, is_execution_key, known_keys
from duoka.config.dialects.all import dialects
from duoka.config.dialects.trl import trl_words
from duoka.config.foreign_axes import find_flag
from duoka.config.yaml_text import yaml_text
from duoka.explain.words import best_topic
from duoka.registry import nearest

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = ("en", "zh")
_TEXTS = Path(__file__).with_name("texts")
_MAX_LOG_BYTES = 20_000_000
_STATES = {"implemented": "已实现", "reported": "接受并说明", "refused": "拒绝"}


@dataclass(frozen=True)
class Entry:
    """What is said about one thing, in one language; `numbers` names what numbers.py can add from a config."""

    title: str
    text: str
    wrong: str = ""
    numbers: str = ""
    key: str = ""


@cache
def topics() -> dict[str, dict[str, Any]]:
    """All topics by id."""
    return {topic["id"]: topic for topic in _read("topics.yaml")}


@cache
def codes() -> dict[str, dict[str, Any]]:
    """Exit codes, with the kinds of error that end with them."""
    return dict(_read("codes.yaml"))


@cache
def chinese_keys() -> dict[str, str]:
    return dict(_read("keys.zh.yaml"))


@cache
def _chinese_phrases() -> dict[str, str]:
    return dict(_read("words.zh.yaml"))


def value_words(key: Key, language: Language) -> str:
    """What a value of the key must be."""
    words = key.words.removeprefix("one of ")
    for english, chinese in _chinese_phrases().items() if language == "zh" else ():
        words = words.replace(english, chinese)
    return words


def _read(name: str) -> Any:
    return yaml.safe_load((_TEXTS / name).read_text(encoding="utf-8"))


def find_entry(word: str, language: Language) -> Entry | None:
    """The text for a word: a key of ours, a code, a topic, a key of another tool, or words of a message."""
    wanted = word.strip()
    if wanted.startswith("--"):
        if entry := _explain_flag(wanted, language):
            return entry
        wanted = wanted.lstrip("-").partition("=")[0].strip().replace("-", "_")  # a key, as command lines have it
    plain = _plain(wanted)
    if wanted in known_keys():
        entry, topic = _explain_key(known_keys()[wanted], language), topics().get(plain)
        if topic is None:
            return entry
        told = _entry(topic, language)  # a topic of the same name: both are told
        return replace(told, text=f"{told.text}\n\n{wanted}: {entry.text}", key=wanted)
    for code, one in codes().items():
        if plain in {_plain(code), _plain(f"exit {code}"), _plain(f"exit code {code}"), *map(_plain, one["names"])}:
            return _entry(one, language)
    for name, topic in topics().items():
        if plain in {_plain(name), _plain(topic[language]["title"]), *map(_plain, topic.get("names", ()))}:
            entry, foreign = _entry(topic, language), _explain_foreign(wanted, language)
            # A topic may have the name of another tool's key: both are told.
            return entry if foreign is None else replace(entry, text=f"{entry.text}\n{wanted}: {foreign.text}")
    inside = [key for key in known_keys() if key.rpartition(".")[2] == wanted]
    if len(inside) == 1:
        return _explain_key(known_keys()[inside[0]], language)
    foreign = _explain_flag(wanted, language) or _explain_foreign(wanted, language)
    if foreign is not None:
        return foreign
    if inside:
        return Entry(wanted, "\n".join(f"{key}: {_description(known_keys()[key], language)}" for key in inside))
    found = find_sign(wanted, language)
    if found is None and (topic_id := best_topic(wanted, topics())) is not None:
        return _entry(topics()[topic_id], language)
    return found


def find_sign(text: str, language: Language) -> Entry | None:
    """The topic whose messages look like `text`."""
    for topic in topics().values():
        if any(re.search(sign, text) for sign in topic.get("signs", ())):
            return _entry(topic, language)
    return None


def explain_log(path: Path, language: Language) -> list[tuple[str, Entry]]:
    """(first line that shows it, its topic) for everything that a log names and a topic knows."""
    found: dict[str, tuple[str, Entry]] = {}
    with path.open("rb") as file:
        lines = file.read(_MAX_LOG_BYTES).decode("utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        entry = find_sign(line, language)
        if entry is not None and entry.title not in found:
            found[entry.title] = (f"{path.name}:{number}: {line.strip()[:160]}", entry)
    return list(found.values())


def known_words() -> list[str]:
    """Everything that may be asked about, for guesses and lists."""
    names = [name for one in (*topics().values(), *codes().values()) for name in one.get("names", ())]
    return [*topics(), *codes(), *known_keys(), *names]


def guess(word: str) -> str | None:
    return nearest(word.strip().lower(), [name.lower() for name in known_words()])


def _plain(word: str) -> str:
    return re.sub(r"[\s_-]+", "-", word.strip().lower())


def _entry(one: dict[str, Any], language: Language) -> Entry:
    words = one[language]
    return Entry(words["title"], words["text"].rstrip(), words.get("wrong", "").rstrip(), one.get("numbers", ""))


def _description(key: Key, language: Language) -> str:
    return chinese_keys().get(key.name, key.description) if language == "zh" else key.description


def _explain_key(key: Key, language: Language) -> Entry:
    """Meaning, what may stand there, the default, whether results depend on it, and its names elsewhere."""
    zh = language == "zh"
    lines = [_description(key, language), ""]
    if key.section is None:
        default = "必须写" if key.is_required and zh else "required" if key.is_required else _default(key, zh)
        lines.append(f"{'可以写' if zh else 'must be'}   {value_words(key, language)}")
        lines.append(f"{'默认' if zh else 'default'}   {default}")
        is_free = is_execution_key(key.name)
        if zh:
            lines.append("不影响结果：续训时可以改" if is_free else "影响结果：续训时不能改")
        else:
            lines.append(
                "changes no result: a run may go on under another value"
                if is_free
                else "results depend on it: a run goes on under the same value only"
            )
        last = key.name.rpartition(".")[2]
        lines.append(f"{'例如' if zh else 'example'}   {last}: {key.example}")
    else:
        inner = [name for name in known_keys() if name.rpartition(".")[0] == key.name]
        lines.append(f"{'其中的键' if zh else 'keys'}   {', '.join(name.rpartition('.')[2] for name in inner)}")
    others = {
        dialect.title: [row.name for row in dialect.rows.values() if row.key == key.name]
        for dialect in dialects().values()
        if not dialect.rename  # the nested form has LLaMA-Factory's names
    }
    shown = "; ".join(f"{title}: {', '.join(names)}" for title, names in others.items() if names)
    lines += [f"{'别处的名字' if zh else 'elsewhere'}   {shown}"] if shown else []
    return Entry(key.name, "\n".join(lines), key=key.name)


def _default(key: Key, zh: bool) -> str:
    if key.default is None:
        return "不写" if zh else "left out"
    return yaml_text(key.default)


def _explain_flag(word: str, language: Language) -> Entry | None:
    """A word of a trainer that cuts models, as its command line or its plugin has it."""
    flag = find_flag(word)
    if flag is None:
        return None
    ours = known_keys().get(flag.key)
    last = flag.key.rpartition(".")[2]
    lines = [f"{flag.tool}: {flag.key or ('没有这样的键' if language == 'zh' else 'there is no such key here')}"]
    lines += [flag.note] if flag.note else []
    if ours:
        words = "例如" if language == "zh" else "example"
        lines += [f"{flag.key}: {_description(ours, language)}", f"{words}   {last}: {flag.write or ours.example}"]
    return Entry(flag.name, "\n".join(lines), key=flag.key)


def _explain_foreign(word: str, language: Language) -> Entry | None:
    """A key of another tool: what becomes of it here."""
    for dialect in dialects().values():
        row = dialect.rows.get(dialect.rename.get(word, word))
        if row is None:
            continue
        zh = language == "zh"
        lines = [f"{dialect.title}: {_STATES[row.state] if zh else row.state}" + (f" -> {row.key}" if row.key else "")]
        lines += [row.note] if row.note else []
        ours = known_keys().get(row.key)
        lines += [f"{row.key}: {_description(ours, language)}"] if ours else []
        return Entry(word, "\n".join(lines), key=row.key)
    return _explain_trl(word, language)


def _explain_trl(word: str, language: Language) -> Entry | None:
    """A word of TRL's configs, whose files are not read: what to write in its place, or why there is nothing."""
    found = trl_words().get(word)
    if found is None:
        return None
    key, why = found
    lines = [f"TRL: {key or ('没有这样的键' if language == 'zh' else 'there is no such key here')}"]
    lines += [why] if why else [f"{key}: {_description(known_keys()[key], language)}"]
    return Entry(word, "\n".join(lines), key=key)
