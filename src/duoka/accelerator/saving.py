"""The verbs that write and read: models for other programs, and whole states to go on from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from duoka.accelerator import files
from duoka.accelerator.prepared import PreparedModel
from duoka.accelerator.snapshot import FOLDER, Opened, Parts, load_snapshot, newest, save_snapshot
from duoka.accelerator.window import Window
from duoka.comm.world import World
from duoka.errors import ConfigError
from duoka.model.build import named_part
from duoka.parallel.gather import gather_state
from duoka.parallel.precision import Numerics
from duoka.runs.manifest import folder_name


class Saving:
    """A part of the Accelerator."""

    world: World
    parts: Parts
    numerics: Numerics
    window: Window
    project_dir: str | None
    is_main_process: bool
    print: Callable[..., None]
    wait_for_everyone: Callable[[], None]
    gradients_are_gone: Callable[[], None]
    settle_scale: Callable[[], None]
    step: int = 0  # optimizer steps done

    def find_models(self, models: tuple[torch.nn.Module, ...]) -> list[PreparedModel]:
        """What was prepared of `models`, or of all when none is named."""
        wanted = [m for m in self.parts.models if not models or m.engine.model in models or m.bare in models]
        if len(wanted) < len(models):
            raise ConfigError("this model was not prepared", fix="write:   model = accelerator.prepare(model)")
        return wanted

    def unwrap_model(self, model: torch.nn.Module, keep_fp32_wrapper: bool = True) -> torch.nn.Module:
        """The model itself, without what it was wrapped in."""
        model = getattr(model, "_orig_mod", model)
        return next((m.bare for m in self.parts.models if m.engine.model is model), getattr(model, "module", model))

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """Whole tensors by name; sharded ones in rank 0's memory alone. Of adapters, only what is trained."""
        (prepared,) = self.find_models((model,))
        prepared.engine.settle()
        keep = self.is_main_process or not prepared.layout.is_sharded
        return gather_state(named_part(prepared.bare), keep=keep)

    def save(self, thing: Any, path: str | Path, **options: Any) -> None:
        """Named tensors as .safetensors, plain values as .json; rank 0 writes."""
        if self.is_main_process:
            files.write_object(thing, Path(path))

    def save_model(self, model: torch.nn.Module, save_directory: str | Path, **options: Any) -> None:
        """Weights with config, as transformers (or PEFT, for adapters) reads them; others as model.safetensors."""
        (prepared,) = self.find_models((model,))
        state = self.get_state_dict(model)
        if self.is_main_process:
            files.write_model(prepared.bare, Path(save_directory), state, options)
        self.wait_for_everyone()

    def register_for_checkpointing(self, *things: Any) -> None:
        """Save and restore these too: anything with state_dict and load_state_dict."""
        for one in things:
            if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
                raise ConfigError(f"{type(one).__name__} has no state_dict and load_state_dict, by which it is saved")
        self.parts.objects += [one for one in things if not any(one is known for known in self.parts.objects)]

    def save_state(self, output_dir: str | Path | None = None) -> str:
        """All that the loop needs to go on: weights, optimizers, schedulers, places in the data, random generators.

        Without a folder: project_dir/checkpoints/step-N. In an open window, its micro-batches are done again later.
        """
        target = self._checkpoints() / folder_name(self.step) if output_dir is None else Path(output_dir) / FOLDER
        opened = Opened(self.window.opened, self.window.at) if self.window.is_open and self.window.opened else None
        self.settle_scale()
        save_snapshot(target, self.parts, self.numerics, self.world, self.step, opened)
        return str(target if output_dir is None else output_dir)

    def load_state(self, input_dir: str | Path | None = None) -> None:
        """Go on from a saved state, at any world size; without a folder, from the newest that is whole.

        Loaders stand where they stood: their next iteration is the rest of their epoch (`loader.epoch`).
        """
        folder = newest(self._checkpoints(), self.world, self.print) if input_dir is None else Path(input_dir)
        self.settle_scale()
        self.step = load_snapshot(folder, self.parts, self.numerics, self.world)
        self.window.at = 0
        for model in self.parts.models:
            for parameter in model.parameters.values():
                parameter.grad = None  # of a window that is done again
        self.gradients_are_gone()

    def _checkpoints(self) -> Path:
        if self.project_dir is None:
            raise ConfigError("where to? no folder was named", fix="write save_state('folder') or project_dir='folder'")
        return Path(self.project_dir) / "checkpoints"
