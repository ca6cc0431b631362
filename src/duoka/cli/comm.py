"""`duoka comm test`: do the collectives of this world work, and how fast are they?"""

from __future__ import annotations

import json

import click


@click.group("comm", help="Test communication between processes.")
def command() -> None:
    pass


@command.command("test")
@click.option("--nproc", type=click.IntRange(min=2), metavar="N", help="Processes; default: one per GPU, at least 2.")
@click.option("--size", default="16 MiB", show_default=True, help="Bytes of the whole buffer, such as 64 MiB.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=1), help="How often each is timed.")
@click.option("--backend", type=click.Choice(["auto", "gloo", "nccl"]), default="auto", show_default=True)
@click.option("--timeout", default="1min", show_default=True, help="A collective that takes longer has failed.")
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON.")
def test(nproc: int | None, size: str, rounds: int, backend: str, timeout: str, as_json: bool) -> int:
    """Run every collective, check its values, and print bytes, time and bus bandwidth.

    Starts its own processes here; in a world that torchrun, srun or mpirun started (also over several machines), it
    tests that world.
    """
    from duoka.cli.worlds import find_part, run_same_command

    part = find_part(nproc)
    buffer_bytes = _parse_size(size)
    if part.place is None:
        from duoka.cluster.launch import count_processes
        from duoka.plan.hardware import read_machine

        num_gpus = len(read_machine().gpus)
        if backend == "nccl" or (backend == "auto" and num_gpus):
            num_processes = count_processes(nproc, num_gpus)
        else:
            num_processes = nproc or (1 if part.node else 2)
        options = [f"--size={size}", f"--rounds={rounds}", f"--backend={backend}", f"--timeout={timeout}"]
        return run_same_command(["comm", "test", *options, *(["--json"] if as_json else [])], num_processes, part)
    from duoka.bench.collectives import check_collectives
    from duoka.comm.world import end_world, start_world
    from duoka.config.schema import ParallelConfig

    world = start_world(ParallelConfig(strategy="ddp", backend=backend, timeout=timeout))
    if world.size == 1:
        from duoka.errors import ConfigError

        raise ConfigError("one process has no other to communicate with", fix="write for example: --nproc 2")
    try:
        report = check_collectives(world, buffer_bytes, rounds)
    finally:
        end_world(world)
    if world.is_main:
        click.echo(json.dumps(report.to_json()) if as_json else "\n".join(report.lines()))
    return 0


def _parse_size(text: str) -> int:
    from duoka.errors import ConfigError
    from duoka.units import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"--size is {error}") from None
