"""`duoka config`: show what a YAML means, and what may stand in one. Thin: the config room does the work.

Loaded by the lazy group in cli/__init__.py as `command`. Imports no torch, starts nothing, writes nothing.
"""

from __future__ import annotations

import json

import click


@click.group(name="config", help="Show a config with the origin of every value, or the schema of all configs.")
def command() -> None:
    pass


@command.command(help="Print every value of FILE, overrides applied, with where it came from.")
@click.argument("file", type=click.Path(dir_okay=True))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of YAML.")
def show(file: str, overrides: tuple[str, ...], as_json: bool) -> None:
    from duoka.config.load import config_hash, load_config, resolved_yaml

    loaded = load_config(file, overrides)
    if not as_json:
        click.echo(resolved_yaml(loaded), nl=False)
        for note in loaded.notes:
            click.echo(f"note: {note}", err=True)
        return
    from duoka.config.write import shown_values

    answer = {
        "file": str(loaded.path),
        "hash": config_hash(loaded.config),
        "config": shown_values(loaded),
        "origins": loaded.origins,
        "notes": list(loaded.notes),
    }
    click.echo(json.dumps(answer, indent=2, ensure_ascii=False))


@command.command(help="Print the JSON Schema of the YAML, for editors.")
@click.option("--markdown", is_flag=True, help="Print the page docs/config.md instead.")
def schema(markdown: bool) -> None:
    from duoka.config.document import config_markdown, json_schema

    if markdown:
        click.echo(config_markdown(), nl=False)
    else:
        click.echo(json.dumps(json_schema(), indent=2, ensure_ascii=False))
