"""`duoka data`: see what a config's data become before training, and which data sets have names."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.text import Text

    from duoka.config.loaded import Loaded
    from duoka.data.page import ShownSample
    from duoka.data.prepare import PreparedData
    from duoka.data.tokens.tokenizer import ChatTokenizer


@click.group(name="data", help="Look at data, list the data sets that have names, or make a tokenizer.")
def command() -> None:
    pass


@command.command()
@click.argument("config", type=click.Path(dir_okay=True))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--samples", default=3, show_default=True, type=click.IntRange(min=0), help="How many samples to show.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--html", type=click.Path(dir_okay=False), help="Write the same as a page to this file.")
def inspect(config: str, overrides: tuple[str, ...], samples: int, as_json: bool, html: str | None) -> None:
    """Tokenize the data of CONFIG as training would, report it, and show samples with what is learned marked."""
    from duoka.config.load import load_config
    from duoka.data.page import build_page
    from duoka.data.prepare import prepare_data, read_tokenizer
    from duoka.data.read.registry import check_sets
    from duoka.hub.models import check_model, model_folder
    from duoka.runs.folder import write_asked

    loaded = load_config(config, overrides, checks=(check_sets, check_model))
    _say_what_training_refuses(loaded)
    folder = model_folder(loaded.config.model, loaded.base, _say)
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        _say(text)

    prepared = prepare_data(loaded.config, loaded.base, folder, say=say)
    tokenizer = read_tokenizer(loaded.config.model, loaded.base, folder)
    shown = [_look_at(prepared, place, tokenizer) for place in _places(prepared.num_shown, samples)]
    if html is not None:
        write_asked(Path(html), build_page(prepared.report, shown, f"Data of {Path(config).name}"))
        _say(f"wrote {html}")
    if as_json:
        looked_at = [
            {"sample": one.place, "num_tokens": one.num_tokens, "num_targets": one.num_targets,
             "parts": [{"target": is_target, "text": text} for is_target, text in one.parts]}
            for one in shown
        ]  # fmt: skip
        click.echo(
            json.dumps({"report": prepared.report.to_json(), "samples": looked_at}, indent=2, ensure_ascii=False)
        )
        return
    from duoka.sinks.console import open_screen

    console = open_screen(highlight=False, soft_wrap=True)
    there = said if console.is_terminal and sys.stderr.isatty() else []  # both on one screen
    for line in prepared.report.lines():
        if line not in there:
            console.print(line, markup=False)
    color = console.color_system is not None and not console.no_color
    for one in shown:
        console.print(f"\n{one.title()} (marked)", markup=False)
        console.print(_colored(one, color=color))


@command.command()
@click.argument("config", type=click.Path(dir_okay=True))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--world", default=1, show_default=True, type=click.IntRange(min=1), help="How many ranks to look at.")
@click.option("--epoch", default=0, show_default=True, type=click.IntRange(min=0), help="Which epoch.")
@click.option("--batches", default=1000, show_default=True, type=click.IntRange(min=1), help="Global batches to share.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def audit(config: str, overrides: tuple[str, ...], world: int, epoch: int, batches: int, as_json: bool) -> int:
    """Audit the sharding: the samples of each rank, and that each is there exactly once."""
    from duoka.config.load import load_config
    from duoka.data.audit import audit_data
    from duoka.data.prepare import prepare_data
    from duoka.data.read.registry import check_sets
    from duoka.hub.models import check_model, model_folder

    loaded = load_config(config, overrides, checks=(check_sets, check_model))
    _say_what_training_refuses(loaded)
    folder = model_folder(loaded.config.model, loaded.base, _say)
    prepared = prepare_data(loaded.config, loaded.base, folder, say=_say)
    prepared.check_world(world)
    found = audit_data(prepared, loaded.config, world, epoch=epoch, num_batches=batches)
    click.echo(json.dumps(found.to_json(), indent=2) if as_json else "\n".join(found.lines()))
    return 0 if found.is_exact else 1


@command.command(name="list")
@click.argument("config", type=click.Path(dir_okay=True), required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_sets(config: str | None, as_json: bool) -> None:
    """Names that may stand in data.train: built in, or registered in a dataset_info.json that CONFIG (or ./) sees."""
    from duoka.data.read.registry import registered_sets

    if config is None:
        names = registered_sets(None, Path("."))
    else:
        from duoka.config.load import load_config

        loaded = load_config(config)
        names = registered_sets(loaded.config.data, loaded.base)
    if as_json:
        click.echo(json.dumps(names, indent=2, ensure_ascii=False))
        return
    width = max(map(len, names), default=0)
    for name, where in names.items():
        click.echo(f"{name:<{width}}  {where}")


@command.command()
@click.argument("files", nargs=-1, required=True, metavar="FILES...")
@click.option("--out", default="tokenizer", show_default=True, type=click.Path(), help="The folder to write.")
@click.option("--vocab-size", default=32768, show_default=True, type=int, help="Tokens, with bytes and marks.")
@click.option("--max-bytes", default="1 GB", show_default=True, help="Read no more text than this.")
@click.option("--column", help="The column of the text; default: text, or what a chat format says.")
@click.option("--skip-bad", is_flag=True, help="Leave wrong records out and count them, rather than refuse.")
def tokenizer(
    files: tuple[str, ...], out: str, vocab_size: int, max_bytes: str, column: str | None, skip_bad: bool
) -> None:
    """Make a tokenizer from the text in FILES: byte-level BPE, ready for model.tokenizer.

    FILES are files, folders, or sets that duoka has: task:stories, identity.
    It knows the marks of chats and tools, and a chat template. The same files give the same tokenizer.
    """
    from duoka.data.tokens.train_tokenizer import train_tokenizer
    from duoka.errors import ConfigError
    from duoka.units import parse_bytes

    try:
        limit = parse_bytes(max_bytes)
    except ValueError as error:
        raise ConfigError(f"--max-bytes: {error}") from None
    learned = train_tokenizer(
        files, Path(out), vocab_size=vocab_size, max_bytes=limit, column=column, skip_bad=skip_bad
    )
    click.echo("\n".join(learned.lines()))
    click.echo(f"written to {out}; use it:   model: {{depth: 12, tokenizer: {out}}}")


def _say(text: str) -> None:
    """Progress goes to stderr: stdout is the report's."""
    click.echo(text, err=True)


