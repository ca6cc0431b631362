"""`duoka rl --source=sft --num-samples=16 ...`: a guide's flags for stage rl, as keys of a config.

The table of flags is of the shape of pretrain.py's. The model is the result of the run before; the optimizer is a new
one of its kind, with its rates times --init-lr-frac, falling to 0.
"""

from __future__ import annotations

import click

from duoka.cli.mid import find_run, start_after
from duoka.cli.pretrain import FLAGS as PRETRAIN_FLAGS
from duoka.cli.pretrain import Flag, offer_flags, settings_of

_SAME = (
    "matrix-lr", "embedding-lr", "unembedding-lr", "weight-decay", "grad-clip", "save-every", "seed", "run",
    "device-type", "max-seq-len",
)  # fmt: skip
_LATER = "measure the result:   duoka eval RUN --tasks gsm8k:FOLDER"
FLAGS: tuple[Flag, ...] = (
    *(flag for flag in PRETRAIN_FLAGS if flag.name in _SAME),
    Flag("num-epochs", "train.epochs"),
    Flag("num-samples", "rl.samples"),
    Flag("examples-per-step", "train.global_batch"),
    Flag("device-batch-size", "train.micro_batch"),
    Flag("max-new-tokens", "rl.max_new_tokens"),
    Flag("temperature", "rl.temperature"),
    Flag("top-k", "rl.top_k"),
    Flag("num-steps", "train.max_steps"),
    Flag("eval-every", note=_LATER),
    Flag("eval-examples", note=_LATER),
    Flag("dtype", note="train.precision is chosen for the machine", passes_over=("bfloat16",)),
    Flag("model-step", note="the run's result is taken; write   model: FOLDER   for another"),
)
# What the guide's script does where no flag says otherwise. Its --top-k of 50 is taken when it is written alone: what
# is drawn from the likeliest tokens and learned by all of them is learned with the wrong odds.
_THEIRS = {"train.epochs": "1", "train.global_batch": "16", "rl.samples": "16", "rl.max_new_tokens": "256",
           "checkpoint.every": "60", "optim.schedule": "linear", "optim.warmup": "0"}  # fmt: skip


@click.command("rl")
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
@offer_flags(FLAGS)
@click.option("--from", "before", help="The run before: its model, its rates.")
@click.option("--source", help="sft or mid: the stage of the run before, as guides write it.")
@click.option("--model-tag", help="The run before, under runs/.")
@click.option("--init-lr-frac", type=float, default=0.05, help="All rates of the run before, times this.")
@click.option("--data", multiple=True, help="What is asked: tasks such as task:gsm8k:FOLDER or task:arithmetic.")
@click.option("--nproc", type=int, help="Processes; default: one per GPU, on a CPU one.")
@click.option("--port", type=int, help="Port of the rendezvous; default: a free one.")
@click.option("--restarts", type=click.IntRange(0), default=0, help="Start again up to N times after a crash or hang.")
@click.option("--dry-run", is_flag=True, help="Check everything, print the plan, start nothing.")
def command(
    settings: tuple[str, ...],
    before: str | None,
    source: str | None,
    model_tag: str | None,
    init_lr_frac: float,
    data: tuple[str, ...],
    nproc: int | None,
    port: int | None,
    restarts: int,
    dry_run: bool,
    **flags: str | None,
) -> int:
    """Train a model on rewards of answers that it draws, by flags: each of them is a key of a config."""
    from duoka.errors import ConfigError

    if source not in (None, "sft", "mid"):
        raise ConfigError(f"--source is {source}; this stage begins from sft or mid", fix="write:   --from RUN")
    asked, notes = settings_of({name: value for name, value in flags.items() if value is not None}, FLAGS)
    run = find_run(before or (f"runs/{model_tag}" if model_tag else None), notes, source or "sft")
    if not data and not any(word.startswith("data.train=") for word in settings):
        raise ConfigError(
            "nothing says what to ask: no --data is given, and no data set is fetched",
            fix="write for example:   --data task:gsm8k:FOLDER   or   --data task:arithmetic",
        )
    return start_after(
        "rl", run, list(data), {**_THEIRS, **asked}, settings, notes, init_lr_frac,
        nproc=nproc, port=port, restarts=restarts, dry_run=dry_run,
    )  # fmt: skip
