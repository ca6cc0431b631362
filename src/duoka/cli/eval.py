"""`duoka eval RUN|MODEL`: loss, perplexity and token accuracy, exact on any number of processes."""

from __future__ import annotations

import json
from typing import Any

import click


@click.command("eval")
@click.argument("target", metavar="RUN|MODEL")
@click.option("--data", "names", multiple=True, metavar="NAME", help="Measure on this set or file; may be repeated.")
@click.option("--nproc", type=click.IntRange(min=1), metavar="N", help="Processes; default: one, or one per GPU.")
@click.option("--base", is_flag=True, help="Measure the model as it was before training.")
@click.option("--checkpoint", type=int, metavar="STEP", help="Measure the run as it was after this step.")
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON.")
def command(
    target: str, names: tuple[str, ...], nproc: int | None, base: bool, checkpoint: int | None, as_json: bool
) -> int:
    """Measure a run on the data that it kept aside, or on any data.

    The loss is the mean over all target tokens, each sample counted once, whatever the number of processes.
    """
    from duoka.cli.chat import say
    from duoka.parallel.environ import read_rank_environment
    from duoka.parallel.lifeline import parent_pid
    from duoka.serve.trained import find_trained

    place = read_rank_environment()
    # Notes are said once: by whoever the user started, or by rank 0 under somebody else's launcher.
    quiet = as_json or (place is not None and (place.rank > 0 or parent_pid() is not None))
    speak = _silence if quiet else say
    trained = find_trained(target, step=checkpoint, say=speak)
    if place is None:
        num_processes = _count_processes(nproc)
        if num_processes > 1:
            from duoka.cli.worlds import run_same_command

            _read_data(trained, names, speak)  # once, before there are ranks that would wait for it
            options = [*(f"--data={name}" for name in names), *(["--base"] if base else [])]
            options += [f"--checkpoint={checkpoint}"] if checkpoint is not None else []
            return run_same_command(["eval", target, *options, *(["--json"] if as_json else [])], num_processes)
    from duoka.serve.evaluate import evaluate

    found = evaluate(trained, _read_data(trained, names, speak), base_only=base)
    if found is not None:
        click.echo(json.dumps(found.to_json(), ensure_ascii=False) if as_json else "\n".join(found.lines()))
    return 0


def _read_data(trained: Any, names: tuple[str, ...], say: Any) -> Any:
    from duoka.serve.evaluate import read_eval_data

    return read_eval_data(trained, names, say=say)


def _silence(text: str) -> None:
    """Another process says it."""


def _count_processes(asked: int | None) -> int:
    from duoka.cluster.launch import count_processes
    from duoka.plan.hardware import read_machine

    return count_processes(asked, len(read_machine().gpus))
