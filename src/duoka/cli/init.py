"""`duoka init`: write a first config, commented, from the schema's own descriptions. Never overwrites a file.

Loaded by the lazy group in cli/__init__.py as `command`.
"""

from __future__ import annotations

import os
from pathlib import Path

import click


@click.command(name="init", help="Write a commented config to FILE (default: sft.yaml). An existing file stays.")
@click.argument("file", type=click.Path(), default="sft.yaml")
@click.option("--model", default="demo", show_default=True, help="A Hub id, a local folder, or demo.")
@click.option(
    "--data",
    multiple=True,
    default=("identity",),
    show_default=True,
    help="A data set's name or file; may be repeated.",
)
def command(file: str, model: str, data: tuple[str, ...]) -> None:
    from duoka.config.document import starter_yaml
    from duoka.errors import ConfigError, StorageError

    path = Path(file)
    if path.is_dir():
        raise ConfigError(f"{file} is a folder", fix=f"give a file:   duoka init {path / 'sft.yaml'}")
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{file} does not end in .yaml", fix=f"write:   duoka init {file}.yaml")
    if not all(text.strip() for text in (model, *data)):
        raise ConfigError("--model and --data take a name, got nothing", fix="leave them out, or give a name")
    text = starter_yaml(model, data, path.name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # "x" checks and creates in one step: no file is overwritten in a race either.
        with path.open("x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError:
        what = f"{file} exists already, and init overwrites nothing"
        raise ConfigError(what, fix="give another name, or delete it first") from None
    except OSError as error:
        fix = "give a file in a folder that you may write to"
        raise StorageError(f"cannot write {file}: {error.strerror or os.strerror(error.errno or 0)}", fix=fix) from None
    click.echo(f"wrote {file}")
    click.echo(f"next:   duoka config show {file}")
    click.echo(f"        duoka train {file}")
