"""Folders that are named as a model and are something else: what they are, and what makes a model of them.

models.py asks as part of its checks, and serve/load_run.py of what `chat`, `eval` and `export` name. Knows no torch.
"""

from __future__ import annotations

from pathlib import Path

from duoka.errors import ConfigError, typed

WRITE = "write a folder with config.json and *.safetensors, a Hub id such as Qwen/Qwen3-0.6B, or demo"
_ADAPTER, _ADAPTERS_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


_GGUF = "GGUF, which llama.cpp and Ollama read: its weights are rounded, and its tokenizer is written in their way"
_NO_GGUF = "name the folder or Hub id that it was made from; llama-server -m FILE serves the file itself"


def find_other_file(path: Path) -> tuple[str, str] | None:
    """As `find_other`, of a file that is named as a model; None: there is none, or nothing is known of its kind."""
    if path.suffix.lower() == ".gguf":
        return f"a file in {_GGUF}", _NO_GGUF
    if path.name == "config.json" or path.suffix == ".safetensors":
        return "a file of a model, not its folder", f"write its folder:   {typed(path.parent)}"
    return None


def has_config(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def find_other(folder: Path) -> tuple[str, str] | None:
    """(what it is, what to do) of a folder that is no model, or more than one; None: it may be one."""
    if (folder / _ADAPTER).is_file():
        own = [path for path in folder.glob("*.safetensors") if path.name != _ADAPTERS_WEIGHTS]
        if not has_config(folder) or not own:
            return "which holds an adapter, not a model", "name the base model here"
        return (
            f"which holds a model and an adapter ({_ADAPTER}): transformers reads both as one, where it reads it whole",
            f"move {_ADAPTER} and {_ADAPTERS_WEIGHTS} to a folder of their own, which lora.adapter may name",
        )
    return None if has_config(folder) else _other_checkpoint(folder)


def _other_checkpoint(folder: Path) -> tuple[str, str]:
    if (folder / "latest").is_file() or any(folder.glob("*model_states.pt")):
        return (
            "which holds a checkpoint of DeepSpeed",
            f"make a model of it:   duoka import-checkpoint {typed(folder)} --model BASE -o DIR",
        )
    if any(folder.glob("*.gguf")) and not any(folder.glob("*.safetensors")):
        return f"which holds {_GGUF}", _NO_GGUF
    if any(folder.glob("*.distcp")) or any(folder.glob("*/*.distcp")):
        return (
            "which holds the shards of a distributed checkpoint (*.distcp)",
            f"make a model of them:   duoka import-checkpoint {typed(folder)} --model BASE -o DIR",
        )
    if any(folder.glob("random_states_*.pkl")) and any(folder.glob("*.safetensors")):
        return (
            "which holds a state that accelerate saved: a model's weights without its config.json",
            "copy config.json and the tokenizer's files of the model that was trained beside them",
        )
    if steps := _steps_in(folder):
        return f"which holds checkpoints ({steps[0].name}) and no model of its own", f"name one:   {typed(steps[0])}"
    return "which is no model: it has no config.json", WRITE


def _steps_in(folder: Path) -> list[Path]:
    """What transformers' Trainer saved in it, the newest first."""
    steps = [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal()]
    steps = [path for path in steps if has_config(path) or (path / _ADAPTER).is_file()]
    return sorted(steps, key=lambda path: -int(path.name.removeprefix("checkpoint-")))


def refuse_no_model(folder: Path) -> None:
    """Refuse a folder without a config.json, which every reader would miss in words of its own."""
    if not has_config(folder) and (other := find_other(folder)) is not None:
        raise ConfigError(f"{folder} is a folder {other[0]}", fix=other[1])
