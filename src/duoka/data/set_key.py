"""The name under which a set's tokens are kept: a hash of all that decides them, and of nothing else.

`prepare` asks for it before it tokenizes a set, and again when it has: files may change while they are read.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from duoka.data.read.records import told_by_name
from duoka.data.read.registry import ResolvedSet
from duoka.data.tokens.tokenize import Job
from duoka.data.tokens.tokenizer import ChatTokenizer
from duoka.runs.cache import file_version, is_settled, make_folder
from duoka.runs.folder import read_json, write_json_atomic

TOKENS_VERSION = 10  # raise it when the same input would give other tokens


def key_of(found: ResolvedSet, job: Job, tokenizer: ChatTokenizer, root: Path) -> str:
    """No path, no name, no split: of a name only what says how the file is read."""
    facts: dict[str, Any] = {
        "version": TOKENS_VERSION,
        "files": [file_digest(path, root) for path in found.files],
        "form": found.form.to_json(),
        "tokenizer": tokenizer.fingerprint,
        "targets": job.targets,
        "max_length": job.max_length,
        "on_long": job.on_long,
        "max_samples": found.max_samples,
    }
    told = [told_by_name(path) for path in found.files]
    facts |= {"told by names": told} if any(told) else {}
    text = json.dumps(facts, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def file_digest(path: Path, root: Path) -> str:
    """A hash of the file's content, remembered by the file's version so that a large one is read for it once."""
    found = file_version(path)
    seen: dict[str, Any] = {"path": str(path), "version": found}
    memory = make_folder(root / "files") / hashlib.blake2b(str(path).encode(), digest_size=12).hexdigest()
    known = read_json(memory) or {}
    if all(known.get(name) == value for name, value in seen.items()):
        return str(known["digest"])
    digest = hashlib.blake2b(digest_size=20)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if is_settled(found):
        write_json_atomic(memory, {**seen, "digest": digest.hexdigest()})
    return digest.hexdigest()
