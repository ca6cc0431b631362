"""The verbs that write and read: models for other programs, and whole states to go on from."""

from __future__ import annotations

import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from duoka.accelerator import files
from duoka.accelerator.names.plugins import ProjectConfiguration
from duoka.accelerator.prepared import PreparedModel
from duoka.accelerator.snapshot import FOLDER, Opened, Parts, load_snapshot, newest, newest_of, save_snapshot
from duoka.accelerator.window import Window
from duoka.comm.world import World
from duoka.errors import ConfigError
from duoka.model.build import named_part, quiet_loading
from duoka.parallel.gather import gather_state
from duoka.parallel.mesh import Mesh
from duoka.parallel.precision import Numerics
from duoka.runs.manifest import folder_name, list_checkpoints
from duoka.store.final_folder import write_weights


class Saving:
    """A part of the Accelerator."""

    world: World
    parts: Parts
    numerics: Numerics
    window: Window
    mesh: Mesh
    project_configuration: ProjectConfiguration
    is_main_process: bool
    print: Callable[..., None]
    wait_for_everyone: Callable[[], None]
    gradients_are_gone: Callable[[], None]
    settle_scale: Callable[[], None]
    step: int = 0  # optimizer steps done

    def __init__(self) -> None:
        self._save_hooks: OrderedDict[int, Callable[..., None]] = OrderedDict()
        self._load_hooks: OrderedDict[int, Callable[..., None]] = OrderedDict()

    def find_models(self, models: tuple[torch.nn.Module, ...]) -> list[PreparedModel]:
        """What was prepared of `models`, or of all when none is named."""
        wanted = [m for m in self.parts.models if not models or m.engine.model in models or m.bare in models]
        if len(wanted) < len(models):
            raise ConfigError("this model was not prepared", fix="write:   model = accelerator.prepare(model)")
        return wanted

    def unwrap_model(
        self, model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> torch.nn.Module:
        """The model itself, without what it was wrapped in."""
        model = getattr(model, "_orig_mod", model)
        return next((m.bare for m in self.parts.models if m.engine.model is model), getattr(model, "module", model))

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """Whole tensors by name; sharded ones in rank 0's memory alone. Of adapters, only what is trained."""
        (prepared,) = self.find_models((model,))
        prepared.engine.settle()
        keep = self.is_main_process or not prepared.layout.is_sharded
        return gather_state(named_part(prepared.bare), keep=keep)

    def save(self, obj: Any, f: str | Path, safe_serialization: bool = True, **options: Any) -> None:
        """Named tensors as .safetensors, plain values as .json; rank 0 writes, in its own way."""
        if self.is_main_process:
            files.write_object(obj, Path(f))

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | Path,
        max_shard_size: int | str | None = None,
        safe_serialization: bool = True,
        **options: Any,
    ) -> None:
        """Weights with config, as transformers (or PEFT, for adapters) reads them; others as model.safetensors.

        Sharded weights are written by all ranks, each its own, where the model is one of transformers'.
        """
        (prepared,) = self.find_models((model,))
        _check_safe(safe_serialization)
        if max_shard_size is not None:
            options["max_shard_size"] = max_shard_size
        prepared.engine.settle()
        lm = named_part(prepared.bare)
        if prepared.layout.is_sharded and self._write_together(lm, Path(save_directory), options):
            return
        state = self.get_state_dict(model)
        if self.is_main_process:
            files.write_model(prepared.bare, Path(save_directory), state, options)
        self.wait_for_everyone()

    def _write_together(self, lm: torch.nn.Module, folder: Path, options: dict[str, Any]) -> bool:
        """False where one rank needs whole tensors: models that are not transformers', adapters."""
        from transformers import PreTrainedModel

        if not isinstance(lm, PreTrainedModel):
            return False
        # Who writes, and how, is not the script's here.
        options = {name: value for name, value in options.items() if name not in ("is_main_process", "save_function")}
        with quiet_loading():
            return write_weights(lm, self.mesh, folder, files.taken(lm, options))

    def register_for_checkpointing(self, *things: Any) -> None:
        """Save and restore these too: anything with state_dict and load_state_dict."""
        for one in things:
            if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
                raise ConfigError(f"{type(one).__name__} has no state_dict and load_state_dict, by which it is saved")
        self.parts.objects += [one for one in things if not any(one is known for known in self.parts.objects)]

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call hook(models, weights, folder) before each save_state; `weights` are whole, by name, on rank 0."""
        return self._add_hook(self._save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call hook(models, folder) before each load_state."""
        return self._add_hook(self._load_hooks, hook)

    def _add_hook(self, hooks: OrderedDict[int, Callable[..., None]], hook: Callable[..., None]) -> RemovableHandle:
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def save_state(self, output_dir: str | Path | None = None, safe_serialization: bool = True, **options: Any) -> str:
        """All that the loop needs to go on: weights, optimizers, schedulers, places in the data, random generators.

        Without a folder: project_dir/checkpoints/step-N. In an open window, its micro-batches are done again later.
        """
        _check_safe(safe_serialization)
        project = self.project_configuration
        if project.automatic_checkpoint_naming:
            output_dir = self._checkpoints() / f"{NUMBERED}{project.iteration}"
            if (output_dir / FOLDER).exists():
                raise ConfigError(f"{output_dir} is there already", fix="set ProjectConfiguration(iteration=N)")
        target = self._checkpoints() / folder_name(self.step) if output_dir is None else Path(output_dir) / FOLDER
        folder = str(target if output_dir is None else output_dir)
        if self._save_hooks:
            models = [model.engine.model for model in self.parts.models]
            weights = [self.get_state_dict(model) for model in models]
            for hook in list(self._save_hooks.values()):
                hook(models, weights, folder)
        opened = Opened(self.window.opened, self.window.at) if self.window.is_open and self.window.opened else None
        self.settle_scale()
        save_snapshot(target, self.parts, self.numerics, self.world, self.step, opened)
        if project.automatic_checkpoint_naming:
            project.iteration += 1
        if project.total_limit is not None:
            self._drop_old(int(project.total_limit))
        return folder

    def _drop_old(self, limit: int) -> None:
        """The oldest go once the newest is whole."""
        if self.is_main_process:
            numbered = self.project_configuration.automatic_checkpoint_naming
            found = self._numbered() if numbered else list_checkpoints(self._checkpoints())
            for old in found[: max(0, len(found) - limit)]:
                shutil.rmtree(old)
        self.wait_for_everyone()

    def _numbered(self) -> list[Path]:
        """Automatically named checkpoints, the oldest first."""
        found = self._checkpoints().glob(f"{NUMBERED}*")
        return sorted((one for one in found if one.name.removeprefix(NUMBERED).isdecimal()), key=_number)

    def load_state(
        self, input_dir: str | Path | None = None, load_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """Go on from a saved state, at any world size; without a folder, from the newest that is whole.

        Loaders stand where they stood: their next iteration is the rest of their epoch (`loader.epoch`).
        """
        if input_dir is not None:
            folder = Path(input_dir)
        elif self.project_configuration.automatic_checkpoint_naming:
            folder = newest_of(self._numbered(), self._checkpoints(), self.world)
            self.project_configuration.iteration = _number(folder) + 1
        else:
            folder = newest(self._checkpoints(), self.world, self.print)
        for hook in list(self._load_hooks.values()):
            hook([model.engine.model for model in self.parts.models], str(folder))
        self.settle_scale()
        self.step = load_snapshot(folder, self.parts, self.numerics, self.world)
        self.window.at = 0
        for model in self.parts.models:
            for parameter in model.parameters.values():
                parameter.grad = None  # of a window that is done again
        self.gradients_are_gone()

    def _checkpoints(self) -> Path:
        if self.project_configuration.project_dir is None:
            raise ConfigError("where to? no folder was named", fix="write save_state('folder') or project_dir='folder'")
        return Path(self.project_configuration.project_dir) / "checkpoints"


NUMBERED = "checkpoint_"


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix(NUMBERED))


def _check_safe(safe_serialization: bool) -> None:
    if not safe_serialization:
        raise ConfigError("safe_serialization=False asks for a pickle, and duoka writes none", fix="delete it")
