"""Data sets of the Hugging Face Hub by name: fetched once, kept as Parquet in the cache, then files like any other.

Needs the extra `hub` and a network; without them the answer is a Fault that says what to do.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

from duoka.errors import Fault, StorageError
from duoka.runs.cache import cache_folder, hold_lock, make_folder


def is_hub_id(name: str) -> bool:
    """owner/name, and no path."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name) is not None


def fetch_set(name: str, subset: str | None = None, split: str = "train") -> Path | Fault:
    """The folder of a Hub data set's Parquet file."""
    facts = json.dumps([name, subset, split])
    key = hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()
    folder = cache_folder() / "hub" / f"{name.replace('/', '--')}-{split}-{key}"
    if folder.is_dir():
        return folder
    try:
        from datasets import load_dataset
    except ImportError:
        what = f"there is no file or folder {name!r}, and a data set of the Hub needs the extra `hub`"
        return Fault(what, fix="pip install 'duoka[hub]'; or download it, and name its file or folder")
    try:
        # Parquet and JSON only: a data set that needs its own Python code is refused by the library.
        rows = load_dataset(name, subset, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        what = f"{name!r} is no file here, and could not be fetched from the Hub ({reason})"
        return Fault(what, fix="check the name, the split and the network; or download it, and name its file")
    root = make_folder(folder.parent)
    try:
        with hold_lock(root / f"{folder.name}.lock", on_wait=lambda: None):
            if not folder.is_dir():
                draft = folder.with_name(f"{folder.name}.draft")
                shutil.rmtree(draft, ignore_errors=True)
                draft.mkdir()
                rows.to_parquet(str(draft / "data.parquet"))
                os.replace(draft, folder)
    except OSError as error:
        raise StorageError(f"cannot keep {name!r}: {error.strerror or error}", where=str(root)) from None
    return folder
