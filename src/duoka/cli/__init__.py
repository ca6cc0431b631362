"""The command line's frame: a lazy group, errors as messages, exit codes. One file beside this one per command.

`main` is what `duoka` and `python -m duoka` call, by way of __main__. Nothing heavy is imported here, so that help
costs little; a command's own imports happen inside its function. A command returns its exit code, or None for 0.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from duoka import __version__
from duoka.cli import words_zh
from duoka.cli.asked_to_leave import AskedToLeave, leave_when_asked
from duoka.cli.language import framed, language
from duoka.cli.streams import drop_stdout, open_closed_streams, print_what_can_be_printed
from duoka.errors import DoctorError, DuokaError, StorageError
from duoka.process.no_memory import is_no_memory, no_memory  # here: without memory nothing can be imported any more
from duoka.process.no_process import is_no_process, no_process
from duoka.process.no_room import disk_error, no_room
from duoka.process.open_files import is_too_many_files, too_many_files  # nor without a file
from duoka.registry import nearest

# Name -> what it does. The commands' own modules are imported only when they are called, or asked for their help.
COMMANDS = {
    "demo": "Fine-tune a real small model here, and ask it before and after.",
    "new": "Write a config for your own data by five questions, and plan it.",
    "init": "Write a first config, commented.",
    "train": "Train as a YAML says; the same command goes on after an end.",
    "run": "Run the stages of one YAML, each kept until something of it changes.",
    "pretrain": "Train a model from nothing, by the flags of a guide.",
    "mid": "Train it further on conversations and tasks, by the flags of a guide.",
    "sft": "Train it on an assistant's words, by the flags of a guide.",
    "rl": "Train it on rewards of answers that it draws, by the flags of a guide.",
    "eval": "Measure loss, perplexity and accuracy of a run or model.",
    "score": "Write a reward model's score of each answer.",
    "embed": "Write a vector for each line of a text file.",
    "chat": "Talk to what a run has learned so far.",
    "serve": "Serve a run by OpenAI's HTTP API, with a chat page.",
    "export": "Merge adapters and write a standard model folder.",
    "import-checkpoint": "Write what DeepSpeed or FSDP trained as a model folder.",
    "export-checkpoint": "Write a checkpoint that DeepSpeed goes on from.",
    "plan": "Say before a run whether it fits, and how it is laid out.",
    "comm": "Test how processes talk to each other, and how fast.",
    "profile": "Say where the time of a training step goes.",
    "bench": "Measure this machine, so that plans stand on figures.",
    "env": "Print what a bug report needs: versions, machine, settings; no secrets.",
    "doctor": "Check whether this machine is fit for training.",
    "sync": "Bring code, small data and the list of packages to other machines.",
    "chaos": "Strike a short copy of a run, and print what it survives.",
    "runs": "List runs with state, step, loss and age; show or stop one.",
    "top": "Watch a run in the terminal while it trains.",
    "board": "Show all runs of a folder as a live page in the browser.",
    "alerts": "Follow a run and tell a command or a webhook what becomes of it.",
    "report": "Write one run's page: one file that fetches nothing.",
    "config": "Show a config with the origin of every value, or the schema.",
    "data": "Look at data sets as training sees them.",
    "launch": "Run your own script on N processes.",
    "explain": "Explain a key, an error or exit code, or a topic, in English or Chinese.",
    "llamafactory-cli": "A guide's llamafactory-cli line: train, export, chat, eval FILE.",
    "torchrun": "A guide's torchrun line, in duoka's words.",
    "accelerate": "A guide's accelerate launch line, in duoka's words.",
    "completion": "Print the shell's completion script.",
}
_MODULES = {"run": "stages"}  # a module of the command's name would take the place of `run` below
# Programs of guides that people type behind duoka.
_ELSEWHERE = {
    "deepspeed": "write   duoka train x.yaml --nproc N   (deepspeed: FILE in the YAML is read)",
    "python": "leave it out:   duoka train x.yaml   or, for a script of your own,   duoka launch --nproc N script.py",
    "webui": "there is no page to click; a config with comments is written by   duoka init new.yaml",
}
COMPLETE_VAR = "_DUOKA_COMPLETE"
INTERRUPTED = 130
BROKEN_PIPE = 141


class ReaderLeft(Exception):
    """The reader of stdout has closed it (a pager, head). Click would report a broken pipe as a failure."""


class LazyGroup(click.Group):
    """Knows its commands by name and help; imports `duoka.cli.NAME` for the one that is called."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise ReaderLeft from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        import importlib

        found = importlib.import_module(f"duoka.cli.{_MODULES.get(name, name.replace('-', '_'))}").command
        return found if isinstance(found, click.Command) else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        found = self.get_command(ctx, name)
        if found is None:
            if name.startswith("-"):
                raise click.NoSuchOption(name, ctx=ctx)
            if name == "python" and args[1:2] == ["-m"] and len(args) > 2:
                raise click.UsageError(f"there is no command {name!r}: {_python_module(args[2:])}", ctx=ctx)
            if name in _ELSEWHERE:
                raise click.UsageError(f"there is no command {name!r}: {_ELSEWHERE[name]}", ctx=ctx)
            guess = nearest(name, COMMANDS)
            hint = f"did you mean:   duoka {' '.join([guess, *args[1:]])}" if guess else ""
            raise click.UsageError(f"there is no command {name!r}\n{hint}".rstrip(), ctx=ctx)
        return name, found, args[1:]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("命令" if language() == "zh" else "Commands"):
            formatter.write_dl(list(_commands().items()))

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(words_zh.HELP if language() == "zh" else self.help or "")

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(words_zh.EPILOG if language() == "zh" else self.epilog or "")

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[click.shell_completion.CompletionItem]:
        from click.shell_completion import CompletionItem

        found = [CompletionItem(name, help=what) for name, what in _commands().items() if name.startswith(incomplete)]
        return found or super().shell_complete(ctx, incomplete)


