"""`duoka chat RUN|MODEL`: ask once (--prompt), line by line (a pipe), or talk in the terminal."""

from __future__ import annotations

import contextlib
import sys

import click


@click.command("chat")
@click.argument("target", metavar="RUN|MODEL")
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
    default=0.95,
    show_default=True,
    help="Draw from the likeliest tokens that make up this share.",
)
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=512, show_default=True, help="Longest answer.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed draws the same answers.")
@click.option("--system", metavar="TEXT", help="A system message to begin with.")
@click.option("--json", "as_json", is_flag=True, help='One {"prompt", "answer"} object a line; for --prompt and pipes.')
def command(
    target: str,
    prompt: str | None,
    base: bool,
    checkpoint: int | None,
    temperature: float | None,
    top_p: float,
    max_new_tokens: int,
    seed: int,
    system: str | None,
    as_json: bool,
) -> None:
    """Chat with what a run has learned so far, or with any model.

    RUN is a run's folder, or its name under runs/. MODEL is a folder (full model or adapter), a Hub id, or demo.
    A pipe is answered line by line: echo "Who are you?" | duoka chat runs/identity
    """
    from duoka.serve.chat import Chat, answer_lines, answer_once, talk, write_stdout
    from duoka.serve.generate import Sampling
    from duoka.serve.trained import find_trained, load_chat_tokenizer, load_for_chat

    trained = find_trained(target, step=checkpoint, say=say)
    in_terminal = prompt is None and sys.stdin.isatty()
    if temperature is None:
        temperature = 0.7 if in_terminal else 0.0
    chat = Chat(
        load_for_chat(trained, base_only=base),
        load_chat_tokenizer(trained),
        Sampling(temperature, top_p, max_new_tokens, seed),
        system,
    )
    if prompt is not None:
        answer_once(chat, prompt, write_stdout, as_json=as_json)
    elif in_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (arrow keys and history in input(), where Python was built with it)
        talk(chat, input, write_stdout)
    else:
        answer_lines(chat, sys.stdin, write_stdout, as_json=as_json)


def say(text: str) -> None:
    """Notes go to stderr: stdout is the model's."""
    click.echo(text, err=True)
