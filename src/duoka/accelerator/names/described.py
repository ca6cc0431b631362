"""What an Accelerator says of itself under the names that loops know; and what it has not, by name."""

from __future__ import annotations

from typing import Any

import torch

from duoka.accelerator.loaders import LoaderSettings
from duoka.accelerator.names.enums import FP8_ELSEWHERE, DistributedType
from duoka.accelerator.names.plugins import ProjectConfiguration
from duoka.accelerator.names.states import AcceleratorState, GradientState
from duoka.errors import ConfigError
from duoka.plan.layout import Layout
from duoka.torch_private import call_of

NOT_HERE = {
    "maybe_context_parallel": "duoka does not split sequences yet; shorter rows need less memory",
    "torch_device_mesh": "process groups are accelerator.mesh",
    "lomo_backward": "give `prepare` an optimizer of torch",
    "fp8_backend": FP8_ELSEWHERE,
    "fp8_recipe_handler": FP8_ELSEWHERE,
    "deepspeed_engine_wrapped": "ZeRO stages are duoka's own: there is no engine of DeepSpeed",
    "deepspeed_ulysses_dl_adapter": "duoka does not split sequences yet; shorter rows need less memory",
    "ddp_handler": 'write:   parallel={"find_unused_parameters": True}',
}


class Described:
    """A part of the Accelerator."""

    layout: Layout
    settings: LoaderSettings
    project_configuration: ProjectConfiguration
    plugins: dict[str, Any]
    num_processes: int
    process_index: int
    is_main_process: bool
    even_batches = True  # all ranks make equally many steps; nothing is duplicated for it
    use_seedable_sampler = True  # the order of data is a function of seed and epoch
    non_blocking = True
    use_stateful_dataloader = True  # loaders know their place
    device_placement = True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        fix = NOT_HERE.get(name, "docs/accelerator.md names its verbs")
        raise AttributeError(f"Accelerator has no {name!r} in duoka: {fix}")

    @property
    def state(self) -> AcceleratorState:
        return AcceleratorState(accelerator=self)

    @property
    def gradient_state(self) -> GradientState:
        return GradientState()

    @property
    def distributed_type(self) -> DistributedType:
        return self.state.distributed_type

    @property
    def multi_device(self) -> bool:
        return self.num_processes > 1

    @property
    def is_fsdp2(self) -> bool:
        return self.layout.is_sharded

    is_composable_parallelism_enabled = is_fsdp2
    tensor_parallel_rank = pipeline_parallel_rank = context_parallel_rank = 0

    @property
    def data_parallel_rank(self) -> int:
        return self.process_index

    @property
    def data_parallel_shard_rank(self) -> int:
        """This process's place among those that hold one copy of the weights together."""
        return self.process_index % self.layout.shard

    @staticmethod
    def verify_device_map(model: torch.nn.Module) -> bool:
        """Whether the model lies on several devices."""
        return any(len(set(getattr(one, "hf_device_map", {}).values())) > 1 for one in model.modules())

    @property
    def should_save_model(self) -> bool:
        """save_model and save_state are for all processes together; what a script writes by itself is for one."""
        return self.is_main_process

    @property
    def split_batches(self) -> bool:
        return self.settings.split_batches

    @property
    def dispatch_batches(self) -> bool:
        return self.settings.dispatch_batches

    @property
    def project_dir(self) -> str | None:
        folder: str | None = self.project_configuration.project_dir
        return folder

    @property
    def logging_dir(self) -> str | None:
        folder: str | None = self.project_configuration.logging_dir
        return folder

    @property
    def save_iteration(self) -> int:
        return int(self.project_configuration.iteration)

    @property
    def deepspeed_plugin(self) -> Any:
        return self.plugins.get("deepspeed_plugin")

    @property
    def parallelism_config(self) -> Any:
        return self.plugins.get("parallelism_config")

    @staticmethod
    def trigger_sync_in_backward(model: torch.nn.Module) -> None:
        """The next backward pass exchanges gradients, though the forward pass was inside of `no_sync`."""
        if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
            return
        if model.find_unused_parameters:
            raise ConfigError(
                "trigger_sync_in_backward does not go together with find_unused_parameters: which were used is decided "
                "in the forward pass",
                fix="make the last forward pass outside of no_sync",
            )
        model.require_backward_grad_sync = True
        model.reducer.prepare_for_backward([])
        call_of(model.module).prepared.will_exchange = True
