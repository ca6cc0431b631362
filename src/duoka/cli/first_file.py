"""A first config on disk, as `duoka init` and `duoka new` write it: under a YAML's name, and over no file."""

from __future__ import annotations

import os
from pathlib import Path


def check_name(file: str, verb: str) -> Path:
    """The path of a file that may be written."""
    from duoka.errors import ConfigError

    path = Path(file)
    if path.is_dir():
        example = path / "sft.yaml"
        raise ConfigError(f"{file} is a folder", fix=f"give a file:   duoka {verb} {example}")
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{file} does not end in .yaml", fix=f"write:   duoka {verb} {file}.yaml")
    if path.exists():
        raise _exists(file, verb)
    return path


def write_first(path: Path, text: str, verb: str) -> None:
    from duoka.errors import StorageError
    from duoka.process.no_room import disk_error, more_room

    is_ours = False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # "x" checks and creates in one step: no file is overwritten in a race either.
        with path.open("x", encoding="utf-8") as out:
            is_ours = True
            out.write(text)
    except FileExistsError:
        raise _exists(str(path), verb) from None
    except OSError as error:
        if is_ours:
            path.unlink(missing_ok=True)
        what = f"cannot write {path}: {error.strerror or os.strerror(error.errno or 0)}"
        fix = "give a file in a folder that you may write to"
        raise StorageError(what, fix=f"{more_room(error)}, or {fix}" if disk_error(error) else fix) from None


def _exists(file: str, verb: str) -> Exception:
    from duoka.errors import ConfigError

    what = f"{file} exists already, and {verb} overwrites nothing"
    return ConfigError(what, fix="give another name, or delete it first")
