"""transformers' and PEFT's own reading of a folder, and a refusal of what they pass over.

Weights that no file has would be drawn at random, and those that have no place be left out: a line in a log at most.

build.py calls this for every model and adapter that is loaded whole.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from duoka.config.adapters import HOLDS, WEIGHTS
from duoka.errors import ConfigError
from duoka.hub.weight_files import find_damage
from duoka.model.auto_class import language_class
from duoka.model.mapped_files import leave_files
from duoka.model.quantize import check_codes
from duoka.model.score_head import read_scorer

_NAMED = 3  # so many weights are named in a message
_OTHER_MODEL = "name the model that it was trained on, or copy the adapter again"


def read_model(folder: Path, *, scores: bool, **options: Any) -> Any:
    """The language model in a folder, or one with a head for scores; each of its weights from the files."""
    from transformers import AutoConfig

    check_codes(folder)
    try:
        if scores:
            return read_scorer(folder, **options)
        # Of weights whose shapes differ transformers says no more than that there are some, unless it goes on.
        known = {name: options[name] for name in ("trust_remote_code", "local_files_only") if name in options}
        read: Any = language_class(AutoConfig.from_pretrained(folder, **known)).from_pretrained
        model, found = read(folder, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        damage = find_damage(folder)
        reason, fix = (_first_line(error), None) if damage is None else (f"it is one {damage[0]}", damage[1])
        raise ConfigError(f"the model in {folder} could not be loaded: {reason}", fix=fix) from error
    _refuse_unfilled(folder, model, found)
    leave_files(model)
    say_untied(model)
    return model


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _refuse_unfilled(folder: Path, model: torch.nn.Module, found: dict[str, Any]) -> None:
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    missing = sorted(name for name in found["missing_keys"] if name in parameters)
    others = sorted(found["mismatched_keys"])
    if not missing and not others:
        return
    if others:
        name, there, wanted = others[0]
        more = f" (and {len(others) - 1:,} more)" if others[1:] else ""
        what = f"has weights of other shapes than its config.json asks for: {name} is {_times(there)} in the files, "
        what += f"and {_times(wanted)} by the config{more}"
    else:
        what = f"has no values for {_counted(missing)}: they would be drawn at random"
    unknown = sorted(found["unexpected_keys"])
    where = f"its files hold {_counted(unknown)}, for which the model has no place" if unknown else None
    fix = "copy the model again, with all its files and its own config.json"
    raise ConfigError(f"the model in {folder} {what}", where=where, fix=fix)


def _counted(names: list[str]) -> str:
    # As a file has them: PEFT names the adapter in the model's (up to 0.20 in all).
    listed = ", ".join(name.replace(".default.", ".") for name in names[:_NAMED]) + (", ..." if names[_NAMED:] else "")
    return f"{len(names):,} weight{'s' if names[1:] else ''} ({listed})"


def _times(shape: Any) -> str:
    return " x ".join(str(size) for size in shape)


def say_untied(model: Any) -> None:
    """In the config too: where the files have a head of its own, transformers keeps it apart whatever the config says,
    and whoever shares it by the config computes another model."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    weights = [getattr(module, "weight", None) for module in (head, embedding)]
    if None in weights or weights[0] is weights[1]:
        return
    for config in {id(one): one for one in (model.config, model.config.get_text_config())}.values():
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False


# --- adapters ---


def read_adapted(base: torch.nn.Module, folder: Path) -> torch.nn.Module:
    """`base` with the adapter of a PEFT folder beside it, all of which has its place there."""
    import peft

    try:
        _fit_vocabulary(base, folder)
        with _results() as results:
            adapted = peft.PeftModel.from_pretrained(base, os.fspath(folder))
    except KeyError as error:  # a whole module beside the adapters (modules_to_save)
        what = f"the adapter in {folder} lacks {error.args[0]}, which its adapter_config.json says it has"
        raise ConfigError(what, fix="copy the adapter again, or save it again with PEFT") from error
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise ConfigError(f"the adapter in {folder} could not be loaded: {_first_line(error)}") from error
    except RuntimeError as error:
        sizes = [line.strip() for line in str(error).splitlines() if "size mismatch" in line]
        if not sizes:
            raise
        raise ConfigError(
            f"the adapter in {folder} is one of another model", where=sizes[0], fix=_OTHER_MODEL
        ) from error
    for result in results:
        _refuse_misfit(folder, [*result.missing_keys], [*result.unexpected_keys])
    return adapted


@contextlib.contextmanager
def _results() -> Iterator[list[Any]]:
    """What PEFT found missing and left over of the adapters that are read in the block: it keeps that to itself."""
    import peft

    results: list[Any] = []
    load = peft.PeftModel.load_adapter

    def note(self: Any, *args: Any, **options: Any) -> Any:
        result = load(self, *args, **options)
        results.append(result)
        return result

    peft.PeftModel.load_adapter = note  # type: ignore[method-assign, assignment]
    try:
        with warnings.catch_warnings():  # the refusal says it
            warnings.filterwarnings("ignore", message="Found missing adapter keys", category=UserWarning)
            yield results
    finally:
        peft.PeftModel.load_adapter = load  # type: ignore[method-assign]


def _refuse_misfit(folder: Path, missing: list[str], unknown: list[str]) -> None:
    if (folder / HOLDS).is_file():
        missing = []  # of a merged one that lies on some layers only: on the others nothing is added
    # Of whole modules beside an embedding that was written along, PEFT writes the same weights under three names.
    unknown = [name for name in unknown if ".modules_to_save." not in name and ".original_module." not in name]
    if not missing and not unknown:
        return
    lacks = [f"the model has a place for {_counted(sorted(missing))}, and its file has none"] if missing else []
    holds = [f"its file holds {_counted(sorted(unknown))}, for which the model has no place"] if unknown else []
    raise ConfigError(
        f"the adapter in {folder} does not fit the model: parts of it would not count",
        where="\n".join([*holds, *lacks]), fix=_OTHER_MODEL,
    )  # fmt: skip


def _fit_vocabulary(base: Any, folder: Path) -> None:
    """Give the base as many tokens as the adapter's own embedding has: PEFT writes it along when tokens were added."""
    core, shapes = base, _shapes(folder / WEIGHTS)
    embedding, head = core.get_input_embeddings(), core.get_output_embeddings()
    names = {id(module): name for name, module in core.named_modules()}

    def rows_of(module: torch.nn.Module | None) -> int | None:
        name = f"base_model.model.{names.get(id(module))}"
        return next((shapes[one][0] for one in (f"{name}.weight", f"{name}.base_layer.weight") if one in shapes), None)

    rows, own = rows_of(embedding), embedding.weight.shape[0]
    if rows is None or rows == own:
        return
    if head is not None and head.weight is not embedding.weight and rows_of(head) != rows:
        raise ConfigError(
            f"the adapter in {folder} has an embedding of {rows:,} tokens, the model below it one of {own:,}, and "
            "there is no head for the others",
            fix=_OTHER_MODEL,
        )
    core.resize_token_embeddings(rows, mean_resizing=False)


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(path, framework="pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
