"""`duoka explain WORD`: a key, a code, an error, a topic or a log, in English or Chinese; explain/ does the work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from duoka.explain.find import Entry, Language
    from duoka.explain.numbers import Own


@click.command("explain", context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, metavar="TOPIC|CODE|KEY|LOG")
@click.option("--config", type=click.Path(), help="Add the numbers of this config.")
@click.option(
    "--nproc", type=click.IntRange(min=1), help="Processes that the numbers are for; default: as a start here."
)
@click.option("--lang", type=click.Choice(["en", "zh"]), help="Language; default: that of DUOKA_LANG, or of LANG.")
def command(words: tuple[str, ...], config: str | None, nproc: int | None, lang: str | None) -> None:
    """Explain a topic (zero, lr-scaling, resume, ...), an exit code or error (5, WorkerFailed), or a key of the YAML.

    Words of an error message, a log file, and flags of other trainers are looked up too. Without a word, the topics
    are listed.
    """
    from duoka.cli.language import language as of_environment
    from duoka.errors import ConfigError
    from duoka.explain.find import explain_log, find_entry, guess

    language: Language = "zh" if (lang or of_environment()) == "zh" else "en"
    if not words:
        click.echo("\n".join(_list_topics(language)))
        return
    own = _read_own(config, nproc, language) if config else None
    word = " ".join(words)
    if Path(word).is_file() and not word.endswith((".yaml", ".yml")):
        found = explain_log(Path(word), language)
        if not found:
            raise ConfigError(f"nothing in {word} is a fault that duoka knows", fix="duoka explain lists the topics")
        for line, entry in found:
            click.echo("\n".join([line, *_lines(entry, own, language), ""]))
        return
    entry_found = find_entry(word, language)
    if entry_found is None:
        near = guess(word)
        raise ConfigError(
            f"there is nothing to explain under {word!r}",
            fix=f"did you mean {near}?"
            if near
            else "duoka explain lists the topics; config keys are in docs/config.md",
        )
    click.echo("\n".join(_lines(entry_found, own, language)))


def _lines(entry: Entry, own: Own | None, language: Language) -> list[str]:
    out = [click.style(entry.title, bold=True), *(f"  {line}" for line in entry.text.splitlines())]
    if entry.wrong:
        out += ["", "教程常见的错误" if language == "zh" else "Where guides err"]
        out += [f"  {line}" for line in entry.wrong.splitlines()]
    if own is not None:
        from duoka.explain.numbers import numbers_for, value_of

        numbers = [*numbers_for(entry.numbers, own), *(value_of(entry.key, own) if entry.key else [])]
        if numbers:
            name = own.loaded.path.name
            out += ["", f"在 {name} 中" if language == "zh" else f"In {name}", *(f"  {line}" for line in numbers)]
    return out


def _list_topics(language: Language) -> list[str]:
    from duoka.explain.find import codes, topics

    zh = language == "zh"
    width = max(map(len, topics()))
    out = [
        "主题" if zh else "Topics",
        *(f"  {name:<{width}}  {one[language]['title']}" for name, one in topics().items()),
    ]
    out += ["退出码" if zh else "Exit codes", *(f"  {one[language]['title']}" for one in codes().values())]
    out += [
        "配置的每个键，例如 duoka explain optim.lr" if zh else "and every key of a config:   duoka explain optim.lr"
    ]
    return out


def _read_own(config: str, nproc: int | None, language: Language) -> Own:
    """The config with the plan that `duoka plan` would print: of its data no more than a look is read."""
    from duoka.cli.model_facts import measured, read_model_facts, read_model_shape
    from duoka.config.load import Start, load_config
    from duoka.data.dataset_lengths import find_lengths
    from duoka.explain.numbers import Own
    from duoka.plan.catalog import local_cluster
    from duoka.plan.hardware import read_machine
    from duoka.plan.report import make_plan

    machine = read_machine()
    ranks = nproc or max(1, len(machine.gpus))
    loaded = load_config(config, start=Start(ranks, bool(machine.gpus)))
    facts = read_model_facts(loaded.config.model, loaded.base)
    shape = measured(read_model_shape(loaded.config.model, loaded.base, facts), facts, loaded.config)
    lengths = find_lengths(loaded.config, loaded.base)
    cluster = local_cluster(machine, ranks, ranks)
    plan = make_plan(loaded.config, shape, machine, ranks, lengths=lengths, cluster=cluster)
    return Own(loaded, plan, ranks, language)
