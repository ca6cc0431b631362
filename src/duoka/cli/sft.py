"""`duoka sft --source=mid --device-batch-size=8 ...`: a guide's flags for stage sft, as keys of a config.

The table of flags is of the shape of pretrain.py's. The model is the result of the run before; the optimizer is a new
one of its kind, with its rates times --init-lr-frac, falling to 0. Only the assistant's words are learned.
"""

from __future__ import annotations

import click

from duoka.cli.mid import find_run, start_after
from duoka.cli.pretrain import FLAGS as PRETRAIN_FLAGS
from duoka.cli.pretrain import Flag, absolute_folder, offer_flags, settings_of

_SAME = (
    "max-seq-len", "device-batch-size", "num-iterations", "matrix-lr", "embedding-lr", "unembedding-lr", "scalar-lr",
    "weight-decay", "grad-clip", "eval-every", "save-every", "seed", "run", "device-type",
)  # fmt: skip
_BEFORE = {"mid": "mid", "base": "pretrain"}  # --source -> stage of the run before
_LATER = "measure the result:   duoka eval RUN --tasks gsm8k:FOLDER,mmlu:FOLDER"
FLAGS: tuple[Flag, ...] = (
    *(flag for flag in PRETRAIN_FLAGS if flag.name in _SAME),
    Flag("num-epochs", "train.epochs"),
    Flag("target-examples-per-step", "train.global_batch"),
    Flag("eval-steps", note="all of data.eval is measured"),
    Flag("eval-metrics-every", note=_LATER),
    Flag("eval-metrics-max-problems", note=_LATER),
    Flag("dtype", note="train.precision is chosen for the machine", passes_over=("bfloat16",)),
    Flag("model-step", note="the run's result is taken; write   model: FOLDER   for another"),
)
# What the guide's script does where no flag says otherwise.
_THEIRS = {"train.epochs": "1", "train.global_batch": "32", "optim.schedule": "linear", "optim.warmup": "0"}


@click.command("sft")
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
@offer_flags(FLAGS)
@click.option("--from", "before", help="The run before: its model, its rates.")
@click.option("--source", type=click.Choice([*_BEFORE]), default="mid", help="The stage of the run before.")
@click.option("--model-tag", help="The run before, under runs/.")
@click.option("--init-lr-frac", type=float, default=0.02, help="All rates of the run before, times this.")
@click.option("--data", multiple=True, help="Conversations: files, folders, sets, or tasks such as task:spelling.")
@click.option("--nproc", type=int, help="Processes; default: one per GPU, on a CPU one.")
@click.option("--port", type=int, help="Port of the rendezvous; default: a free one.")
@click.option("--restarts", type=click.IntRange(0), default=0, help="Start again up to N times after a crash or hang.")
@click.option("--dry-run", is_flag=True, help="Check everything, print the plan, start nothing.")
def command(
    settings: tuple[str, ...],
    before: str | None,
    source: str,
    model_tag: str | None,
    init_lr_frac: float,
    data: tuple[str, ...],
    nproc: int | None,
    port: int | None,
    restarts: int,
    dry_run: bool,
    **flags: str | None,
) -> int:
    """Train a model on what an assistant says in conversations, by flags: each of them is a key of a config."""
    from duoka.errors import ConfigError

    asked, notes = settings_of({name: value for name, value in flags.items() if value is not None}, FLAGS)
    run = find_run(before or (f"runs/{model_tag}" if model_tag else None), notes, _BEFORE[source])
    if not data and not any(word.startswith("data.train=") for word in settings):
        raise ConfigError(
            "nothing says what to learn: no --data is given, and no data set is fetched",
            fix="write for example:   --data chat.jsonl --data task:spelling",
        )
    return start_after(
        "sft", run, [absolute_folder(name) for name in data], {**_THEIRS, **asked}, settings, notes, init_lr_frac,
        nproc=nproc, port=port, restarts=restarts, dry_run=dry_run,
    )  # fmt: skip
