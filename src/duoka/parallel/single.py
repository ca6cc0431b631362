"""One process with the whole model: nothing is exchanged."""

from __future__ import annotations

from duoka.parallel.engine import Engine, EngineSpec


class Single(Engine):
    """The plain engine, on this process's device."""

    def __init__(self, spec: EngineSpec) -> None:
        spec.bare.to(spec.world.device)
        super().__init__(spec)
