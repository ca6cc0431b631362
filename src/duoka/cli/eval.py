"""`duoka eval RUN|MODEL`: loss, perplexity and token accuracy, or tasks, exact on any number of processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from duoka.cli import options

if TYPE_CHECKING:
    from duoka.config.foreign_task import AskedFile
    from duoka.config.schema import DataConfig
    from duoka.serve.evaluate import EvalData
    from duoka.serve.load_run import Trained


@click.command("eval")
@click.argument("target", metavar="RUN|MODEL|FILE")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--data", "names", multiple=True, metavar="NAME", help="Measure on this set or file; may be repeated.")
@click.option("--nproc", type=click.IntRange(min=1), metavar="N", help="Processes; default: one, or one per GPU.")
@click.option("--base", is_flag=True, help="Measure the model as it was before training.")
@click.option("--checkpoint", type=int, metavar="STEP", help="Measure the run as it was after this step.")
@click.option("--tasks", metavar="A,B", help="Score these tasks instead: arithmetic, gsm8k:FOLDER (docs/tasks.md).")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Of each task, N items from all over it.")
@click.option("--batch", type=click.IntRange(min=1), default=16, metavar="N", help="Rows that a process asks at once.")
@click.option("--out", metavar="FOLDER", help="Where every item's answer goes; default: evals in the run's folder.")
@click.option("--run-code", is_flag=True, help="Tasks may run programs that the model wrote.")
@options.precision
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON.")
def command(
    target: str,
    overrides: tuple[str, ...],
    names: tuple[str, ...],
    nproc: int | None,
    base: bool,
    checkpoint: int | None,
    precision: str,
    as_json: bool,
    **task_flags: Any,
) -> int:
    """Measure a run on the data that it kept aside, on any data, or by tasks.

    The loss is the mean over all target tokens, each sample counted once, whatever the number of processes. It is
    computed as training here would compute it, unless --precision says otherwise.
    FILE is a config: its run, or what a LLaMA-Factory file predicts. With predict_with_generate the answers are written
    to its output_dir too.
    """
    from duoka.cli.chat import say
    from duoka.cli.eval_tasks import TaskFlags, score
    from duoka.cli.target import find_target
    from duoka.cli.worlds import find_part, run_same_command

    flags = TaskFlags(**task_flags)
    asked_tasks = flags.read(precision, names)
    part = find_part(nproc)
    place = part.place
    speak = say if part.speaks and not as_json else _silence
    trained, asked = find_target(target, overrides, "eval", checkpoint, speak)
    read = _DataOf(trained, names, None if names else asked, precision, speak)
    num_processes = _count_processes(nproc) if place is None else 1
    if part.starts(num_processes):
        if asked_tasks is None:
            read()  # once, before there are ranks, which would wait for it
        given = [*overrides, *(f"--data={name}" for name in names), *(["--base"] if base else []), *flags.words()]
        given += [f"--checkpoint={checkpoint}"] if checkpoint is not None else []
        given += [f"--precision={precision}", *(["--json"] if as_json else [])]
        return run_same_command(["eval", target, *given], num_processes, part)
    if asked_tasks is not None:
        is_first = place is None or place.rank == 0
        return score(trained, asked_tasks, flags.folder(trained), base=base, as_json=as_json, speaks=is_first)
    if asked is not None and not names and asked.is_on("predict_with_generate"):
        return _predict(trained, asked, read, base, as_json)
    from duoka.serve.evaluate import evaluate

    found = evaluate(trained, read(), base_only=base)
    if found is not None:
        click.echo(json.dumps(found.to_json(), ensure_ascii=False) if as_json else "\n".join(found.lines()))
    return 0


def _predict(trained: Trained, asked: AskedFile, read: Callable[[], EvalData], base: bool, as_json: bool) -> int:
    """The loss over the file's data, its answers, and how near they come; rank 0 writes them."""
    from duoka.cli.chat import ChatOptions, choose_sampling, say
    from duoka.comm.world import end_world, start_world
    from duoka.errors import ConfigError
    from duoka.serve.evaluate import evaluate_in
    from duoka.serve.load_run import load_chat_tokenizer, load_for_chat
    from duoka.serve.predict import ANSWERS, predict, score, write_predictions

    output = asked.get("output_dir")
    if output is None:
        raise ConfigError(f"{asked.path} does not say where answers go", fix="write:   output_dir: saves/predict")
    data = read()
    draws = asked.is_on("do_sample")
    sampling = choose_sampling(
        ChatOptions(temperature=None if draws else 0.0), asked, temperature=0.95, max_new_tokens=1024
    )
    world = start_world(data.config.parallel)
    try:
        speak = say if world.is_main and not as_json else _silence
        found = evaluate_in(world, trained, data, base_only=base)
        speak("answers are the likeliest ones" if sampling.temperature == 0 else f"drawn at {sampling.temperature:g}")
        lm, tokenizer = load_for_chat(trained, base_only=base, device=world.device), load_chat_tokenizer(trained)
        answers = predict(lm, tokenizer, data.config, trained.config_base, sampling, world, speak)
    finally:
        end_world(world)
    if not world.is_main:
        return 0
    scores = score(answers) | {"loss": found.measured.loss, "num_answers": float(len(answers))}
    write_predictions(answers, scores, Path(output))
    if as_json:
        click.echo(json.dumps({**found.to_json(), **scores, "folder": output}, ensure_ascii=False))
        return 0
    shown = "   ".join(f"{name} {scores[name]:.1f}" for name in ("exact", "bleu-4", "rouge-1", "rouge-2", "rouge-l"))
    click.echo("\n".join([*found.lines(), f"  {shown}  (percent)", f"  {len(answers)} answers: {output}/{ANSWERS}"]))
    return 0


@dataclass(frozen=True)
class _DataOf:
    """The data to measure on, tokenized when called."""

    trained: Trained
    names: tuple[str, ...]
    asked: AskedFile | None
    precision: str
    speak: Callable[[str], None]

    @property
    def data(self) -> DataConfig:
        """What the file names, as a block of ours."""
        from duoka.config.schema import DataConfig, DataSource
        from duoka.errors import ConfigError

        assert self.asked is not None
        names = self.asked.names("eval_dataset") or self.asked.names("dataset")
        if not names:
            raise ConfigError(f"{self.asked.path} names no data", fix="write:   eval_dataset: NAME")
        most = self.asked.whole("max_samples")
        folder = str(self.asked.get("dataset_dir", "data")).rstrip("/")
        return DataConfig(
            train=tuple(DataSource(name=name, max_samples=most) for name in names),
            folder=None if folder in ("data", "./data") else folder,
            max_length=self.asked.whole("cutoff_len") or 2048,
        )

    def __call__(self) -> EvalData:
        from duoka.serve.evaluate import read_eval_data

        if self.asked is None:
            return read_eval_data(self.trained, self.names, precision=self.precision, say=self.speak)
        data = self.data
        names = [one.name for one in data.train]
        return read_eval_data(self.trained, names, precision=self.precision, say=self.speak, asked=data)


def _silence(text: str) -> None:
    """No-op: rank 0 prints it."""


def _count_processes(asked: int | None) -> int:
    from duoka.cluster.launch import count_processes
    from duoka.plan.hardware import read_machine

    return count_processes(asked, len(read_machine().gpus))
