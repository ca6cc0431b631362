"""`duoka init`: write a first config, commented, from the schema's own descriptions. Never overwrites a file.

Loaded by the lazy group in cli/__init__.py as `command`.
"""

from __future__ import annotations

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
    from duoka.cli.first_file import check_name, write_first
    from duoka.config.document import starter_yaml
    from duoka.errors import ConfigError, typed

    path = check_name(file, "init")
    if not all(text.strip() for text in (model, *data)):
        raise ConfigError("--model and --data take a name, got nothing", fix="leave them out, or give a name")
    write_first(path, starter_yaml(model, data, path.name), "init")
    click.echo(f"wrote {file}")
    click.echo(f"next:   duoka config show {typed(file)}")
    click.echo(f"        duoka train {typed(file)}")
