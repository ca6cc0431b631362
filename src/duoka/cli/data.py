"""`duoka data`: see what a config's data become before training, and which data sets have names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.text import Text

    from duoka.data.prepare import PreparedData
    from duoka.data.template import Sample
    from duoka.data.tokenizer import ChatTokenizer


@click.group(name="data", help="Look at the data of a config, or list the data sets that have names.")
def command() -> None:
    pass


@command.command()
@click.argument("config", type=click.Path(dir_okay=True))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--samples", default=3, show_default=True, type=click.IntRange(min=0), help="How many samples to show.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--html", type=click.Path(dir_okay=False), help="Write the same as a page to this file.")
def inspect(config: str, overrides: tuple[str, ...], samples: int, as_json: bool, html: str | None) -> None:
    """Tokenise the data of CONFIG as training would, report it, and show samples with what is learned marked."""
    from duoka.config.load import load_config
    from duoka.data.prepare import prepare_data, read_tokenizer
    from duoka.data.registry import check_sets
    from duoka.model.source import check_model, model_folder

    loaded = load_config(config, overrides, checks=(check_sets, check_model))
    folder = model_folder(loaded.config.model, loaded.base, _say)
    prepared = prepare_data(loaded.config, loaded.base, folder, say=_say)
    tokenizer = read_tokenizer(loaded.config, loaded.base, folder)
    places = _places(len(prepared.train), samples)
    if html is not None:
        _write_page(Path(html), Path(config).name, prepared, places, tokenizer)
    if as_json:
        click.echo(json.dumps(_as_json(prepared, places, tokenizer), indent=2, ensure_ascii=False))
        return
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    for line in prepared.report.lines():
        console.print(line, markup=False)
    for place in places:
        sample = prepared.train.sample(place)
        console.print(
            f"\nsample {place}: {len(sample.input_ids)} tokens, {sample.num_targets} targets (marked)", markup=False
        )
        console.print(_shown(sample, tokenizer, colour=console.color_system is not None and not console.no_color))


@command.command(name="list")
@click.argument("config", type=click.Path(dir_okay=True), required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_sets(config: str | None, as_json: bool) -> None:
    """Names that may stand in data.train: built in, or registered in a dataset_info.json that CONFIG (or ./) sees."""
    from duoka.data.registry import registered_sets

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


def _say(text: str) -> None:
    """Progress goes to stderr: stdout is the report's."""
    click.echo(text, err=True)


def _places(num_samples: int, wanted: int) -> list[int]:
    """Samples spread over the data: its beginning, its end, and between."""
    wanted = min(wanted, num_samples)
    return sorted({round(place * (num_samples - 1) / max(1, wanted - 1)) for place in range(wanted)})


def _parts(sample: Sample, tokenizer: ChatTokenizer) -> list[tuple[bool, str]]:
    """The sample's text in runs of tokens that are all targets, or all not."""
    parts: list[tuple[bool, str]] = []
    start, ids, marks = 0, sample.input_ids.tolist(), sample.is_target.tolist()
    for at in range(1, len(ids) + 1):
        if at == len(ids) or marks[at] != marks[start]:
            parts.append((marks[start], tokenizer.decode(ids[start:at])))
            start = at
    return parts


def _write_page(file: Path, name: str, prepared: PreparedData, places: list[int], tokenizer: ChatTokenizer) -> None:
    from duoka.data.page import ShownSample, build_page
    from duoka.runs.folder import write_text_atomic

    shown = []
    for place in places:
        sample = prepared.train.sample(place)
        shown.append(ShownSample(place, len(sample.input_ids), sample.num_targets, _parts(sample, tokenizer)))
    write_text_atomic(file, build_page(prepared.report, shown, f"Data of {name}"))
    _say(f"wrote {file}")


def _shown(sample: Sample, tokenizer: ChatTokenizer, *, colour: bool) -> Text:
    from rich.text import Text

    text = Text()
    for is_target, part in _parts(sample, tokenizer):
        # Where there is no colour, targets stand between {+ and +}, as in a word diff.
        text.append(f"{{+{part}+}}" if is_target and not colour else part, style="bold green" if is_target else "dim")
    return text


def _as_json(prepared: PreparedData, places: list[int], tokenizer: ChatTokenizer) -> dict[str, Any]:
    shown = []
    for place in places:
        sample = prepared.train.sample(place)
        parts = [{"target": is_target, "text": text} for is_target, text in _parts(sample, tokenizer)]
        shown.append({"sample": place, "num_tokens": len(sample.input_ids), "parts": parts})
    return {"report": prepared.report.to_json(), "samples": shown}
