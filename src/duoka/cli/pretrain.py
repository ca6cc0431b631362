"""`duoka pretrain --depth=12 --device_batch_size=32 ...`: a guide's flags as keys of a config, then `duoka train`.

One table says what each flag means (mid.py has another of its kind). Flags with _ and - are the same; with a YAML they
change it. Also called as `python -m duoka.pretrain`, by itself or under torchrun.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click


@dataclass(frozen=True)
class Flag:
    """A flag, the key that it sets, and how its value is written there; `note` instead of a key: what to say."""

    name: str
    key: str = ""
    write: Callable[[str], str] = str
    note: str = ""
    passes_over: tuple[str, ...] = ("-1",)  # values that ask for nothing
    never: str = ""  # what -1 says of a thing that otherwise happens by itself


def _tokens(value: str) -> str:
    return f"{value} tokens"


def absolute_folder(name: str) -> str:
    """A folder of here by its whole path, so that the run's config says the same everywhere; a name as it is."""
    path = Path(name).expanduser()
    return str(path.absolute()) if path.exists() else name


_NEVER = str(10**9)  # steps: only the end is left


def _or_never(value: str) -> str:
    return _NEVER if value == "-1" else value


FLAGS: tuple[Flag, ...] = (
    Flag("depth", "model.depth"),
    Flag("head-dim", "model.head_dim"),
    Flag("tokenizer", "model.tokenizer", absolute_folder),
    Flag("max-seq-len", "data.max_length"),
    Flag("device-batch-size", "train.micro_batch"),
    Flag("total-batch-size", "train.global_batch", _tokens),
    Flag("num-iterations", "train.max_steps"),
    Flag("target-param-data-ratio", "train.tokens", lambda value: f"{value}x"),
    Flag("matrix-lr", "optim.lr"),
    Flag("embedding-lr", "optim.embedding_lr"),
    Flag("unembedding-lr", "optim.head_lr"),
    Flag("scalar-lr", "optim.adamw_lr"),
    Flag("weight-decay", "optim.weight_decay"),
    Flag("grad-clip", "optim.clip"),
    Flag("warmup-ratio", "optim.warmup"),
    Flag("warmup-steps", "optim.warmup"),
    Flag("warmdown-ratio", "optim.decay"),
    Flag("final-lr-frac", "optim.min_lr"),
    Flag("eval-every", "train.eval_every", _or_never, passes_over=(), never="measured"),
    Flag("save-every", "checkpoint.every", _or_never, passes_over=(), never="saved"),
    Flag("resume-from-step", "checkpoint.resume"),
    Flag("seed", "train.seed"),
    Flag("run", "output", lambda value: f"runs/{value}", passes_over=("dummy",)),
    Flag("model-tag", "output", lambda value: f"runs/{value}"),
    Flag("device-type", note="the device is found: GPUs when there are any"),
    Flag("aspect-ratio", note="write the width itself:   model.width=768"),
    Flag("eval-tokens", note="all of data.eval is measured"),
    Flag("core-metric-every", note="there is no CORE here; data.eval is measured every train.eval_every"),
    Flag("core-metric-max-per-task", note="there is no CORE here"),
    Flag("window-pattern", note="every layer sees the whole row", passes_over=("L",)),
    Flag("target-flops", note="say how much text:   --target-param-data-ratio=20   or   train.tokens=2B"),
)