def _say_what_training_refuses(loaded: Loaded) -> None:
    """Kinds of records that the stage does not learn from are looked at all the same."""
    from duoka.data.read.registry import check_data

    for fault in check_data(loaded.config, loaded.base):
        _say(f"note: duoka train would refuse it: {fault.what}")


def _places(num_samples: int, wanted: int) -> list[int]:
    """Samples spread over the data: its beginning, its end, and between."""
    wanted = min(wanted, num_samples)
    return sorted({round(place * (num_samples - 1) / max(1, wanted - 1)) for place in range(wanted)})


def _look_at(prepared: PreparedData, place: int, tokenizer: ChatTokenizer) -> ShownSample:
    """A sample's text in runs of tokens that are all learned, or all not."""
    from duoka.data.page import ShownSample

    segments = prepared.shown(place)
    parts: list[tuple[bool, str]] = []
    for segment in segments:
        ids, marks = segment.input_ids.tolist(), segment.is_target.tolist()
        marks[:1] = [False]  # nothing stands before a first token: it is never predicted
        start = 0
        for at in range(1, len(ids) + 1):
            if at == len(ids) or marks[at] != marks[start]:
                parts.append((marks[start], tokenizer.decode(ids[start:at])))
                start = at
    num_tokens = sum(len(segment.input_ids) for segment in segments)
    num_targets = sum(segment.num_targets for segment in segments)
    is_pair = prepared.report.has_pairs
    return ShownSample(place, num_tokens, num_targets, parts, num_documents=len(segments), is_pair=is_pair)


def _colored(sample: ShownSample, *, color: bool) -> Text:
    from rich.text import Text

    text = Text()
    for is_target, part in sample.parts:
        # Where there is no color, targets stand between {+ and +}, as in a word diff.
        text.append(f"{{+{part}+}}" if is_target and not color else part, style="bold green" if is_target else "dim")
    return text
