"""`duoka new`: five questions, or as many flags; a short YAML for one's own data; and what the plan says of it."""

from __future__ import annotations

import sys
from typing import Any

import click

from duoka.cli.first_file import check_name, write_first

_METHODS = ("lora", "qlora", "full", "dpo")
# What a question takes when nothing is typed, or where there is no terminal to ask on.
_DEFAULTS = {"data": "identity", "method": "lora", "model": "demo", "max-length": "1024", "on": "here"}


@click.command("new")
@click.argument("file", type=click.Path())
@click.option("--data", multiple=True, help="A file, a folder or a known set's name; may be repeated.")
@click.option("--method", type=click.Choice(_METHODS), help="What is trained.")
@click.option("--model", help="A Hub id, a local folder, or demo.")
@click.option("--max-length", type=click.IntRange(min=8), help="Tokens of a sample; what is longer is cut.")
@click.option("--on", metavar="MACHINES", help='What it is planned for: here, or such as "1xRTX4090" or "8xA100-80G".')
def command(
    file: str, data: tuple[str, ...], method: str | None, model: str | None, max_length: int | None, on: str | None
) -> int:
    """Write a config for your own data to FILE by five questions, and say what the plan says.

    What a flag answers is not asked. Without a terminal nothing is asked: what no flag answers is taken as printed.
    An existing file stays. Exit code 4: written, and it would not fit.
    """
    from duoka.config.first import METHODS, first_yaml

    path = check_name(file, "new")
    sources = list(data) or [_answer("data", "1/5 data: a file or folder, or identity, which ships with duoka")]
    if method is None:
        for name, one in METHODS.items():
            _explain(f"      {name:<6} {one.what}")
        method = _answer("method", "2/5 what to train", click.Choice(_METHODS))
    model = model or _answer("model", "3/5 model: a Hub id such as Qwen/Qwen3-0.6B, a folder, or demo (135M)")
    length = max_length or int(_answer("max-length", "4/5 tokens of the longest sample", click.IntRange(min=8)))
    on = on or _answer("on", '5/5 where it will run: here, or such as "1xRTX4090" or "8xA100-80G"')
    write_first(path, first_yaml(model, sources, method, length, path.name), "new")
    click.echo(f"wrote {file}; see every value:   duoka config show {file}")
    return _print_verdict(file, on)


def _explain(line: str) -> None:
    if sys.stdin.isatty():
        click.echo(line)


def _answer(name: str, question: str, kind: click.ParamType[Any] | None = None) -> str:
    """What is typed, or the default where there is no terminal: then it is said, as nobody chose it."""
    default = _DEFAULTS[name]
    if sys.stdin.isatty():
        return str(click.prompt(question, default=default, type=kind))
    click.echo(f"--{name} is not given: {default}")
    return default


def _print_verdict(file: str, on: str) -> int:
    """Faults name the file's lines, so they are looked for when it is there."""
    from duoka.cli.plan import plan_of
    from duoka.config.load import load_config
    from duoka.data.read.registry import check_data
    from duoka.errors import DoesNotFit, typed
    from duoka.plan.picture import verdict_lines

    load_config(file, checks=(check_data,))
    plan = plan_of(file, None if on == "here" else on)
    click.echo("\n".join(verdict_lines(plan)))
    click.echo(f"why:    duoka plan {typed(file)}" + ("" if on == "here" else f' --on "{on}"'))
    if plan.verdict == "does not fit":
        return DoesNotFit.exit_code
    click.echo(f"next:   duoka train {typed(file)}")
    return 0
