"""`duoka serve RUN|MODEL`: OpenAI's HTTP API and a chat page."""

from __future__ import annotations

import os

import click

from duoka.cli import options


@click.command("serve")
@click.argument("target", metavar="RUN|MODEL")
@click.option(
    "--adapter", "named", multiple=True, metavar="NAME=RUN", help="Another adapter on the same base; repeatable."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen at.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any that is free.")
@click.option(
    "--api-key", metavar="KEY", help="What clients have to send; default: DUOKA_API_KEY, or one that is drawn."
)
@click.option("--slots", type=click.IntRange(1, 256), default=8, show_default=True, help="Answers at once.")
@click.option("--max-waiting", type=click.IntRange(1), default=64, show_default=True, help="More get 429.")
@click.option(
    "--cache-gib",
    type=click.FloatRange(min=0, min_open=True),
    help="For keys and values; default: half of what is free.",
)
@click.option("--checkpoint", type=int, metavar="STEP", help="The run as it was after this step.")
@options.precision
def command(
    target: str,
    named: tuple[str, ...],
    host: str,
    port: int,
    api_key: str | None,
    slots: int,
    max_waiting: int,
    cache_gib: float | None,
    checkpoint: int | None,
    precision: str,
) -> None:
    """Serve a run, a model or adapters by the HTTP API that OpenAI's clients speak, with a chat page at /.

    The adapter of a run answers by the run's name, its base by its own. Answers do not depend on who else is answered:
    a seed gives the same text alone and under load.
    """
    from duoka.cli.chat import say
    from duoka.errors import ConfigError
    from duoka.process.allocator import FEW_PRIMITIVES
    from duoka.process.lifeline import leave_with_starter

    os.environ.update({**FEW_PRIMITIVES, **os.environ})  # before torch computes
    from duoka.serve.api.start import Settings, build_service, describe_server, open_server, run_server
    from duoka.serve.load_run import find_trained

    leave_with_starter()
    key = (api_key or os.environ.get("DUOKA_API_KEY", "")).strip()  # a secret's file often ends in a newline
    if not (key.isascii() and key.isprintable()):
        raise ConfigError("the key holds letters that clients cannot send", fix="a key of letters, digits, - and _")
    adapters = {}
    for one in named:
        name, mark, run = one.partition("=")
        if not (name and mark and run) or name in adapters:
            raise ConfigError(f"--adapter is {one!r}", fix="write --adapter NAME=RUN, each name once")
        adapters[name] = find_trained(run, say=say)
    trained = find_trained(target, step=checkpoint, say=say)
    settings = Settings(host, port, key, slots, max_waiting, int((cache_gib or 0) * (1 << 30)), precision)
    service = build_service(trained, adapters, settings)
    server = open_server(service, settings)
    for line in describe_server(server, settings, service.scheduler.max_tokens):
        click.echo(line)
    run_server(server)
