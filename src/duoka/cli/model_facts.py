"""The shape of a config's model, before anything of it is loaded, for commands that plan or explain."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from duoka.config.schema import ModelConfig, RunConfig
    from duoka.plan.shape import ModelShape

UNKNOWN_VOCABULARY = 65536  # of a new model whose tokenizer is not there yet


def read_model_shape(model: ModelConfig, base: Path, facts: Mapping[str, Any] | None = None) -> ModelShape:
    """By its config.json, whose `facts` were read or are, and by its files where they are here."""
    from duoka.hub.models import known_folder
    from duoka.plan.in_files import as_in_files
    from duoka.plan.shape import shape_from_config

    facts = read_model_facts(model, base) if facts is None else facts
    shape, folder = shape_from_config(facts, where=model.title), known_folder(model, base)
    return shape if model.from_scratch else as_in_files(shape, folder, facts)


def measured(shape: ModelShape, facts: Mapping[str, Any], config: RunConfig) -> ModelShape:
    """Of a type that is in no table: with what its layers keep, which takes torch and some seconds once."""
    from duoka.runs.kept import with_kept

    def measure(facts: Mapping[str, Any], way: str) -> dict[str, float] | None:
        click.echo("note: this model type is in no table: what its layers keep is measured, once", err=True)
        from duoka.model.kept_bytes import measure_kept

        return measure_kept(facts, way)

    return with_kept(shape, facts, config, measure)


def shape_for_axes(config: RunConfig, base: Path) -> ModelShape | None:
    """The model's, where axes are asked for and it can be told without the network; its faults are others' to say."""
    model, parallel = config.model, config.parallel
    if parallel.tensor * parallel.pipeline * parallel.sequence == 1:
        return None
    from duoka.errors import DuokaError
    from duoka.hub.models import find_model, known_folder
    from duoka.plan.shape import read_shape

    with contextlib.suppress(DuokaError):
        if find_model(model, base).hub_id is None:
            return read_model_shape(model, base)
        folder = known_folder(model, base)
        return None if folder is None else read_shape(folder)
    return None


def read_model_facts(model: ModelConfig, base: Path) -> dict[str, Any]:
    from duoka.hub.models import fetch_config, find_model, local_tokenizer
    from duoka.hub.new_model import read_vocabulary
    from duoka.plan.shape import DEMO_FACTS, facts_of_new, read_facts

    source = find_model(model, base)
    if source.is_demo:
        return dict(DEMO_FACTS)
    if source.is_new:
        folder = local_tokenizer(model, base)
        return facts_of_new(model, UNKNOWN_VOCABULARY if folder is None else read_vocabulary(folder))
    if source.folder is not None:
        return _with_vocabulary(read_facts(source.folder), model, base)
    assert source.hub_id is not None
    return read_facts(fetch_config(source.hub_id, model.revision))


def _with_vocabulary(facts: dict[str, Any], model: ModelConfig, base: Path) -> dict[str, Any]:
    """From scratch, a model has as many tokens as the tokenizer that is named beside it."""
    from duoka.hub.models import local_tokenizer
    from duoka.hub.new_model import read_vocabulary

    folder = local_tokenizer(model, base) if model.from_scratch and model.tokenizer else None
    return facts if folder is None else {**facts, "vocab_size": read_vocabulary(folder)}
