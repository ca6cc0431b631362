"""`duoka board [FOLDER]`: a page of all runs, served on this machine; with --control it acts."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from duoka.cli.act import Acts

_PORT = 8321


@click.command("board")
@click.argument("folder", default="runs")
@click.option("--port", type=click.IntRange(0, 65535), default=_PORT, show_default=True, help="0: any free one.")
@click.option("--control", is_flag=True, help="Let the page start and stop runs, export, and chat.")
def command(folder: str, port: int, control: bool) -> None:
    """Show all runs of FOLDER (default: runs) as a page in the browser, live.

    Served on 127.0.0.1 only, to who has the address with its token. From another machine:
    ssh -L 8321:127.0.0.1:8321 HOST, and open the same address there.
    """
    from duoka.errors import ConfigError
    from duoka.watch.board import Board
    from duoka.watch.server import BoardServer

    path = Path(folder)
    if not path.is_dir() and folder != "runs":
        raise ConfigError(f"there is no folder {folder}", fix="name the folder that holds your runs")
    board = Board(path)
    acts = _acts() if control else None
    try:
        server = BoardServer(board, port, control=acts)
    except OSError as error:
        if port != _PORT:
            raise ConfigError(f"port {port} cannot be used: {error.strerror}", fix="choose another --port") from None
        server = BoardServer(board, 0, control=acts)  # another board has it
    click.echo(f"runs in {path.resolve()}: {server.address}")
    click.echo(f"from elsewhere:   ssh -L {server.port}:127.0.0.1:{server.port} THIS-MACHINE   and open it there")
    if control:
        click.echo("who opens this address may start commands here as you: runs, exports, a chat (--control)")
    try:
        with contextlib.suppress(KeyboardInterrupt), server:
            server.serve_forever(poll_interval=0.5)
    finally:
        if acts is not None:
            acts.close()


def _acts() -> Acts:
    from duoka.cli.act import Acts

    return Acts()
