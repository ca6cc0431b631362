"""A process that runs a user's functions, rewards or tools: a question a line on its input, an answer a line on its
output, which of a reward is a number, null or an error.

Started by worker.py, which kills it with all that it started when an answer takes too long. What a reward function
prints goes to the error stream; it ends with whoever started it, also in the middle of a function that hangs.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from duoka.config.paths import given_path, is_file
from duoka.tasks.tools import ERROR, MOST_SAID, schema_of

Reward = Callable[[list[dict[str, str]], str, dict[str, Any]], Any]
_MOST = 1e30  # squares of it, and sums of these, are finite


def main() -> None:
    """Reads its first line (the functions' names, and where paths begin), then questions until there are no more."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what functions print, and what they start, must not be read as answers
    asked: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(asked,), daemon=True).start()
    names, base = json.loads(asked.get())
    functions, faults = _load_all(names, Path(base))
    print(json.dumps(faults), file=answers, flush=True)
    own = os.getpid()
    while True:
        question = json.loads(asked.get())
        found = _answer(functions, names, question, Path(base))
        if os.getpid() != own:  # a function forked, and nobody ended its child: one question has one answer
            os._exit(0)
        print(json.dumps(found), file=answers, flush=True)


def _listen(asked: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        asked.put(line)
    # Whoever asked is gone: nobody waits for what is being computed, nor for what that has started.
    os.killpg(0, signal.SIGKILL)


def _load_all(names: list[str], base: Path) -> tuple[dict[str, Any], list[str]]:
    """Before the first question, so that imports are not part of its time; and why some cannot be loaded."""
    functions: dict[str, Any] = {}
    faults = []
    for name in names:
        try:
            if name != "task":
                functions[name] = load_function(name, base)
        except (Exception, SystemExit) as error:  # noqa: BLE001  a user's file may raise anything
            faults.append(_told(f"{name}: {type(error).__name__}: {error}"))
    return functions, faults


def _answer(functions: dict[str, Any], names: list[str], question: dict[str, Any], base: Path) -> Any:
    """Rewards of an answer; or, of functions that are tools, what the model is told of them, or what a call gives."""
    if "schemas" in question:
        return [_schema(functions, name) for name in names]
    if "tool" in question:
        return _call(functions[question["tool"]], question["arguments"])
    return [_score(functions, name, question, base) for name in names]


def _schema(functions: dict[str, Any], name: str) -> dict[str, Any]:
    try:
        return schema_of(functions[name])
    except (LookupError, TypeError, ValueError, NameError) as error:
        return {"error": _told(f"{name}: {type(error).__name__}: {error}")}


def _call(function: Callable[..., Any], arguments: Any) -> str:
    """What a call of a function answers, as the model reads it."""
    if not isinstance(arguments, dict):
        return f"{ERROR}{function.__name__} needs its arguments as an object"
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        return f"{ERROR}{function.__name__}: {error}"
    try:
        found = function(**arguments)
        said = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=str)
    except (Exception, SystemExit) as error:  # noqa: BLE001  a user's code may raise anything
        said = f"{ERROR}{type(error).__name__}: {error}"
    return said[:MOST_SAID].encode("utf-8", "replace").decode()


def _score(functions: dict[str, Any], name: str, question: dict[str, Any], base: Path) -> dict[str, Any]:
    """{"value": a number or null}, or {"error": why there is none}."""
    try:
        if name == "task":
            value = _check(functions, question, base)
        else:
            if name not in functions:
                functions[name] = load_function(name, base)
            messages = [{"role": role, "content": text} for role, text in question["messages"]]
            # A record's own column `answer` is what its owner means by it; a conversation's last turn stands in.
            facts = {"answer": question["answer"], **question["facts"], "id": question["id"],
                     "is_cut": question["is_cut"], "calls": question.get("calls", [])}  # fmt: skip
            value = functions[name](messages, question["completion"], facts)
        if value is None:
            return {"value": None}
        if isinstance(value, str | bytes):
            return {"error": _told(f"it gave the text {value!r}, and a reward is a number")}
        number = float(value)
        if not abs(number) <= _MOST:
            return {"error": f"it gave {number:g}, and a reward lies between -{_MOST:g} and {_MOST:g}"}
        return {"value": number}
    except (Exception, SystemExit) as error:  # noqa: BLE001  a user's code may raise anything
        return {"error": _told(f"{type(error).__name__}: {error}")}


def _told(text: str) -> str:
    """On one line, which any file takes: what a function raises may hold half characters."""
    return " ".join(text.split())[:500].encode("utf-8", "backslashreplace").decode()


def _check(functions: dict[str, Any], question: Mapping[str, Any], base: Path) -> float:
    from duoka.tasks.find import find_tasks
    from duoka.tasks.task import Item

    source, (name, _, number) = question["source"], question["id"].rpartition("/")
    if (key := f"{source} {name}") not in functions:
        functions[key] = next(task for task in find_tasks(source, base) if task.name == name)
    turns = tuple((role, text) for role, text in question["messages"])
    item = Item(number, turns, question["answer"], facts=question["facts"])
    return float(functions[key].check(item, question["completion"]))


def load_function(name: str, base: Path) -> Reward:
    """The function behind the colon, of the file before it: a path from here or from `base`.

    Raises what the file's import raises, or LookupError.
    """
    path, _, function = name.rpartition(":")
    given = given_path(path)
    place = next((one for one in (given, base / given) if is_file(one)), None)
    if place is None:
        raise LookupError(f"there is no file {path!r}")
    module = _load(place.resolve())
    found = getattr(module, function, None)
    if not callable(found):
        raise LookupError(f"{path} has no function {function!r}")
    reward: Reward = found
    return reward


@functools.cache
def _load(path: Path) -> ModuleType:
    """Once, however many of its functions are asked for; known to Python as any import is (dataclasses, pickles)."""
    name = f"duoka_rewards_{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # what it imports from beside it
    try:
        spec.loader.exec_module(module)
    except BaseException:  # told by who asked; a Ctrl-C too must leave no half of it
        del sys.modules[name]
        raise
    return module


if __name__ == "__main__":
    main()
