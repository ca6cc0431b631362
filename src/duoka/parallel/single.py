"""One process with the whole model: nothing is exchanged."""

from __future__ import annotations

from duoka.model.build import named_part
from duoka.parallel.engine import Engine, EngineSpec
from duoka.parallel.fill import fill_weights


class Single(Engine):
    """The plain engine, on this process's device."""

    def __init__(self, spec: EngineSpec) -> None:
        bring(spec)
        super().__init__(spec)


def bring(spec: EngineSpec) -> None:
    """The whole model to this process's device: from files, where it is on the meta device still."""
    device = spec.mesh.everyone.device
    if spec.source is None:
        if not any(parameter.is_meta for parameter in spec.bare.parameters()):  # a dry run's has no values
            spec.bare.to(device)
        return
    fill_weights(named_part(spec.bare), spec.source, device)
    for parameter in spec.bare.parameters():  # what stands beside the language model came with its values
        parameter.data = parameter.data.to(device)
    for module in spec.bare.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
