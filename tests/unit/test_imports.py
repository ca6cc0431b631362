"""The import graph, drawn from the sources: no two files and no two rooms know each other, not even in a longer circle.

import-linter holds the order of the floors; this test also sees circles within a floor and within a room.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

SRC = Path(__file__).parents[2] / "src"
# Folders that hold rooms of their own; every other folder of duoka is one room.
SPLIT = ("duoka.data",)


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph() -> dict[str, set[str]]:
    """For each module of duoka, the modules it imports anywhere: at its top, in a function, for type checkers only."""
    modules = {module_name(path): path for path in SRC.rglob("*.py")}
    # `duoka` itself imports what it offers when asked for; what others take from it is its version.
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        if name == "duoka":
            continue
        found = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("duoka"):
                each = [f"{node.module}.{alias.name}" for alias in node.names]
                found |= {one if one in modules else node.module for one in each}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names if alias.name in modules}
        graph[name] = found - {name, "duoka"}
    return graph


def room_of(module: str) -> str:
    parts = module.split(".")
    folder = ".".join(parts[:2])
    if folder in SPLIT and len(parts) > 3:
        return ".".join(parts[:3])
    return folder


def room_graph(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    rooms: dict[str, set[str]] = {}
    for module, known in graph.items():
        rooms.setdefault(room_of(module), set()).update(room_of(other) for other in known)
    return {room: known - {room} for room, known in rooms.items()}


def circle_in(graph: Mapping[str, set[str]]) -> list[str]:
    """One circle as the path that closes it, or nothing."""
    done: set[str] = set()

    def follow(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for other in sorted(graph.get(name, ())):
            if circle := follow(other, [*path, name]):
                return circle
        done.add(name)
        return []

    return next((circle for name in sorted(graph) if (circle := follow(name, []))), [])


def test_no_circle_of_files() -> None:
    graph = import_graph()
    assert len(graph) > 200, "this test no longer finds the sources"
    circle = circle_in(graph)
    assert not circle, f"these files import each other: {' -> '.join(circle)}"


def test_no_circle_of_rooms() -> None:
    rooms = room_graph(import_graph())
    assert {"duoka.store", "duoka.data.feed", "duoka.process"} <= set(rooms), "the rooms have moved: see SPLIT"
    circle = circle_in(rooms)
    assert not circle, f"these rooms import each other: {' -> '.join(circle)}"


def test_a_circle_would_be_found() -> None:
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a", "b", "c", "a"]
    assert not circle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()})
