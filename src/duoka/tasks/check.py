"""Faults of the tasks and rewards that a config names: said before anything starts."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Sequence
from pathlib import Path

from duoka.config.paths import given_path, is_file
from duoka.config.rl import TASK_REWARD
from duoka.config.rule import names_of
from duoka.config.schema import RunConfig
from duoka.errors import ConfigError, Fault
from duoka.tasks.find import find_scored, find_tasks, is_task
from duoka.tasks.task import Task
from duoka.tasks.tool_pool import BUILT_IN


def check_tasks(config: RunConfig, base: Path) -> list[Fault]:
    """Faults of `train.eval_tasks`, and of what stage rl asks and rewards."""
    faults = [*_check_rewards(config, base), *_check_tools(config, base)] if config.stage.kind.draws else []
    for place, name in enumerate(config.train.eval_tasks):
        key = f"train.eval_tasks.{place}"
        try:
            tasks = find_scored(name, base)
            if any(task.runs_code for task in tasks):
                what = f"task {name} runs programs that the model wrote, and no training does that"
                faults.append(
                    Fault(what, key=key, fix="score it after the run:   duoka eval RUN --tasks ... --run-code")
                )
            elif not all(task.items("test") for task in tasks):
                faults.append(Fault(f"task {name} has no test items", key=key))
        except ConfigError as error:
            faults.append(Fault(error.what, key=key, fix=error.fix or ""))
    return faults


def reward_files(config: RunConfig, base: Path) -> dict[str, Path | None]:
    """The files of reward functions, looked up from here and then from `base`; None: there is none."""
    names = config.rl.rewards if config.stage.kind.draws else ()
    return _files([name for name in names if name != TASK_REWARD and name not in config.rl.judges], base)


def tool_files(config: RunConfig, base: Path) -> dict[str, Path | None]:
    """The files of functions that are tools, as reward_files."""
    names = config.rl.tools if config.stage.kind.draws else ()
    return _files([name for name in names if name not in BUILT_IN], base)


def tools_digest(config: RunConfig, base: Path) -> str:
    """What tools answer is decided by their files."""
    digest = hashlib.blake2b(digest_size=16)
    for file in tool_files(config, base).values():
        digest.update(file.read_bytes() if file is not None else b"")
    return digest.hexdigest()


def _files(names: Sequence[str], base: Path) -> dict[str, Path | None]:
    found: dict[str, Path | None] = {}
    for name in names:
        if ".py:" not in name:  # no function's name, which a rule says
            continue
        given = given_path(name.rpartition(":")[0])
        found[name] = next((place.resolve() for place in (given, base / given) if is_file(place)), None)
    return found


def _find_function(name: str, place: Path | None, key: str) -> tuple[ast.Module | None, list[Fault]]:
    """The file of a function, read and not run; faults where it has none of that name."""
    if place is None:
        fix = "a path begins in the folder where duoka is started, or beside the YAML"
        return None, [Fault(f"there is no file {name.rpartition(':')[0]!r}", key=key, fix=fix)]
    try:
        tree = ast.parse(place.read_text(encoding="utf-8"))
    except SyntaxError as error:
        what = f"{place.name} is no Python: {error.msg}"
        return None, [Fault(what, file=str(place), line=error.lineno or 0, source=(error.text or "").strip())]
    except (OSError, ValueError) as error:
        return None, [Fault(f"{place} cannot be read: {error}", key=key)]
    function = name.rpartition(":")[2]
    named = [one.name for one in tree.body if isinstance(one, ast.FunctionDef)]
    bound = [getattr(part, "id", "") for one in tree.body if isinstance(one, ast.Assign) for part in one.targets]
    imports = [alias for one in tree.body if isinstance(one, ast.ImportFrom) for alias in one.names]
    imported = [alias.asname or alias.name for alias in imports]
    if function in (*named, *bound, *imported):
        return tree, []
    known = f"it has {', '.join(named)}" if named else "it has none"
    return tree, [Fault(f"{place.name} has no function {function!r}", key=key, fix=known)]


def _check_tools(config: RunConfig, base: Path) -> list[Fault]:
    return [
        fault
        for name, place in tool_files(config, base).items()
        for fault in _find_function(name, place, "rl.tools")[1]
    ]


def _check_rewards(config: RunConfig, base: Path) -> list[Fault]:
    """A function that is not there is found without running its file."""
    faults = []
    for name, place in reward_files(config, base).items():
        function = name.rpartition(":")[2]
        tree, missing = _find_function(name, place, "rl.rewards")
        faults += missing
        if tree is None:
            continue
        faults += [
            Fault(
                f"{function} takes {_told_arguments(one)}, and rewards are called with three", file=str(place),
                line=one.lineno, fix=f"write   def {function}(messages, completion, example):",
            )
            for one in tree.body
            if isinstance(one, ast.FunctionDef) and one.name == function and not one.decorator_list
            and not _takes_three(one.args)
        ]  # fmt: skip
    for source in names_of(config.data.train):
        tasks = _asked(source, base) if is_task(source) and TASK_REWARD in config.rl.rewards else []
        if any(task.runs_code for task in tasks):
            what = f"{source} runs programs that the model wrote, and no training does that"
            faults.append(Fault(what, key="rl.rewards", fix="write a function that runs them where it is safe"))
    return faults


def _takes_three(given: ast.arguments) -> bool:
    most = len(given.posonlyargs) + len(given.args)
    needs_names = any(default is None for default in given.kw_defaults)
    return most - len(given.defaults) <= 3 and (most >= 3 or given.vararg is not None) and not needs_names


def _told_arguments(function: ast.FunctionDef) -> str:
    return f"({ast.unparse(function.args)})"


def _asked(source: str, base: Path) -> list[Task]:
    try:
        return find_tasks(source, base)
    except ConfigError:  # what is wrong with its name, the data's check says
        return []
