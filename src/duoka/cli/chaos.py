"""`duoka chaos`: before a long job, see on this machine what a run of it survives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from duoka.errors import DoctorError

if TYPE_CHECKING:
    from duoka.cluster.chaos import Outcome
    from duoka.config.loaded import Loaded

_SECOND_START = 1.7  # most trials start twice, the second time from a checkpoint


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
    without faults. Your own runs are not touched. Exit code 3 when a trial was lost.
    """
    from duoka.cluster.chaos import choose_trials

    trials = choose_trials(only)
    if list_only:
        click.echo("\n".join(f"  {trial.name:<14} {trial.what}" for trial in trials))
        return 0
    return _run(config, overrides, nproc, only, keep)


def _run(config: str, overrides: tuple[str, ...], nproc: int | None, only: str, keep: bool) -> int:
    import shutil
    import time
    from dataclasses import replace

    from duoka.cli.prepare import load_checked
    from duoka.cluster import chaos
    from duoka.cluster.launch import count_processes
    from duoka.cluster.run_lock import find_run_folder
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
    short = (*overrides, *_shortened(loaded))

    def stage(name: str) -> chaos.TrialRun:
        return chaos.TrialRun(config, short, num_processes, RunFolder(scratch / name), scratch / f"{name}.log")

    trials, outcomes = chaos.choose_trials(only), []
    many = f"{num_processes} process{'es' if num_processes > 1 else ''}"
    click.echo(f"{chaos.NUM_STEPS} steps on {many} in {scratch}, first without a fault, then {len(trials)} faults")
    try:
        calm, started = stage("reference"), time.monotonic()
        try:
            reference = chaos.run_reference(calm)
        except chaos.Lost as error:
            said = f"the run fails without an injected fault: {error}"
            raise WorkerFailed(said, fix=f"see {calm.log}; and delete {scratch}") from None
        calm_s, hang_after_s = time.monotonic() - started, chaos.patience_for(calm.run)
        about = _SECOND_START * calm_s * len(trials)
        click.echo(f"  without a fault: {format_seconds(calm_s)}; the trials take about {format_seconds(about)}")
        for trial in trials:
            own_stage = replace(stage(trial.name), hang_after_s=hang_after_s)
            outcome = chaos.run_trial(trial, own_stage, reference, same_bits=machine.device == "cpu")
            outcomes.append(outcome)
            click.echo("\n".join(_row(outcome)))
            if not outcome.lost and not keep:
                chaos.clear(own_stage)
    except (KeyboardInterrupt, click.Abort):
        if not keep and not any(outcome.lost for outcome in outcomes):
            shutil.rmtree(scratch, ignore_errors=True)
        raise
    lost = [outcome for outcome in outcomes if outcome.lost]
    same = "in the same weights, bit for bit" if machine.device == "cpu" else "(weights of GPUs are not compared)"
    click.echo(f"{len(outcomes) - len(lost)} of {len(outcomes)} survived {same}")
    if lost:
        click.echo(f"runs and logs of what was lost: {scratch}")
        return DoctorError.exit_code
    if not keep:
        shutil.rmtree(scratch, ignore_errors=True)
    return 0


def _shortened(loaded: Loaded) -> tuple[str, ...]:
    """The same run, of a dozen steps with saves between them, as long as its data are small."""
    from duoka.cluster.chaos import NUM_STEPS, SAVE_EVERY

    # A few steps an epoch are enough for the trials; how often the data come round changes nothing for them.
    often = () if loaded.config.stage.kind.reads_text else ("train.epochs=10000",)
    # In steps or tokens it is made for a whole run, and may be longer than this one.
    warm = loaded.config.optim.warmup
    warmup = ("optim.warmup=0.5",) if isinstance(warm, str) or warm >= 1 else ()
    return (
        *often, *warmup, f"train.max_steps={NUM_STEPS}", f"checkpoint.every={SAVE_EVERY}", "checkpoint.keep=2",
        "checkpoint.resume=auto", "log.every=1",
    )  # fmt: skip


def _row(outcome: Outcome) -> list[str]:
    from duoka.units import format_seconds

    trial, mark = outcome.trial, "LOST    " if outcome.lost else "survived"
    took = format_seconds(outcome.seconds)
    lines = [f"  {mark}  {trial.name:<14} {outcome.seen:<16} {took:>9}  {trial.what}"]
    return [*lines, f"            {outcome.lost}"] if outcome.lost else lines
