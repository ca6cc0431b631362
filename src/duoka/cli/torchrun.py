"""`duoka torchrun ...`: a guide's torchrun line, said and done in duoka's own words."""

from __future__ import annotations

import click

_WORDS = {"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": ["--help"]}


@click.command("torchrun", context_settings=_WORDS)
@click.argument("line", nargs=-1, type=click.UNPROCESSED, metavar="[FLAGS]... SCRIPT [ARGUMENTS]...")
def command(line: tuple[str, ...]) -> int:
    """Read a line that was written for torchrun: its flags with _ or -, then a script and its arguments.

    A script that is there runs under duoka launch. src/train.py --config x.yaml of a guide, or -m duoka train x.yaml,
    is duoka train x.yaml.
    """
    from duoka.cli.lines import meaning_of_torchrun

    return follow(meaning_of_torchrun(line))


def follow(meaning: object) -> int:
    """Say what a line means, and do that."""
    import os
    import shlex

    from duoka.cli import cli
    from duoka.cli.lines import Meaning

    assert isinstance(meaning, Meaning)
    for note in meaning.notes:
        click.echo(f"note: {note}", err=True)
    env = " ".join(f"{name}={shlex.quote(value)}" for name, value in meaning.env.items())
    click.echo(f"means:   {env}{' ' if env else ''}duoka {shlex.join(meaning.words)}", err=True)
    os.environ.update(meaning.env)
    return int(cli.main(args=list(meaning.words), prog_name="duoka", standalone_mode=False) or 0)
