"""`PartialState`, `AcceleratorState` and `GradientState`: views of the world, the Accelerator and its window."""

from __future__ import annotations

from typing import Any

from duoka.accelerator.names.enums import DistributedType
from duoka.accelerator.names.newest import current_world, newest_accelerator
from duoka.accelerator.roles import Roles
from duoka.comm.world import World, end_world
from duoka.errors import ConfigError
from duoka.plan.layout import SHARDED


def kind_of(world: World, strategy: str = "ddp") -> DistributedType:
    if strategy in SHARDED:
        return DistributedType.FSDP
    if world.size == 1:
        return DistributedType.NO
    return DistributedType.MULTI_GPU if world.device.type == "cuda" else DistributedType.MULTI_CPU


class PartialState(Roles):
    """This process's place, for scripts without an Accelerator; joins the world when it is made."""

    def __init__(self, cpu: bool = False, **options: Any) -> None:
        if any(value is not None for value in options.values()):
            raise ConfigError(
                f"PartialState has no arguments {', '.join(options)}",
                fix="start with duoka launch or torchrun, which say where ranks meet",
            )
        world = current_world()
        if cpu and world.device.type == "cuda":
            raise ConfigError("PartialState(cpu=True)", fix="to leave GPUs alone, set CUDA_VISIBLE_DEVICES=")
        super().__init__(world, debug=False)

    @property
    def backend(self) -> str | None:
        return self.world.backend if self.world.size > 1 else None

    @property
    def distributed_type(self) -> DistributedType:
        return kind_of(self.world)

    initialized = True

    def set_device(self) -> None:
        """It is set."""

    def destroy_process_group(self, group: Any = None) -> None:
        """Leave the world, at a script's end."""
        if self.world.size > 1:
            end_world(self.world)

    def __repr__(self) -> str:
        lines = {"Distributed environment": self.distributed_type, "Backend": self.backend}
        lines |= {"Num processes": self.num_processes, "Process index": self.process_index}
        lines |= {"Local process index": self.local_process_index, "Device": self.device}
        return "".join(f"{name}: {value}\n" for name, value in lines.items())


class AcceleratorState(PartialState):
    """The same, with what the newest Accelerator was made with."""

    def __init__(self, *, accelerator: Any = None) -> None:
        owner = accelerator or newest_accelerator()
        if owner is None:
            raise ConfigError("AcceleratorState without an Accelerator", fix="make the Accelerator first")
        Roles.__init__(self, owner.world, owner.debug)
        self._owner = owner

    @property
    def distributed_type(self) -> DistributedType:
        return kind_of(self.world, self._owner.layout.strategy)

    @property
    def mixed_precision(self) -> str:
        return str(self._owner.mixed_precision)

    @property
    def fsdp_plugin(self) -> Any:
        return self._owner.plugins.get("fsdp_plugin")

    @property
    def deepspeed_plugin(self) -> Any:
        return self._owner.plugins.get("deepspeed_plugin")

    @property
    def parallelism_config(self) -> Any:
        return self._owner.plugins.get("parallelism_config")

    def __repr__(self) -> str:
        return f"{super().__repr__()}Strategy: {self._owner.layout.strategy}\nMixed precision: {self.mixed_precision}\n"


class GradientState:
    """Where the window of the newest Accelerator stands."""

    def __init__(self, gradient_accumulation_plugin: Any = None) -> None:
        self._plugin = gradient_accumulation_plugin

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"GradientState has no {name!r} here: it knows sync_gradients, num_steps and the loader")

    @property
    def _window(self) -> Any:
        owner = newest_accelerator()
        if owner is None:
            raise ConfigError("GradientState without an Accelerator", fix="make the Accelerator first")
        return owner.window

    initialized = True

    @property
    def sync_gradients(self) -> bool:
        return bool(self._window.sync)

    @property
    def num_steps(self) -> int:
        return int(self._window.num_steps)

    @property
    def active_dataloader(self) -> Any:
        active = self._window.readings.active
        return active[-1] if active else None

    @property
    def in_dataloader(self) -> bool:
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """The loop works on the last batch."""
        current = self._window.current
        return bool(current and current.is_last)

    @property
    def remainder(self) -> int:
        """Samples of a short last batch, over all ranks; -1 elsewhere."""
        current, loader = self._window.current, self.active_dataloader
        if not current or not current.is_last:
            return -1
        full = getattr(loader.source, "global_batch", current.num_global)
        return current.num_global % full if current.num_global != full else 0
