"""`duoka completion [SHELL]`: the script that teaches a shell to complete duoka's commands and options."""

from __future__ import annotations

import os
from pathlib import Path

import click

_SHELLS = ("bash", "zsh", "fish")


@click.command(
    "completion",
    help="Print the completion script of SHELL (default: yours).\n\n"
    'For bash and zsh, put   eval "$(duoka completion)"   into ~/.bashrc or ~/.zshrc; '
    "for fish, write the script to ~/.config/fish/completions/duoka.fish.",
)
@click.argument("shell", type=click.Choice(_SHELLS), required=False)
def command(shell: str | None) -> None:
    from click.shell_completion import get_completion_class

    from duoka.cli import COMPLETE_VAR, cli

    mine = Path(os.environ.get("SHELL", "")).name
    chosen = shell or (mine if mine in _SHELLS else "bash")
    kind = get_completion_class(chosen)
    assert kind is not None
    click.echo(kind(cli, {}, "duoka", COMPLETE_VAR).source())
