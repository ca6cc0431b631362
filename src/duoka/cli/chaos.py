"""`duoka chaos`: before a long job, see on this machine what a run of it survives."""

from __future__ import annotations

import click

from duoka.errors import DoctorError


@click.command("chaos")
@click.argument("config", type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--nproc", type=int, help="Processes; default: one per GPU, on a CPU one.")
@click.option("--only", default="", metavar="NAMES", help="Some trials: kill-rank,flip (see --list).")
@click.option("--list", "list_only", is_flag=True, help="Name the trials, start nothing.")
@click.option("--keep", is_flag=True, help="Leave the runs of all trials where they are.")
def command(config: str, overrides: tuple[str, ...], nproc: int | None, only: str, list_only: bool, keep: bool) -> int:
    """Kill, stop, fill and corrupt a short copy of CONFIG's run, and print what survived.

    Each trial trains 12 steps beside the run's output folder, in OUTPUT-chaos, and must end in the weights of a run
    that nobody disturbed. Your own runs are not touched. Exit code 3 when a trial was lost.
    """
    from duoka.cluster.chaos import choose_trials

    trials = choose_trials(only)
    if list_only:
        click.echo("\n".join(f"  {trial.name:<14} {trial.what}" for trial in trials))
        return 0
    return _run(config, overrides, nproc, only, keep)


def _run(config: str, overrides: tuple[str, ...], nproc: int | None, only: str, keep: bool) -> int:
    import shutil
    from pathlib import Path

    from duoka.cli.train import load_checked
    from duoka.cluster.chaos import NUM_STEPS, SAVE_EVERY, Lost, Stage, choose_trials, clear, run_reference, run_trial
    from duoka.cluster.claim import find_run_folder
    from duoka.cluster.launch import count_processes
    from duoka.errors import ConfigError, WorkerFailed
    from duoka.plan.hardware import read_machine
    from duoka.runs.folder import RunFolder
    from duoka.units import format_seconds

    machine = read_machine()
    num_processes = count_processes(nproc, len(machine.gpus))
    loaded = load_checked(config, overrides, machine, num_processes, local_size=num_processes)
    own = find_run_folder(loaded).path
    scratch = own.with_name(f"{own.name}-chaos")
    if scratch.exists():
        raise ConfigError(f"{scratch} is there already", fix=f"delete it, or write:   output={own}-2")
    scratch.mkdir(parents=True)
    short = (
        *overrides, f"train.max_steps={NUM_STEPS}", f"checkpoint.every={SAVE_EVERY}", "checkpoint.keep=2",
        "checkpoint.resume=auto", "log.every=1",
    )  # fmt: skip

    def stage(name: str) -> Stage:
        return Stage(config, short, num_processes, RunFolder(scratch / name), scratch / f"{name}.log")

    click.echo(f"{NUM_STEPS} steps on {num_processes} process{'es' if num_processes > 1 else ''} in {scratch}")
    try:
        reference = run_reference(stage("reference"))
    except Lost as error:
        raise WorkerFailed(f"the run fails without being struck: {error}", fix=f"see {scratch}/reference.log") from None
    outcomes = []
    for trial in choose_trials(only):
        own_stage = stage(trial.name)
        outcome = run_trial(trial, own_stage, reference, same_bits=machine.device == "cpu")
        outcomes.append(outcome)
        mark = "LOST    " if outcome.lost else "survived"
        click.echo(f"  {mark}  {trial.name:<14} {outcome.seen:<16} {format_seconds(outcome.seconds):>9}  {trial.what}")
        if outcome.lost:
            click.echo(f"            {outcome.lost}")
        elif not keep:
            clear(own_stage)
    lost = [outcome for outcome in outcomes if outcome.lost]
    same = "in the same weights, bit for bit" if machine.device == "cpu" else "(weights of GPUs are not compared)"
    click.echo(f"{len(outcomes) - len(lost)} of {len(outcomes)} survived {same}")
    if lost:
        click.echo(f"runs and logs of what was lost: {scratch}")
        return DoctorError.exit_code
    if not keep:
        shutil.rmtree(Path(scratch), ignore_errors=True)
    return 0
