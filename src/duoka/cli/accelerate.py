"""`duoka accelerate launch ...`: a guide's line, said and done in duoka's own words."""

from __future__ import annotations

import click


@click.command(
    "accelerate",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("line", nargs=-1, type=click.UNPROCESSED, metavar="launch [FLAGS]... SCRIPT [ARGUMENTS]...")
def command(line: tuple[str, ...]) -> int:
    """Read a line that was written for accelerate launch; a config file of accelerate config counts too.

    A script that is there runs under duoka launch. src/train.py --config x.yaml of a guide is duoka train x.yaml, with
    what the flags and the config file say about precision and sharding.
    """
    from duoka.cli.lines import meaning_of_accelerate
    from duoka.cli.torchrun import follow

    return follow(meaning_of_accelerate(line))
