"""`duoka chat RUN|MODEL`: ask once (--prompt), line by line (a pipe), or talk in the terminal."""

from __future__ import annotations

import contextlib
import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from duoka.config.foreign_task import AskedFile
    from duoka.model.sampling import Sampling


@click.command("chat")
@click.argument("target", metavar="RUN|MODEL|FILE")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--prompt", help="Ask this one question, print the answer, and leave.")
@click.option("--base", is_flag=True, help="Ask the model as it was before training.")
@click.option("--checkpoint", type=int, metavar="STEP", help="Ask the run as it was after this step.")
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    help="0: always the likeliest token. Default: 0, in the terminal 0.7.",
)
@click.option(
    "--top-p",
    type=click.FloatRange(min=0, max=1, min_open=True),
    help="Draw from the likeliest tokens that make up this share. Default: 0.95.",
)
@click.option("--max-new-tokens", type=click.IntRange(min=1), help="Longest answer. Default: 512.")
@click.option("--seed", type=int, help="The same seed draws the same answers. Default: 0.")
@click.option("--system", metavar="TEXT", help="A system message to begin with.")
@click.option(
    "--tools",
    metavar="NAMES",
    default="",
    help="What the model may call: calculator; python too runs its programs in a limited process, which is no sandbox.",
)
@click.option("--json", "as_json", is_flag=True, help='One {"prompt", "answer"} object a line; for --prompt and pipes.')
def command(
    target: str,
    overrides: tuple[str, ...],
    prompt: str | None,
    base: bool,
    checkpoint: int | None,
    temperature: float | None,
    top_p: float | None,
    max_new_tokens: int | None,
    seed: int | None,
    system: str | None,
    tools: str,
    as_json: bool,
) -> None:
    """Chat with what a run has learned so far, or with any model.

    RUN is a run's folder, or its name under runs/. MODEL is a folder (full model or adapter), a Hub id, or demo.
    FILE is a config: its run, or what a LLaMA-Factory file names, whose settings hold where no flag is given.
    A pipe is answered line by line: echo "Who are you?" | duoka chat runs/identity
    """
    from duoka.cli.target import find_target
    from duoka.serve.chat import Chat, answer_lines, answer_once, as_text, talk, write_stdout
    from duoka.serve.load_run import load_chat_tokenizer, load_for_chat
    from duoka.serve.tools import find_tools

    trained, asked = find_target(target, overrides, "chat", checkpoint, say)
    in_terminal = prompt is None and sys.stdin.isatty()
    given = ChatOptions(temperature, top_p, max_new_tokens, seed)
    system = asked.get("default_system") if asked is not None and system is None else system
    system, prompt = (text if text is None else as_text(text) for text in (system, prompt))
    tokenizer = load_chat_tokenizer(trained)
    found = find_tools([name.strip() for name in tools.split(",") if name.strip()], tokenizer)
    if "python" in found:
        say("programs that the model writes run as you, in a process with limits of time and memory: no sandbox")
    chat = Chat(
        load_for_chat(trained, base_only=base),
        tokenizer,
        choose_sampling(given, asked, temperature=0.7 if in_terminal else 0.0, max_new_tokens=512),
        system,
        tools=found,
    )
    if prompt is not None:
        answer_once(chat, prompt, write_stdout, as_json=as_json)
    elif in_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (arrow keys and history in input(), where Python was built with it)
        talk(chat, input, write_stdout)
    else:
        answer_lines(chat, sys.stdin, write_stdout, as_json=as_json)
    if chat.num_cut and not in_terminal:
        many = f"{chat.num_cut:,} answers were cut, the last"
        say(f"{'one answer was cut' if chat.num_cut == 1 else many} {chat.why_cut}")


@dataclass(frozen=True)
class ChatOptions:
    """What the flags say about drawing; None: nothing."""

    temperature: float | None = None
    top_p: float | None = None
    max_new_tokens: int | None = None
    seed: int | None = None


def choose_sampling(
    given: ChatOptions, asked: AskedFile | None, *, temperature: float, max_new_tokens: int
) -> Sampling:
    """Flags before the file, the file before what is usual here."""
    from duoka.errors import ConfigError
    from duoka.model.sampling import Sampling

    def pick(flag: float | None, of_file: float | None, usual: float) -> float:
        return usual if flag is None and of_file is None else of_file if flag is None else flag  # type: ignore[return-value]

    found = Sampling(
        pick(given.temperature, asked.temperature() if asked else None, temperature),
        pick(given.top_p, asked.number("top_p") if asked else None, 0.95),
        int(pick(given.max_new_tokens, asked.whole("max_new_tokens") if asked else None, max_new_tokens)),
        int(pick(given.seed, asked.number("seed") if asked else None, 0)),
    )
    if not 0 <= found.temperature < math.inf or not 0 < found.top_p <= 1:
        what = f"temperature {found.temperature:g} and top_p {found.top_p:g} draw nothing"
        raise ConfigError(what, fix="write a temperature of at least 0, and a top_p above 0 and up to 1")
    return found


def say(text: str) -> None:
    """Notes go to stderr: stdout is the model's."""
    click.echo(text, err=True)
