"""`make demo`: one real run from end to end, with duoka's own commands, each printed as you would type it.

Asks a 135M chat model who it is, fine-tunes it on two processes, measures, merges and exports it, and asks again.
Writes to runs/demo (or demo-2, ... when an earlier demo is there); nothing is overwritten. Takes minutes.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from duoka.plan.hardware import read_machine
from duoka.units import format_seconds

ROOT = Path(__file__).parent.parent
CONFIG = Path("examples/identity.yaml")
QUESTIONS = ("Who are you?", "你是谁？")
NAMES = ("duoka", "多卡")
console = Console(highlight=False)


def main() -> int:
    started = time.monotonic()
    run = free_folder()
    merged = run.with_name(f"{run.name}-model")
    num_processes = len(read_machine().gpus) or 2

    title(1, "Before: who does the model think it is?")
    before = ask("demo")
    title(2, f"Training: LoRA on {num_processes} process{'es' if num_processes > 1 else ''}, from {CONFIG}")
    duoka("train", str(CONFIG), f"output={run}", "--nproc", str(num_processes))
    title(3, "Measuring: the conversations that it has never seen, before and after")
    untrained = measure(run, num_processes, "--base")
    trained = measure(run, num_processes)
    title(4, "Exporting: base and adapter become one plain transformers folder")
    duoka("export", str(run), "-o", str(merged))
    title(5, "After: the same questions, asked of the exported folder")
    after = ask(str(merged))

    summary(before, after, untrained, trained)
    console.print(f"The whole demo took {format_seconds(time.monotonic() - started)}. What to do next:")
    next_steps(run, merged)
    if named(before) or not named(after):
        console.print("[bold red]That is not what should happen:[/] before, no answer names duoka; after, each does.")
        return 1
    return 0


def free_folder() -> Path:
    """runs/demo, or the first of demo-2, demo-3, ... that is not there yet."""
    number = 1
    while True:
        run = Path("runs") / ("demo" if number == 1 else f"demo-{number}")
        if not run.exists() and not run.with_name(f"{run.name}-model").exists():
            return run
        number += 1


def title(number: int, text: str) -> None:
    console.print(f"\n[bold cyan]{number}/5  {text}[/]")


def duoka(*arguments: str, questions: tuple[str, ...] = (), read: bool = False) -> str:
    """Run one command of duoka; with `questions`, they are piped in; with `read`, its output is returned."""
    shown = shlex.join(["duoka", *arguments])
    if questions:
        shown = "printf '%s\\n' " + shlex.join(questions) + " | " + shown
    console.print(f"[dim]$ {shown}[/]", soft_wrap=True)
    done = subprocess.run(
        [sys.executable, "-m", "duoka", *arguments],
        cwd=ROOT,
        input="".join(f"{question}\n" for question in questions) if questions else None,
        stdout=subprocess.PIPE if read else None,
        text=True,
        encoding="utf-8",
        check=False,
    )
    if done.returncode != 0:
        console.print(f"[bold red]duoka {arguments[0]} ended with exit code {done.returncode}; the demo ends here.[/]")
        raise SystemExit(done.returncode)
    return done.stdout if read else ""


def ask(target: str) -> dict[str, str]:
    """The model's greedy answers to the questions."""
    output = duoka("chat", target, "--max-new-tokens", "64", "--json", questions=QUESTIONS, read=True)
    answers = {row["prompt"]: row["answer"].strip() for row in map(json.loads, output.splitlines())}
    for question, answer in answers.items():
        console.print(f"  [bold]{question}[/]  {answer}", soft_wrap=True)
    return answers


def named(answers: dict[str, str]) -> bool:
    return all(any(name in answer for name in NAMES) for answer in answers.values())


def measure(run: Path, num_processes: int, *options: str) -> dict[str, float]:
    output = duoka("eval", str(run), "--nproc", str(num_processes), "--json", *options, read=True)
    found: dict[str, float] = json.loads(output.splitlines()[-1])
    console.print(
        f"  loss {found['loss']:.3f}, perplexity {found['perplexity']:.1f}, token accuracy {found['accuracy']:.1%} "
        f"over {found['num_samples']} conversations"
    )
    return found


def summary(
    before: dict[str, str], after: dict[str, str], untrained: dict[str, float], trained: dict[str, float]
) -> None:
    table = Table(title="\nThe same question, before and after", title_justify="left", show_lines=True)
    for heading in ("", "before", "after"):
        table.add_column(heading, overflow="fold")
    for question in QUESTIONS:
        table.add_row(question, before[question], after[question])
    table.add_row("loss on unseen conversations", f"{untrained['loss']:.3f}", f"{trained['loss']:.3f}")
    table.add_row("token accuracy", f"{untrained['accuracy']:.1%}", f"{trained['accuracy']:.1%}")
    console.print(table)


def next_steps(run: Path, merged: Path) -> None:
    steps = {
        f"duoka chat {run}": "talk with it",
        f"open {run}/report.html": "the run's report: curve, numbers, config",
        f"tensorboard --logdir {run}/tensorboard": "the same curves in TensorBoard",
        f"ls {merged}": "the merged model: config, safetensors, tokenizer; opens in transformers and vLLM",
        "duoka train examples/own_data.yaml": "the same with your own conversations: own_data.jsonl",
        "duoka init sft.yaml": "a commented config to begin with",
    }
    width = max(map(len, steps))
    for command, what in steps.items():
        console.print(f"  {command:<{width}}  [dim]{what}[/]", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
