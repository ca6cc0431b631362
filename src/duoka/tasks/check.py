"""Faults of the tasks and rewards that a config names: said before anything starts."""

from __future__ import annotations

import ast
from pathlib import Path

from duoka.config.paths import given_path, is_file
from duoka.config.rl import TASK_REWARD
from duoka.config.rule import names_of
from duoka.config.schema import RunConfig
from duoka.errors import ConfigError, Fault
from duoka.tasks.find import find_scored, find_tasks, is_task
from duoka.tasks.task import Task


def check_tasks(config: RunConfig, base: Path) -> list[Fault]:
    """Faults of `train.eval_tasks`, and of what stage rl asks and rewards."""
    faults = _check_rewards(config, base) if config.stage.kind.draws else []
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
    found: dict[str, Path | None] = {}
    for name in config.rl.rewards if config.stage.kind.draws else ():
        if name != TASK_REWARD and name not in config.rl.judges:
            given = given_path(name.rpartition(":")[0])
            found[name] = next((place.resolve() for place in (given, base / given) if is_file(place)), None)
    return found


def _check_rewards(config: RunConfig, base: Path) -> list[Fault]:
    """A function that is not there is found without running its file."""
    faults = []
    for name, place in reward_files(config, base).items():
        function = name.rpartition(":")[2]
        if place is None:
            fix = "a path begins in the folder where duoka is started, or beside the YAML"
            faults.append(Fault(f"there is no file {name.rpartition(':')[0]!r}", key="rl.rewards", fix=fix))
            continue
        try:
            tree = ast.parse(place.read_text(encoding="utf-8"))
        except SyntaxError as error:
            what = f"{place.name} is no Python: {error.msg}"
            faults.append(Fault(what, file=str(place), line=error.lineno or 0, source=(error.text or "").strip()))
            continue
        except (OSError, ValueError) as error:
            faults.append(Fault(f"{place} cannot be read: {error}", key="rl.rewards"))
            continue
        named = [one.name for one in tree.body if isinstance(one, ast.FunctionDef)]
        bound = [getattr(part, "id", "") for one in tree.body if isinstance(one, ast.Assign) for part in one.targets]
        imports = [alias for one in tree.body if isinstance(one, ast.ImportFrom) for alias in one.names]
        imported = [alias.asname or alias.name for alias in imports]
        if function not in (*named, *bound, *imported):
            known = f"it has {', '.join(named)}" if named else "it has none"
            faults.append(Fault(f"{place.name} has no function {function!r}", key="rl.rewards", fix=known))
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
