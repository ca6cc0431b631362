"""`duoka bench`: measure this machine once, so that plans for it stand on figures instead of guesses (`hardware`), or a
config at several numbers of processes and strategies (`run`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from duoka.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from duoka.bench.hardware import HardwareBench
    from duoka.plan.hardware import Machine

_SMALL, _LARGE = "64 KiB", "16 MiB"
_LIMIT_S = 120


@click.group("bench", help="Measure what plans are made of.")
def command() -> None:
    pass


@command.command("hardware")
@click.option(
    "--nproc", type=click.IntRange(min=1), metavar="N", help="Processes that exchange; default: one per GPU, or 2."
)
@click.option("--output", type=click.Path(dir_okay=False), help="Where to write; default: where duoka plan looks.")
@click.option(
    "--disk",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="FOLDER",
    default=Path(),
    help="Whose disk is measured: that of parallel.offload's folder, or of runs; default: this folder.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def hardware(nproc: int | None, output: str | None, disk: Path, as_json: bool) -> int:
    """Matrix products, attention, memory and disk bandwidth and all-reduces of this machine, written to hardware.json.

    Takes about a minute. Let nothing else run beside it.
    """
    from duoka.bench.hardware import measure_device, measure_disk, measure_offload
    from duoka.comm.world import pick_device
    from duoka.plan.catalog import hardware_file
    from duoka.plan.hardware import read_machine
    from duoka.runs.folder import write_asked

    def say(text: str) -> None:
        if not as_json:
            click.echo(text)

    machine = read_machine()
    _use_all_cores(machine)
    found = measure_device(pick_device(0), say=say)
    ranks = nproc or len(machine.gpus) or min(2, machine.num_cores)
    facts = _facts(machine, found) | _disk(disk.resolve(), measure_disk, measure_offload, say)
    link = _link(ranks, say) if ranks > 1 else {}
    facts |= link
    if link:
        speed, latency = facts["link_bytes_per_s"], facts["link_latency_s"]
        say(f"all-reduce among {ranks}: {speed / 1e9:.3g} GB/s, {latency * 1e6:.0f} us before the first byte")
    path = Path(output) if output else hardware_file()
    facts |= _between_machines(path, facts["device"])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_asked(path, json.dumps(facts, indent=2) + "\n")
    click.echo(json.dumps(facts, indent=2) if as_json else f"written to {path}: duoka plan uses it on this machine")
    return 0


def _between_machines(path: Path, device: str) -> dict[str, Any]:
    """What was written there by hand: one machine cannot measure it."""
    from duoka.errors import ConfigError
    from duoka.plan.catalog import read_hardware

    try:
        before = read_hardware(path) or {}
    except ConfigError:  # damaged: that is why it is measured again
        return {}
    return {
        key: value for key, value in before.items() if key.startswith("network_") and before.get("device") == device
    }


def _use_all_cores(machine: Machine) -> None:
    import torch

    if not machine.gpus:
        torch.set_num_threads(machine.num_cores)


def _facts(machine: Machine, found: HardwareBench) -> dict[str, Any]:
    from duoka.plan.catalog import hardware_key

    return {
        "device": hardware_key(machine),
        "fp32_flops": found.best("fp32"),
        "half_flops": found.best("bf16"),
        "memory_bytes_per_s": found.memory_bytes_per_s,
        "threads_share": found.threads_share,
        "fp32_attention": found.attention.get("fp32"),
        "half_attention": found.attention.get("bf16"),
        "half_trained": found.layer.get("trained"),
        "half_frozen": found.layer.get("frozen"),
        "products": [vars(one) for one in found.products],
    }


def _disk(
    folder: Path, measure: Callable[[Path], float], measure_offload: Callable[[Path], float], say: Callable[[str], None]
) -> dict[str, float]:
    try:
        speed, slices = measure(folder), measure_offload(folder)
    except (OSError, StorageError) as error:
        why = error.what if isinstance(error, StorageError) else error.strerror or error
        say(f"the disk was not measured, plans keep their guess: {why}")
        return {}
    say(f"disk: {speed / 1e9:.3g} GB/s written in {folder}")
    say(f"disk: {slices / 1e9:.3g} GB/s read and written at once, as offload: {{optimizer: disk}} does")
    return {"disk_bytes_per_s": speed, "offload_bytes_per_s": slices}


def _link(num_processes: int, say: Callable[[str], None]) -> dict[str, float]:
    """Two all-reduces tell both: a large one the bytes per second, a small one the seconds before the first byte."""
    small, large = (_all_reduce(num_processes, size, say) for size in (_SMALL, _LARGE))
    if small is None or large is None:
        return {}
    # The plan multiplies by the share of a link that collectives reach; what was measured is after that loss.
    from duoka.plan.traffic import LINK_SHARE

    rounds = 2 * (num_processes - 1)
    return {
        "link_bytes_per_s": large["bus_bytes_per_s"] / LINK_SHARE,
        "link_latency_s": small["seconds"] / rounds,
        "num_processes": num_processes,
    }


def _all_reduce(num_processes: int, size: str, say: Callable[[str], None]) -> dict[str, Any] | None:
    """What `duoka comm test` measures, in a world of its own; None, and a word why, when it cannot."""
    import subprocess
    import sys

    from duoka.process.child import run_to_end

    words = ["comm", "test", "--nproc", str(num_processes), "--size", size, "--rounds", "3", "--json"]
    try:
        done = run_to_end([sys.executable, "-m", "duoka", *words], limit_s=_LIMIT_S)
        done.check_returncode()
        report = json.loads(done.stdout[done.stdout.index("{") :])
        found = [one for one in report["collectives"] if one["name"].replace("_", "-") == "all-reduce"]
        return dict(found[0])
    except subprocess.TimeoutExpired:
        why = f"they took longer than {_LIMIT_S} s"
    except subprocess.CalledProcessError as error:
        why = (error.stderr or "").strip()[-300:] or f"exit code {error.returncode}"
    say(f"collectives were not measured, plans keep their guess: {why}")
    return None


@command.command("run")
@click.argument("config", type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--nproc", default="1,2", show_default=True, metavar="N,N,...", help="Numbers of processes.")
@click.option(
    "--strategies",
    default="auto",
    show_default=True,
    metavar="NAME,...",
    help="With several processes, such as ddp,fsdp.",
)
@click.option("--batches", default="", metavar="N,N,...", help="Samples a step; default: what CONFIG says.")
@click.option("--steps", type=click.IntRange(min=1), default=3, show_default=True, help="Steps to measure, of each.")
@click.option("--svg", type=click.Path(dir_okay=False), help="Write the speeds as a picture, too.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
def run(
    config: str, overrides: tuple[str, ...], nproc: str, strategies: str, batches: str, steps: int, svg: str | None,
    as_json: bool,
) -> int:  # fmt: skip
    """Speed, memory and bytes of CONFIG's steps at several numbers of processes, strategies, batches, beside the plan.

    Efficiency is the speed divided by that of one process at the same batch, times as many processes; below 85% a line
    says why. A case that does not run or does not fit is a row too. Nothing of a run is written. Let nothing else run
    beside it.
    """
    from dataclasses import asdict

    from duoka.cli.bench_runs import chart, measure, table
    from duoka.plan.hardware import read_machine
    from duoka.runs.folder import write_asked

    machine = read_machine()
    names = [name.strip() for name in strategies.split(",") if name.strip()]
    cases = measure(
        config, overrides, _counts("--nproc", nproc), names or ["auto"], steps, _counts("--batches", batches)
    )
    if svg is not None:
        write_asked(Path(svg), chart(cases))
    rows = [asdict(case) for case in cases]
    lines = table(cases, machine.num_cores, len(machine.gpus))
    click.echo(json.dumps(rows, indent=2) if as_json else "\n".join(lines))
    return 0 if any(case.step_s for case in cases) else cases[0].exit_code


def _counts(flag: str, text: str) -> list[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if (flag == "--nproc" and not words) or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise click.UsageError(f"{flag} is {text!r}: write whole numbers, such as   {flag} 1,2,4")
    return [int(word) for word in words]
