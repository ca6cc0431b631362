"""`duoka mid --run=mid ...`: a guide's flags for the stage between pretraining and SFT, as keys of a config.

The table of flags is of the shape of pretrain.py's. The model is the result of the run before, and the optimizer goes
on with its state and, as far as no flag says otherwise, its rates and batch.
"""

from __future__ import annotations

from pathlib import Path

import click

from duoka.cli.pretrain import FLAGS as PRETRAIN_FLAGS
from duoka.cli.pretrain import Flag, absolute_folder, empty_config, offer_flags, settings_of, start_training

_SAME = (
    "max-seq-len", "device-batch-size", "total-batch-size", "num-iterations", "matrix-lr", "embedding-lr",
    "unembedding-lr", "scalar-lr", "weight-decay", "grad-clip", "warmup-ratio", "warmdown-ratio", "final-lr-frac",
    "eval-every", "save-every", "seed", "run", "device-type", "eval-tokens",
)  # fmt: skip
_RATES = ("lr", "adamw_lr", "embedding_lr", "head_lr")
FLAGS: tuple[Flag, ...] = (
    *(flag for flag in PRETRAIN_FLAGS if flag.name in _SAME),
    Flag("dtype", note="train.precision is chosen for the machine", passes_over=("bfloat16",)),
    Flag("model-step", note="the run's result is taken; write   model: FOLDER   for another"),
)


@click.command("mid")
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
@offer_flags(FLAGS)
@click.option("--from", "before", help="The run before: its model, its optimizer's state, its rates.")
@click.option("--source", help="base: the run before, as guides write it.")
@click.option("--model-tag", help="The run before, under runs/.")
@click.option("--init-lr-frac", type=float, default=1.0, help="All rates of the run before, times this.")
@click.option("--data", multiple=True, help="Conversations: files, folders, sets, or tasks such as task:spelling.")
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
    """Train a model from nothing further, on conversations and tasks, by flags: each of them is a key of a config."""
    from duoka.config.yaml_text import yaml_text
    from duoka.errors import ConfigError

    if source not in (None, "base"):
        raise ConfigError(f"--source is {source}; this stage begins from base", fix="write:   --from RUN")
    asked, notes = settings_of({name: value for name, value in flags.items() if value is not None}, FLAGS)
    run = find_run(before or (f"runs/{model_tag}" if model_tag else None), notes)
    written = {word.partition("=")[0] for word in settings} | set(asked)
    if not data and "data.train" not in written:
        raise ConfigError(
            "nothing says what to learn: no --data is given, and no data set is fetched",
            fix="write for example:   --data chat.jsonl --data task:spelling --data task:arithmetic",
        )
    own = {"stage": "mid", "model": absolute_folder(str(run / "final")), "optim.state": absolute_folder(str(run))}
    own |= {"data.train": yaml_text([absolute_folder(name) for name in data])} if data else {}
    own |= {} if "output" in written else {"output": "runs/mid"}
    own |= slower_rates(run, init_lr_frac, written) if init_lr_frac != 1.0 else {}
    return start_training(
        str(empty_config("mid")), {**own, **asked}, settings, notes,
        nproc=nproc, port=port, restarts=restarts, dry_run=dry_run,
    )  # fmt: skip


def find_run(name: str | None, notes: list[str], stage: str = "pretrain") -> Path:
    """The finished run before; without a name the only one of that stage under runs/."""
    from duoka.errors import ConfigError

    if name is not None:
        run = Path(name).expanduser()
        if not (run / "final" / "config.json").is_file():
            raise ConfigError(f"there is no finished run in {run}", fix="write:   --from runs/NAME   (duoka runs)")
        return run
    found = sorted(path.parent.parent for path in Path("runs").glob("*/final/config.json"))
    found = [run for run in found if _stage_of(run) == stage]
    if len(found) != 1:
        names = ", ".join(map(str, found)) or "none"
        raise ConfigError(
            f"nothing says which run to go on from; finished ones of stage {stage} under runs/: {names}",
            fix="write:   --from runs/NAME",
        )
    notes.append(f"begins from {found[0]}, the only run of stage {stage} here")
    return found[0]


def _stage_of(run: Path) -> str:
    from duoka.config.handover import read_run

    stage = read_run(str(run), Path()).get("stage") or {}
    return str(stage.get("name", "")) if isinstance(stage, dict) else str(stage)


def start_after(
    stage: str, run: Path, data: list[str], asked: dict[str, str], settings: tuple[str, ...], notes: list[str],
    rate_factor: float, *, nproc: int | None, port: int | None, restarts: int, dry_run: bool,
) -> int:  # fmt: skip
    """Train the result of `run` on, with an optimizer of its kind and its rates times a factor."""
    from duoka.config.handover import read_run
    from duoka.config.yaml_text import yaml_text

    typed = {word.partition("=")[0] for word in settings}
    written = typed | set(asked)
    own = {"stage": stage, "model": absolute_folder(str(run / "final"))}
    own |= {"data.train": yaml_text(data)} if data else {}
    own |= {} if "output" in written else {"output": f"runs/{stage}"}
    own |= {key: value for key, value in asked.items() if key not in typed}
    name = (read_run(str(run), run.parent).get("optim") or {}).get("name")
    own |= {"optim.name": str(name)} if name is not None and "optim.name" not in written else {}
    own |= slower_rates(run, rate_factor, written)
    return start_training(
        str(empty_config(stage)), own, settings, notes, nproc=nproc, port=port, restarts=restarts, dry_run=dry_run
    )


def slower_rates(run: Path, factor: float, written: set[str]) -> dict[str, str]:
    """The rates of a run times a factor, but those that are written."""
    from duoka.config.handover import read_run

    optim = read_run(str(run), Path()).get("optim") or {}
    rates = {name: optim[name] for name in _RATES if optim.get(name) is not None and f"optim.{name}" not in written}
    return {f"optim.{name}": f"{float(rate) * factor:.6g}" for name, rate in rates.items()}