def _commands() -> dict[str, str]:
    """What each command does, in the language of now."""
    return COMMANDS | words_zh.COMMANDS if language() == "zh" else COMMANDS


def _python_module(words: list[str]) -> str:
    """What `python -m MODULE ...` of a guide is here."""
    from duoka.cli.guide_modules import LATER_MODULES, PYTHON_MODULES

    module, *rest = words
    if module in LATER_MODULES:
        return LATER_MODULES[module]
    if module not in PYTHON_MODULES:
        return f"write   duoka launch --module {module}"
    return " ".join(["write   duoka", *filter(None, [PYTHON_MODULES[module]]), *rest])


def _with_dashes(name: str) -> str:
    """Guides write --max_new_tokens and --max-new-tokens: both are meant."""
    return name.replace("_", "-")


@click.group(
    cls=LazyGroup,
    context_settings={"token_normalize_func": _with_dashes},
    invoke_without_command=True,
    help="duoka trains language models on one CPU, one GPU, or many, from one YAML.\n\n"
    "Start with:   duoka init   and then   duoka train sft.yaml",
    epilog="Exit codes: 0 done, 1 a bug, 2 config or data refused, 3 unfit machine, 4 does not fit, 5 a worker died, "
    "6 storage, 75 stopped early (the same command goes on), 130 interrupted.",
)
@click.version_option(__version__, prog_name="duoka", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    if os.environ.get("NO_COLOR"):
        ctx.color = False
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
    else:
        _refuse_gone_folder()


def _refuse_gone_folder() -> None:
    """Names of files mean nothing there, and libraries end in tracebacks or at once. A rank has whole paths."""
    from duoka.process.lifeline import parent_pid

    try:
        os.getcwd()
    except FileNotFoundError:
        if parent_pid() is None:
            raise StorageError(
                "the current folder is gone: it was deleted, or made anew, since this terminal entered it",
                fix='enter one that is there:   cd "$PWD"   (where it was made anew), or   cd',
            ) from None


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code."""
    from duoka.process.environ import has_peers
    from duoka.process.lifeline import leaves_thread_behind, parent_pid

    is_rank = has_peers() or parent_pid() is not None  # it dies of signals at once: its main thread may wait for ever
    with contextlib.nullcontext() if is_rank else leave_when_asked():
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # of __main__
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = run(arguments)
    drop_stdout(only_if_refused=True)
    if is_rank or leaves_thread_behind():
        # A finished rank exits at once: during Python's finalization, a communication thread that still
        # lives now and then aborts the process (seen as SIGABRT after a finished evaluation). And finalization visits
        # every object: a second, and 150 MiB of pages that a forked rank shares until then.
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run(arguments: Sequence[str] | None = None) -> int:
    """As `main`, for callers that go on: the exit code of one command line."""
    try:
        code = cli.main(
            args=_prepare(sys.argv[1:] if arguments is None else arguments),
            prog_name="duoka",
            complete_var=COMPLETE_VAR,
            standalone_mode=False,
        )
        sys.stdout.flush()
        return int(code or 0)
    except click.ClickException as error:
        from duoka.process.place import let_rank_0_speak

        if not let_rank_0_speak():  # all ranks have the same words
            print_error(framed(usage_lines(error)))
        return 2
    except (click.Abort, KeyboardInterrupt):
        print_error(framed(["interrupted"]))
        return INTERRUPTED
    except (BrokenPipeError, ReaderLeft):
        drop_stdout()  # its reader has closed it
        return BROKEN_PIPE
    except Exception as error:  # noqa: BLE001  (the outermost frame: everything ends here)
        known = find_known_fault(error)
        if known is None:
            traceback.print_exc()
            print_error(BUG_LINES)
            return 1
        if not _launcher_says(known):
            print_error(framed(known.lines(), known.exit_code))
        return known.exit_code
    except AskedToLeave as asked:  # drafts and the like are gone by now
        asked.is_heard.set()
        print_error(framed([f"stopped by {asked.signal_name}"]))
        return 128 + signal.Signals[asked.signal_name]
    except BaseException as error:  # of tokenizers' threads: no Exception, and all else goes on upwards
        if not is_no_process(error):
            raise
        print_error(framed(no_process().lines(), DoctorError.exit_code))
        return DoctorError.exit_code


def _launcher_says(known: DuokaError) -> bool:
    """In a rank: leave its fault where its launcher looks for the cause, or it would stand in that rank's log alone.
    True on rank 0, whose words are on the launcher's terminal."""
    from duoka.process.environ import read_rank_environment
    from duoka.process.lifeline import is_supervised
    from duoka.process.rank import LOGS_FOLDER

    place, logs = read_rank_environment(), os.environ.get(LOGS_FOLDER)
    if place is None or not logs or not is_supervised():
        return False
    from duoka.runs.failure import write_failure
    from duoka.runs.folder import RunFolder

    write_failure(RunFolder(Path(logs).parent), place.rank, known, 0)
    return place.rank == 0


def _prepare(arguments: Sequence[str]) -> list[str]:
    """The process for what may come, and the words of the command line as they are meant."""
    open_closed_streams()
    print_what_can_be_printed()
    from duoka.cli.typed import mend, without_local_rank
    from duoka.runs.cache import lend_temporary_folder

    lend_temporary_folder()
    words, notes = mend(without_local_rank(arguments, os.environ))
    for note in notes:
        click.echo(f"note: {note}", err=True)
    return list(words)


BUG_LINES = (
    "this is a bug in duoka. Please report it with the lines above,",
    "the command that you typed, and what `duoka env` prints.",
)


def find_known_fault(error: BaseException) -> DuokaError | None:
    """The fault that a user can act on, or None for a bug."""
    if is_too_many_files(error):
        return too_many_files()
    if isinstance(error, DuokaError):
        return error
    if is_no_memory(error):
        return no_memory()
    if is_no_process(error):
        return no_process()
    from duoka.runs.cache import storage_fault

    if (fault := storage_fault(error)) is not None:
        return fault
    refused = disk_error(error)
    return None if refused is None else no_room(refused)


def usage_lines(error: click.ClickException) -> list[str]:
    """Click's complaint in our form: what, what was meant, where help is."""
    message = error.format_message().strip()
    lines = message.splitlines() or ["the command line is wrong"]
    if isinstance(error, click.NoSuchOption):
        guesses, key = error.possibilities or [], _key_meant(error)
        lines = [f"there is no option {error.option_name}"]
        if key:
            lines.append(f"a key of the YAML is written without dashes:   {key}=...")
        elif guesses:
            lines.append(f"did you mean {guesses[0]}?")
    out = [f"usage error: {lines[0][:1].lower()}{lines[0][1:]}", *(f"  {line}" for line in lines[1:])]
    ctx = getattr(error, "ctx", None)
    out.append(f"  see:   {ctx.command_path if ctx else 'duoka'} --help")
    return out


def _key_meant(error: click.NoSuchOption) -> str:
    """The key that `--lr` stands for, typed as other trainers' scripts take it; "" where none of that name is known."""
    command = error.ctx.command if error.ctx else None
    if command is None or not any(param.name == "overrides" for param in command.params):
        return ""
    from duoka.config.catalog import known_keys
    from duoka.config.foreign import foreign_names

    word = error.option_name.lstrip("-").partition("=")[0].replace("-", "_")
    named = [key for key in known_keys() if word in (key, key.rpartition(".")[2]) and "." in key]
    foreign = foreign_names().get(word)
    return named[0] if named else foreign.keys[0] if foreign and foreign.keys else ""


def print_error(lines: Sequence[str]) -> None:
    """To stderr, the first line in red on a terminal."""
    shown = [click.style(lines[0], fg="red", bold=True), *lines[1:]] if lines else []
    for line in shown:
        with contextlib.suppress(BrokenPipeError):
            click.echo(line, err=True, color=False if os.environ.get("NO_COLOR") else None)
