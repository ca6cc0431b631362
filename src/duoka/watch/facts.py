"""What was run, in rows for people: model, layout, batch, machine, versions. Of the closing report and its page."""

from __future__ import annotations

from typing import Any

from duoka.units import format_count
from duoka.watch.columns import number
from duoka.watch.costs import exchange_rows, held_rows
from duoka.watch.history import History


def run_facts(history: History) -> list[tuple[str, str]]:
    """What was run, in rows of name and value; only what is known."""
    plan, rows = history.plan, list[tuple[str, str]]()
    model, layout, batch = (_section(plan, key) for key in ("model", "layout", "batch"))
    parameters, trained = number(model.get("num_parameters")), number(model.get("num_trainable"))
    if parameters and trained is not None:
        rows.append(("model", f"{model.get('type', '')}, {format_count(parameters)} parameters"))
        rows.append(("trained", f"{format_count(trained)} parameters ({trained / parameters:.2%})"))
    if layout:
        rows.append(("layout", f"{layout.get('name')}, {layout.get('precision')}, recompute {layout.get('recompute')}"))
    if batch.get("sentence"):
        rows.append(("batch", str(batch["sentence"])))
    machine = plan.get("machine")
    if isinstance(machine, dict):
        cards = machine.get("gpus") or []
        device = f"{len(cards)} x {cards[0].get('name')}" if cards else str(machine.get("cpu", "CPU"))
        rows.append(("machine", f"{device}, {machine.get('num_cores')} cores"))
    if history.facts.get("world_size"):
        rows.append(("processes", str(history.facts["world_size"])))
    rows += [*exchange_rows(history), *held_rows(history)]
    rows += _env_rows(history.env)
    rows.append(("folder", str(history.run.path)))
    return rows


def _env_rows(env: dict[str, Any]) -> list[tuple[str, str]]:
    """Host, versions of what matters most, and the code's commit, as env.json has them."""
    packages = _section(env, "packages")
    named = [("duoka", env.get("duoka")), ("python", env.get("python"))]
    named += [(name, packages.get(name)) for name in ("torch", "transformers", "peft")]
    versions = ", ".join(f"{name} {value}" for name, value in named if value)
    rows = [("host", str(env.get("host") or "")), ("versions", versions), ("commit", _commit(env.get("git")))]
    return [(name, text) for name, text in rows if text]


def _commit(git: Any) -> str:
    """A commit's beginning, and whether the files were those of it."""
    if not isinstance(git, dict) or not git.get("commit"):
        return ""
    return f"{str(git['commit'])[:12]}{', with changes of its own' if git.get('changed') else ''}"


def _section(plan: dict[str, Any], key: str) -> dict[str, Any]:
    found = plan.get(key)
    return found if isinstance(found, dict) else {}
