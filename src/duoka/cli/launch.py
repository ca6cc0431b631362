"""`duoka launch`: a user's own script on N processes of one or several machines, supervised as training is."""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from duoka.cluster.launcher import Launcher, Spec
    from duoka.cluster.verdict import Verdict
    from duoka.runs.folder import RunFolder


@click.command(
    "launch",
    help="Run SCRIPT on N processes of this machine, with RANK, WORLD_SIZE, MASTER_ADDR, ... set for "
    "torch.distributed. What follows SCRIPT is the script's own. The screen shows what rank 0 prints; what each rank "
    "printed lies in logs/ of the output folder. Several machines: type it on each, with --nodes 2 "
    "--meet HOST:PORT and one --output on a disk that they share, or with NNODES, NODE_RANK, MASTER_ADDR and "
    "MASTER_PORT in front.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("--nproc", type=int, help="Processes on each machine; default: one per GPU, on a CPU one.")
@click.option("--port", type=int, default=None, help="Port of the rendezvous; default: a free one.")
@click.option("--restarts", type=click.IntRange(0), default=0, help="Start again up to N times after a crash.")
@click.option("--nodes", default="", metavar="MIN:MAX", help="Machines, which may leave and come back.")
@click.option("--meet", default="", metavar="HOST:PORT", help="The rendezvous: the address of the machine that stays.")
@click.option("--wait", default="", metavar="TIME", help="How long to wait for machines; default: 30min.")
@click.option("--output", default="", help="Folder for logs and status; default: runs/SCRIPT-DATE-TIME.")
@click.option("--grace", type=float, default=60.0, show_default=True, help="Seconds from a request to stop to an end.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module's name, as in python -m.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS]...")
def command(output: str, grace: float, module: bool, script: str, arguments: tuple[str, ...], **flags: Any) -> int:
    from duoka.cli.outcome import print_verdict
    from duoka.cluster.choose import choose_launcher
    from duoka.cluster.launch import count_processes
    from duoka.cluster.launcher import Spec
    from duoka.cluster.nodes import Flags
    from duoka.errors import ConfigError
    from duoka.plan.hardware import read_machine

    path = Path(script)
    if not module and not path.is_file():
        raise ConfigError(f"there is no script {script}", fix="write for example: duoka launch --nproc 2 train.py")
    if not (flags["nodes"] or flags["meet"]):
        _find_node()
    launcher, restarts = choose_launcher(Flags(**flags))
    for note in launcher.notes:
        click.echo(f"note: {note}", err=True)
    num_processes = count_processes(launcher.num_processes, len(read_machine().gpus))
    launcher.check()
    program = ("-m", script) if module else (script,)
    spec = Spec(
        (sys.executable, *program, *arguments),
        num_processes,
        _logs_folder(output, script.rpartition(".")[2] if module else path.stem, launcher),
        restarts=restarts,
        resumes=False,
        stop_within_s=grace,
        identity={"script": " ".join((*program, *arguments)), "its content": "" if module else _digest(path)},
    )
    verdict = _start(launcher, spec)
    print_verdict(verdict)
    return verdict.exit_code


def _find_node() -> None:
    """Of srun with one task on each node, which node this is: each would start a world of its own."""
    from duoka.errors import ConfigError
    from duoka.process.mpi import mpi_variables
    from duoka.process.slurm import slurm_variables

    found = mpi_variables(os.environ) or slurm_variables(os.environ)
    if "RANK" in found:
        raise ConfigError(
            f"duoka launch starts processes, and this is one of {found['WORLD_SIZE']} that srun or mpirun started",
            fix="start the script itself so:   srun python SCRIPT   or one task on each node:   --ntasks-per-node=1",
        )
    os.environ.update(found)


def _start(launcher: Launcher, spec: Spec) -> Verdict:
    from duoka.cluster.run_lock import hold_run

    def say(text: str) -> None:
        click.echo(text, err=True)

    if not launcher.prepares:  # the folder is shared by the launchers of all machines
        return launcher.start(spec, say)
    with hold_run(spec.run):
        return launcher.start(spec, say)


def _logs_folder(output: str, name: str, launcher: Launcher) -> RunFolder:
    from duoka.cluster.elastic import ComingAndGoing
    from duoka.errors import ConfigError
    from duoka.runs.folder import RunFolder

    if isinstance(launcher, ComingAndGoing) and not output:
        raise ConfigError(
            "machines that find each other need one folder, on a disk that all of them see",
            where="the secret by which they know each other lies in it",
            fix=f"write on all of them, for example:   --output runs/{name}",
        )
    own = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    # Launchers of several machines may share one.
    run = RunFolder(Path(output) if output else new_folder(own) if launcher.prepares else own)
    if run.exists():
        raise ConfigError(f"{run.path} holds a training run", fix="write another --output for the script's logs")
    return run


def new_folder(wanted: Path) -> Path:
    """Made here: of several starts within one second (a sweep's `&`) each gets its own."""
    for number in itertools.count(1):
        path = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError:  # told by who fills it
            pass
        break
    return path


def _digest(script: Path) -> str:
    return hashlib.sha256(script.read_bytes()).hexdigest()
