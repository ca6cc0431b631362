"""`--nproc auto`: as many processes as the plan finds fastest on this machine, and the hint where nobody asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from duoka.plan.processes import Processes

AUTO = "auto"


def nproc(value: str) -> int | str:
    """A number of processes, or `auto`."""
    if value == AUTO:
        return AUTO
    try:
        return int(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is neither a number of processes nor {AUTO}") from None


def choose_here(config: str, overrides: tuple[str, ...]) -> Processes:
    """The number for CONFIG on this machine, and why."""
    from duoka.cli.model_facts import read_model_shape
    from duoka.config.load import load_config
    from duoka.data.dataset_lengths import find_lengths
    from duoka.plan.catalog import read_hardware
    from duoka.plan.hardware import read_machine
    from duoka.plan.processes import choose_processes

    loaded = load_config(config, overrides)
    shape = read_model_shape(loaded.config.model, loaded.base)
    lengths = find_lengths(loaded.config, loaded.base)
    return choose_processes(loaded.config, shape, read_machine(), lengths, read_hardware())


def resolve(asked: int | str | None, config: str | None, overrides: tuple[str, ...]) -> int | None:
    """`asked` with the plan's number in place of `auto`, which is said on stderr."""
    if asked is None or isinstance(asked, int):
        return asked
    if config is None:
        raise click.UsageError("--nproc auto is about a run: name a CONFIG, or write a number")
    found = choose_here(config, overrides)
    click.echo(f"note: --nproc auto: {found.why}", err=True)
    return found.count


def hint(config: str, overrides: tuple[str, ...], num_processes: int) -> str:
    """What another number would bring on a CPU whose speed was measured; empty where nothing is to be said."""
    from duoka.errors import DuokaError
    from duoka.plan.catalog import read_hardware

    try:
        if read_hardware() is None:
            return ""
        found = choose_here(config, overrides)
    except DuokaError:  # said where the run itself meets it
        return ""
    return "" if found.count == num_processes else f"--nproc {found.count} would be faster here: {found.why}"