def offer_flags(flags: tuple[Flag, ...]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The flags of a table as options of a command."""

    def offer(function: Callable[..., Any]) -> Callable[..., Any]:
        for flag in reversed(flags):
            text = f"{flag.key}." if flag.key else f"Without meaning here: {flag.note}."
            function = click.option(f"--{flag.name}", help=text)(function)
        return function

    return offer


@click.command("pretrain")
@click.argument("words", nargs=-1, metavar="[CONFIG] [KEY=VALUE]...")
@offer_flags(FLAGS)
@click.option("--data", multiple=True, help="Files or folders of text; default: the folder data.")
@click.option("--nproc", type=int, help="Processes; default: one per GPU, on a CPU one.")
@click.option("--port", type=int, help="Port of the rendezvous; default: a free one.")
@click.option("--restarts", type=click.IntRange(0), default=0, help="Start again up to N times after a crash or hang.")
@click.option("--dry-run", is_flag=True, help="Check everything, print the plan, start nothing.")
def command(
    words: tuple[str, ...],
    data: tuple[str, ...],
    nproc: int | None,
    port: int | None,
    restarts: int,
    dry_run: bool,
    **flags: str | None,
) -> int:
    """Train a model from nothing, by flags: each of them is a key of a config.

    Without CONFIG, text is in --data (or ./data) and the tokenizer in --tokenizer (or ./tokenizer).
    """
    config = next((word for word in words if "=" not in word and word.endswith((".yaml", ".yml", ".json"))), None)
    settings = [word for word in words if word != config]
    asked, notes = settings_of({name: value for name, value in flags.items() if value is not None})
    if config is None:
        asked = {**_defaults(asked, settings, data), **asked}
        config = str(empty_config("pretrain"))
    elif data:
        asked |= _settings_of_data(data)
    return start_training(config, asked, settings, notes, nproc=nproc, port=port, restarts=restarts, dry_run=dry_run)


def start_training(
    config: str, asked: Mapping[str, str], settings: Sequence[str], notes: Sequence[str], **flags: Any
) -> int:
    """Say what the flags mean, and do it; `flags` are those of `duoka train`."""
    from duoka.cli.train import command as train
    from duoka.process.environ import read_rank_environment

    place = read_rank_environment()
    means = [f"{key}={value}" for key, value in asked.items()]
    if place is None or place.rank == 0:
        for note in notes:
            click.echo(f"note: {note}", err=True)
        click.echo(f"means:   duoka train CONFIG {' '.join(_quoted(word) for word in [*means, *settings])}", err=True)
    assert train.callback is not None
    return int(train.callback(config=config, overrides=(*means, *settings), **flags))


def settings_of(flags: dict[str, str], table: tuple[Flag, ...] = FLAGS) -> tuple[dict[str, str], list[str]]:
    """Keys of a config, and what is to be said about flags that set none."""
    asked: dict[str, str] = {}
    notes: list[str] = []
    by_parameter = {flag.name.replace("-", "_"): flag for flag in table}
    for name, value in flags.items():
        flag = by_parameter[name]
        if value in flag.passes_over:
            continue
        if flag.key:
            asked[flag.key] = flag.write(value)
            if flag.never and value == "-1":
                notes.append(f"--{flag.name}=-1: only the end is {flag.never}")
        else:
            notes.append(f"--{flag.name}={value} is passed over: {flag.note}")
    return asked, notes


def _defaults(asked: dict[str, str], settings: list[str], data: tuple[str, ...]) -> dict[str, str]:
    """What a command line without a YAML leaves open. Raises ConfigError for what cannot be guessed."""
    from duoka.errors import ConfigError

    written = {word.partition("=")[0] for word in settings} | set(asked)
    out: dict[str, str] = {}
    if not {"model", "model.name", "model.depth"} & written:
        raise ConfigError("nothing says which model", fix="write for example:   duoka pretrain --depth=12")
    if "model.depth" in written and "model.tokenizer" not in written:
        if not (Path("tokenizer") / "tokenizer.json").is_file():
            raise ConfigError(
                "there is no tokenizer: no --tokenizer is given, and no folder tokenizer is here",
                fix="make one from your text:   duoka data tokenizer data --out tokenizer",
            )
        out["model.tokenizer"] = absolute_folder("tokenizer")
    if "data.train" not in written:
        if not data and not Path("data").is_dir():
            raise ConfigError(
                "there is no text: no --data is given, and no folder data is here",
                fix="write for example:   --data texts/   (Parquet, jsonl, txt)",
            )
        out |= _settings_of_data(data or ("data",))
    if "train.max_steps" in written and "train.epochs" not in written:
        out["train.epochs"] = "null"  # so many steps, however often the text is passed
    if "output" not in written:
        out["output"] = f"runs/d{asked['model.depth']}" if "model.depth" in asked else "runs/pretrain"
    return out


def _settings_of_data(names: tuple[str, ...]) -> dict[str, str]:
    """Parquet is read while it is learned, and its last file held back; of other text a hundredth is."""
    from duoka.config.yaml_text import yaml_text

    paths = [Path(name).expanduser() for name in names]
    files = [file for path in paths for file in (sorted(path.iterdir()) if path.is_dir() else [path])]
    out = {"data.train": yaml_text([str(path.absolute()) if path.exists() else str(path) for path in paths])}
    if files and all(file.suffix == ".parquet" for file in files):
        return out | {"data.stream": "true"} | ({"data.eval": "last_file"} if len(files) > 1 else {})
    return out | {"data.eval": "0.01"}


def empty_config(stage: str) -> Path:
    """All that is known stands on the command line; a run's own config.yaml keeps it resolved."""
    from duoka.runs.cache import cache_folder, make_folder
    from duoka.runs.folder import write_text_atomic

    path = make_folder(cache_folder()) / f"{stage}.yaml"
    if not path.is_file():
        write_text_atomic(path, f"stage: {stage}\n")
    return path


def _quoted(word: str) -> str:
    import shlex

    return shlex.quote(word)
