"""Whatever stands in a config, duoka says yes or says what is wrong, where, and at once: no traceback, no hang.

tests/config_fuzz.py makes the files. A find is made again by its number: `make_case(NUMBER, seeds())`.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from config_fuzz import Case, make_case, seeds

from duoka.cli.prepare import load_checked
from duoka.cluster.run_lock import check_claim, find_run_folder
from duoka.config.convert import converted_yaml
from duoka.config.foreign_task import Purpose, describe_task, read_asked
from duoka.config.load import Start, read_side_file, resolved_yaml
from duoka.errors import DuokaError, Faults
from duoka.plan.hardware import read_machine

_CPU_S = 3.0  # of the processor, not of the clock; on a crowded machine two in a thousand took over 1
# What is wrong with a file as a whole, or is not in it, has no line.
_OF_THE_FILE = ("is missing", "names no model", "does not train", "the file is empty", "is of no kind that duoka reads")
_WAYS = ("train", "side", "train", "task", "train", "export", "train", "chat", "train", "eval")
_EACH_DAY, _EACH_NIGHT, _AT_A_TIME = 1_000, 10_000, 250


class Hang(BaseException):
    """More than the time of a file; no `except Exception` catches it."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def readings(case: Case) -> Iterator[tuple[str, Callable[[], Any]]]:
    """All that the commands do with a file before anything starts, as they do it."""
    typed = tuple(word for word in case.overrides if not word.startswith("-"))

    def train() -> None:
        loaded = load_checked(case.name, typed, read_machine(), 2, local_size=2, say=False)
        resolved_yaml(loaded)
        converted_yaml(loaded, Path())
        check_claim(loaded, find_run_folder(loaded))

    def ask(purpose: Purpose) -> None:
        asked = read_asked(case.name, purpose, typed)
        if asked is not None:
            asked.model, asked.adapters, asked.template, asked.temperature()
            for name in ("top_p", "seed", "temperature"):
                asked.number(name)
            for name in ("max_new_tokens", "max_samples", "cutoff_len", "export_size"):
                asked.whole(name)
            asked.names("dataset"), asked.names("eval_dataset")

    yield "side", lambda: read_side_file(case.name, Start(2))
    yield "task", lambda: describe_task(case.name, typed)
    yield "train", train
    for purpose in ("export", "chat", "eval"):
        yield purpose, lambda purpose=purpose: ask(purpose)


def complaint(case: Case, only: str = "") -> str:
    """What duoka does wrong with the file; "" when it says yes, or no as it should. `only`: one of its ways."""
    for way, read in readings(case):
        if only not in ("", way):
            continue
        try:
            with at_most(_CPU_S):
                read()
        except Hang:
            return f"{way}: more than {_CPU_S:g} s"
        except Faults as error:
            lost = [
                fault.what
                for fault in error.faults
                if not fault.file
                or (fault.file == case.name and not fault.line and not any(word in fault.what for word in _OF_THE_FILE))
            ]
            if error.exit_code != 2 or lost:
                return f"{way}: ends with {error.exit_code}, without a line: {lost}"
        except DuokaError as error:
            if error.exit_code != 2:
                return f"{way}: ends with {error.exit_code}: {error}"
        except Exception:  # noqa: BLE001  (what is looked for)
            return f"{way}: {traceback.format_exc()[-1500:]}"
    return ""


def find_complaints(first: int, count: int, *, ways: tuple[str, ...]) -> list[str]:
    """What is wrong with so many files, each read in one of `ways`, in turn; "" is all of them."""
    files, found = seeds(), []
    for number in range(first, first + count):
        case = make_case(number, files)
        Path(case.name).write_bytes(case.content)
        said = complaint(case, ways[number % len(ways)])
        Path(case.name).unlink()
        if said:
            found.append(f"case {number}, {case.name}, {case.how}, {[word[:80] for word in case.overrides]}: {said}")
    return found


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    machine = read_machine()
    # Asked once, or nvidia-smi runs ten thousand times.
    monkeypatch.setattr(f"{__name__}.read_machine", lambda: machine)


def test_every_form_is_read_as_it_stands() -> None:
    """Or the mutations of it would never come far."""
    files = seeds()
    assert {"own.yaml", "new.yaml", "nested.yaml", "ds_all.json", "chat.yaml"} < set(files) and len(files) > 70
    for name, text in files.items():
        assert not complaint(Case(name, text.encode(), (), "")) if _written(name, text) else None


def _written(name: str, text: str) -> bool:
    Path(name).write_text(text, "utf-8")
    return True


@pytest.mark.parametrize("first", range(0, _EACH_DAY, _AT_A_TIME))
def test_a_broken_config_is_refused_at_its_line_within_seconds(first: int) -> None:
    found = find_complaints(first, _AT_A_TIME, ways=_WAYS)
    assert not found, f"{len(found)}:\n" + "\n".join(found[:5])


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(_EACH_DAY, _EACH_DAY + _EACH_NIGHT, 1_000))
def test_ten_thousand_broken_configs_are_refused_at_their_lines(first: int) -> None:
    found = find_complaints(first, 1_000, ways=("",))
    assert not found, f"{len(found)}:\n" + "\n".join(found[:10])
