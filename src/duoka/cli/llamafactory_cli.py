"""`duoka llamafactory-cli train|export|chat|eval x.yaml key=value`: a guide's line, said and done in duoka's words."""

from __future__ import annotations

import click

_ACTIONS = {"train": "train", "export": "export", "chat": "chat", "eval": "eval", "env": "env"}
_ELSEWHERE = {
    "api": "OpenAI's API, and a chat page, of a run, a model or a folder of weights:   duoka serve RUN",
    "webchat": "in the terminal:   duoka chat FILE   or as a page:   duoka serve RUN",
    "webui": "a config by five questions:   duoka new FILE   and runs as a page:   duoka board",
}


@click.command(
    "llamafactory-cli",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("action", metavar="train|export|chat|eval")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[FILE] [KEY=VALUE]...")
def command(action: str, words: tuple[str, ...]) -> int:
    """Read a line that was written for llamafactory-cli; its YAML is read as it is.

    The variables FORCE_TORCHRUN, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT and NPROC_PER_NODE count as they do there.
    """
    from duoka import __version__
    from duoka.cli.lines import Meaning, settings_of_words
    from duoka.cli.torchrun import follow
    from duoka.config.dialects.all import dialects
    from duoka.errors import ConfigError
    from duoka.registry import nearest

    if action == "version":
        click.echo(f"duoka {__version__}")
        return 0
    if action in _ELSEWHERE:
        raise ConfigError(f"{action} is another command here", fix=_ELSEWHERE[action])
    if action not in _ACTIONS:
        guess = nearest(action, _ACTIONS)
        known = ", ".join(_ACTIONS)
        raise ConfigError(
            f"llamafactory-cli has no command {action!r} here", fix=f"did you mean {guess}?" if guess else known
        )
    flags = [word for word in words if word.startswith("--")]
    if flags and not words[0].endswith((".yaml", ".yml", ".json")):
        shown = "\n".join(_as_yaml(words))
        raise ConfigError("keys of a run stand in a file here, not in flags", fix=f"write a YAML with:\n{shown}")
    settings = settings_of_words(words, only=dialects()["llamafactory"].rows)
    return follow(Meaning((_command_of(action, settings), *settings)))


def _command_of(action: str, words: list[str]) -> str:
    """`train` of a file that only predicts is duoka eval."""
    if action != "train" or not words:
        return _ACTIONS[action]
    from pathlib import Path

    from duoka.config.foreign_task import task_of_file

    return "eval" if Path(words[0]).is_file() and task_of_file(words[0], words[1:]) == "predict" else "train"


def _as_yaml(words: tuple[str, ...]) -> list[str]:
    """`--stage sft --do_train` as lines of a YAML."""
    out, place = [], 0
    while place < len(words):
        name, equals, value = words[place].lstrip("-").partition("=")
        if not equals and place + 1 < len(words) and not words[place + 1].startswith("--"):
            place += 1
            value = words[place]
        out.append(f"  {name.replace('-', '_')}: {value or 'true'}")
        place += 1
    return out
