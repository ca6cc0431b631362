"""`duoka launch`: a user's own script on N processes, with the same supervision that training has."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click


@click.command(
    "launch",
    help="Run SCRIPT on N processes of this machine, with RANK, WORLD_SIZE, MASTER_ADDR, ... set for "
    "torch.distributed. What follows SCRIPT is the script's own.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("--nproc", type=int, help="Processes; default: one per GPU, on a CPU one.")
@click.option("--port", type=int, default=None, help="Port of the rendezvous; default: a free one.")
@click.option("--restarts", type=click.IntRange(0), default=0, help="Start again up to N times after a crash.")
@click.option("--output", help="Folder for logs and status; default: runs/SCRIPT-DATE-TIME.")
@click.option("--grace", type=float, default=60.0, show_default=True, help="Seconds from a request to stop to an end.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module's name, as in python -m.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS]...")
def command(
    nproc: int | None,
    port: int | None,
    restarts: int,
    output: str | None,
    grace: float,
    module: bool,
    script: str,
    arguments: tuple[str, ...],
) -> int:
    from duoka.cli.outcome import print_verdict
    from duoka.cluster.launch import check_port, count_processes
    from duoka.cluster.launcher import Spec
    from duoka.cluster.restart import LocalLauncher
    from duoka.cluster.run_lock import hold_run
    from duoka.errors import ConfigError
    from duoka.plan.hardware import read_machine
    from duoka.runs.folder import RunFolder

    path = Path(script)
    if not module and not path.is_file():
        raise ConfigError(f"there is no script {script}", fix="write for example: duoka launch --nproc 2 train.py")
    num_processes = count_processes(nproc, len(read_machine().gpus))
    if port is not None:
        check_port(port)
    run = RunFolder(
        Path(output or f"runs/{script.rpartition('.')[2] if module else path.stem}-{time.strftime('%Y%m%d-%H%M%S')}")
    )
    if run.exists():
        raise ConfigError(f"{run.path} holds a training run", fix="write another --output for the script's logs")
    program = ("-m", script) if module else (script,)
    spec = Spec(
        (sys.executable, *program, *arguments),
        num_processes,
        run,
        restarts=restarts,
        resumes=False,
        stop_within_s=grace,
    )
    with hold_run(run):
        verdict = LocalLauncher(port or 0).start(spec, lambda text: click.echo(text, err=True))
    print_verdict(verdict)
    return verdict.exit_code
