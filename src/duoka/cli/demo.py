"""`duoka demo`: one real run from end to end, with duoka's own commands, each printed as you would type it.

Asks a 135M chat model who it is, fine-tunes it on two processes, measures, merges and exports it, and asks again.
Writes to runs/demo (or demo-2, ... when an earlier demo is there); nothing is overwritten. Takes minutes.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path

import click

from duoka.process.child import run_to_end

QUESTIONS = ("Who are you?", "你是谁？")
NAMES = ("duoka", "多卡")
CONFIG = Path(__file__).with_suffix(".yaml")  # what is trained: written beside the run, to read and to change


@click.command(
    "demo",
    help="Fine-tune a real 135M chat model, ask it before and after, export it (5 minutes on 2 cores).\n\n"
    "Writes to runs/demo in the current folder; an earlier demo stays.",
)
@click.option("--nproc", type=click.IntRange(min=1), help="Processes; default: one per GPU, or 2 without.")
def command(nproc: int | None) -> int:
    from duoka.plan.hardware import read_machine
    from duoka.units import format_seconds

    started = time.monotonic()
    run = free_folder(Path("runs"))
    merged = run.with_name(f"{run.name}-model")
    num_processes = nproc or len(read_machine().gpus) or 2

    title(1, "Before: who does the model think it is?")
    before = ask("demo")
    config = write_config(run)
    title(2, f"Training: LoRA on {num_processes} process{'es' if num_processes > 1 else ''}, from {config}")
    duoka("train", str(config), f"output={run}", "--nproc", str(num_processes))
    title(3, "Measuring: the conversations that it has never seen, before and after")
    untrained = measure(run, num_processes, "--base")
    trained = measure(run, num_processes)
    title(4, "Exporting: base and adapter become one plain transformers folder")
    duoka("export", str(run), "-o", str(merged))
    title(5, "After: the same questions, asked of the exported folder")
    after = ask(str(merged))

    summary(before, after, untrained, trained)
    click.echo(f"The whole demo took {format_seconds(time.monotonic() - started)}. What to do next:")
    next_steps(run, config, merged)
    if named(before) or not named(after):
        what = "That is not what should happen: before, no answer names duoka; after, each does."
        click.secho(what, fg="red", bold=True)
        return 1
    return 0


def free_folder(folder: Path) -> Path:
    """runs/demo, or the first of demo-2, demo-3, ... of which nothing is there yet."""
    number = 1
    while True:
        run = folder / ("demo" if number == 1 else f"demo-{number}")
        if not any(path.exists() for path in (run, run.with_suffix(".yaml"), run.with_name(f"{run.name}-model"))):
            return run
        number += 1


def write_config(run: Path) -> Path:
    """The demo's YAML, beside the run's folder. An installed package is no place to read or change files."""
    from duoka.errors import StorageError

    config = run.with_suffix(".yaml")
    try:
        run.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(CONFIG.read_text(encoding="utf-8"), encoding="utf-8")
    except OSError as error:
        fix = "run the demo in a folder that you may write to"
        raise StorageError(f"cannot write {config}: {error.strerror}", fix=fix) from None
    return config


def title(number: int, text: str) -> None:
    click.echo()
    click.secho(f"{number}/5  {text}", fg="cyan", bold=True)


def duoka(*arguments: str, questions: tuple[str, ...] = (), read: bool = False) -> str:
    """Run one command of duoka; with `questions`, they are piped in; with `read`, its output is returned."""
    shown = shlex.join(["duoka", *arguments])
    if questions:
        shown = "printf '%s\\n' " + shlex.join(questions) + " | " + shown
    click.secho(f"$ {shown}", dim=True)
    sys.stdout.flush()
    told = "".join(f"{question}\n" for question in questions) if questions else None
    done = run_to_end([sys.executable, "-m", "duoka", *arguments], told=told, read=read, read_errors=False)
    if done.returncode != 0:
        what = f"duoka {arguments[0]} ended with exit code {done.returncode}; the demo ends here."
        click.secho(what, fg="red", bold=True)
        raise SystemExit(done.returncode)
    return done.stdout if read else ""


def ask(target: str) -> dict[str, str]:
    """The model's greedy answers to the questions."""
    from duoka.runs.folder import json_lines

    output = duoka("chat", target, "--max-new-tokens", "64", "--json", questions=QUESTIONS, read=True)
    answers = {row["prompt"]: row["answer"].strip() for row in json_lines(output)}
    for question, answer in answers.items():
        click.echo(f"  {click.style(question, bold=True)}  {answer}")
    return answers


def named(answers: dict[str, str]) -> bool:
    return all(any(name in answer for name in NAMES) for answer in answers.values())


def measure(run: Path, num_processes: int, *options: str) -> dict[str, float]:
    output = duoka("eval", str(run), "--nproc", str(num_processes), "--json", *options, read=True)
    found: dict[str, float] = json.loads(output.splitlines()[-1])
    click.echo(
        f"  loss {found['loss']:.3f}, perplexity {found['perplexity']:.1f}, token accuracy {found['accuracy']:.1%} "
        f"over {found['num_samples']} conversations"
    )
    return found


def summary(
    before: dict[str, str], after: dict[str, str], untrained: dict[str, float], trained: dict[str, float]
) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="\nThe same question, before and after", title_justify="left", show_lines=True)
    for heading in ("", "before", "after"):
        table.add_column(heading, overflow="fold")
    for question in QUESTIONS:
        table.add_row(question, before[question], after[question])
    table.add_row("loss on unseen conversations", f"{untrained['loss']:.3f}", f"{trained['loss']:.3f}")
    table.add_row("token accuracy", f"{untrained['accuracy']:.1%}", f"{trained['accuracy']:.1%}")
    Console(highlight=False, markup=False).print(table)


def next_steps(run: Path, config: Path, merged: Path) -> None:
    from duoka.errors import typed

    steps = {
        f"duoka chat {typed(run)}": "talk with it",
        f"duoka report {typed(run)}": "the run's page: curve, numbers, config",
        f"ls {typed(merged)}": "the merged model: config, safetensors, tokenizer; opens in transformers and vLLM",
        f"less {typed(config)}": "what was trained, with comments: change it, and   duoka train",
        "duoka new mine.yaml": "a config for your own data, by five questions",
    }
    width = max(map(len, steps))
    for line, what in steps.items():
        click.echo(f"  {line:<{width}}  {click.style(what, dim=True)}")
