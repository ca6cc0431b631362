"""`duoka doctor --fix`: which fixes are commands that may be run after a yes.

Only what a user could take back: packages of this environment, and files copied from here. Never as root, never what
a machine's owner decides (drivers, clocks, firewalls); these stay words to read.
"""

from __future__ import annotations

import re
import shlex
import sys

_SPEC = re.compile(r"[A-Za-z0-9][\w.-]*(\[[\w,-]+\])?(==[\w.+!-]+)?")


def safe_command(fix: str) -> list[str] | None:
    """The words to run, without a shell; None for anything else."""
    try:
        words = shlex.split(fix)
    except ValueError:
        return None
    before: list[str] = []
    if words[:1] == ["ssh"]:
        size = 4 if words[1:2] == ["-p"] else 2
        before, words = words[:size], words[size:]
        if len(before) < size or before[-1].startswith("-") or (size == 4 and not before[2].isdecimal()):
            return None
    if words[:2] == ["pip", "install"] and not before:
        words = [sys.executable, "-m", *words]
    is_python = bool(words) and re.fullmatch(r"[\w./+-]*python[\d.]*", words[0]) is not None
    is_install = is_python and words[1:4] == ["-m", "pip", "install"] and len(words) > 4
    if is_install and all(_SPEC.fullmatch(word) for word in words[4:]):
        return [*before, shlex.join(words)] if before else words  # ssh hands one string to a shell there
    is_copy = len(words) == 4 and words[:2] == ["rsync", "-a"] and not before
    if is_copy and not any(word.startswith("-") for word in words[2:]) and ":" in words[3]:
        return words
    return None
