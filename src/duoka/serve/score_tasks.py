"""Tasks of a run or model: computed by the processes of a world, kept in files, gone on with after an interruption.

    OUT/TASK-KEY/items.jsonl   a line per item, the same at any number of processes
    OUT/TASK-KEY/result.json   the score, with n, standard error, and digests of prompts, template and model
    OUT/TASK-KEY/part.jsonl    rows so far, while it is computed

KEY is a digest of all that decides an answer; a result under it is not computed again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from duoka.config.adapters import FACTS, WEIGHTS, find_adapter
from duoka.config.schema import ModelConfig, ParallelConfig
from duoka.errors import ConfigError
from duoka.hub.base import model_fingerprint
from duoka.runs.folder import read_json, write_json_atomic, write_text_atomic
from duoka.runs.manifest import MANIFEST
from duoka.serve.load_run import Trained, agree_on_checkpoint, choose_dtype, load_chat_tokenizer, load_trained
from duoka.tasks.find import find_scored, in_order
from duoka.tasks.task import Task

if TYPE_CHECKING:
    from duoka.comm.world import World
    from duoka.parallel.task_rows import Prompts, TaskScore

ITEMS, RESULT, PART = "items.jsonl", "result.json", "part.jsonl"
_SCALES = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")  # of adapter_config.json
VERSION = 1  # raise it when the same model would answer or be scored otherwise


@dataclass(frozen=True)
class Asked:
    """What `duoka eval --tasks` was asked for. Precision auto is fp32: an answer then hangs on nothing beside it."""

    names: tuple[str, ...]
    limit: int | None = None
    batch: int = 16
    precision: str = "fp32"
    run_code: bool = False
    max_new_tokens: int | None = None


def find_asked(asked: Asked, base: Path = Path()) -> list[Task]:
    """The tasks, refused before a model is loaded where they cannot be measured."""
    tasks = [task for name in asked.names for task in find_scored(name, base)]
    names = [task.name for task in tasks]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise ConfigError(f"task {twice} is named twice", fix="name it once")
    for task in tasks:
        if task.runs_code and not asked.run_code:
            raise ConfigError(
                f"task {task.name} runs programs that the model wrote, on this machine, as this user",
                fix="add --run-code where that is safe (a container without network and secrets)",
            )
        if not task.items("test"):
            raise ConfigError(f"task {task.name} has no test items", fix="name the folder that holds them")
    return tasks


def score_tasks(
    trained: Trained, asked: Asked, out: Path, *, base_only: bool = False, say: Callable[[str], None]
) -> list[TaskScore]:
    """Every task's score, on every process of the world; rank 0 writes the files, and says each when it is there."""
    from duoka.comm.world import end_world, start_world

    tasks = find_asked(asked)
    world = start_world(ParallelConfig())
    try:
        trained = agree_on_checkpoint(world, trained)
        return _score_all(world, trained, asked, tasks, out, base_only, say)
    finally:
        end_world(world)


def _score_all(
    world: World, trained: Trained, asked: Asked, tasks: Sequence[Task], out: Path, base_only: bool,
    say: Callable[[str], None],
) -> list[TaskScore]:  # fmt: skip
    from duoka.model.answer import stop_tokens, window_of
    from duoka.model.build import LossModel
    from duoka.parallel.task_rows import make_prompts
    from duoka.parallel.task_score import build_judge

    tokenizer = load_chat_tokenizer(trained)
    model: LossModel | None = None
    scores = []
    folder_model = ModelConfig(name=trained.name, trust_remote_code=trained.trust_remote_code)
    is_off = trained.config is not None and not trained.config.data.prefix_sharing
    for task in tasks:
        if model is None:
            lm = load_trained(trained, dtype=choose_dtype(asked.precision), base_only=base_only)
            model = build_judge(
                lm, folder_model, trained.base, world.device, asked.precision,
                "data.prefix_sharing is false" if is_off else "",
            )  # fmt: skip
            stops = stop_tokens(model.core, tokenizer)
        items, window = in_order(task, asked.limit), window_of(model.core)
        prompts = make_prompts(task, items, tokenizer, window, asked.max_new_tokens)
        facts = _facts(trained, asked, prompts, base_only)
        scores.append(_score_one(world, prompts, model, stops, asked, _folder_of(out, prompts, facts), facts))
        if world.is_main:
            say(scores[-1].sentence())
    return scores


def _facts(trained: Trained, asked: Asked, prompts: Prompts, base_only: bool) -> dict[str, Any]:
    """All that decides an answer."""
    return {
        "version": VERSION,
        "task": prompts.task.name,
        "prompts": prompts.digest,
        "template": prompts.tokenizer.fingerprint[:16],
        "model": weights_digest(trained, base_only=base_only),
        "precision": asked.precision,
        "max_new_tokens": prompts.max_new_tokens if prompts.task.kind == "generate" else 0,
    }


def _folder_of(out: Path, prompts: Prompts, facts: dict[str, Any]) -> Path:
    key = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=4).hexdigest()
    return out / f"{re.sub(r'[^a-z0-9_.-]+', '-', prompts.task.name.lower())}-{key}"


def weights_digest(trained: Trained, *, base_only: bool = False) -> str:
    """Tells the weights that answer from all others, wherever they lie."""
    parts = [model_fingerprint(trained.base if base_only or trained.full is None else trained.full)]
    if not base_only:
        parts += [] if trained.adapter is None else [_adapter_digest(trained.adapter)]
        if trained.checkpoint is not None:
            parts.append(hashlib.blake2b((trained.checkpoint / MANIFEST).read_bytes(), digest_size=16).hexdigest())
        # By what they hold: one that was trained anew has the name of the one before.
        parts += [_adapter_digest(find_adapter(name, Path())) for name in trained.merged]
    return hashlib.blake2b("/".join(parts).encode(), digest_size=8).hexdigest()


def _adapter_digest(folder: Path) -> str:
    """Its weights, and by how much they count."""
    facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    told = hashlib.blake2b((folder / WEIGHTS).read_bytes(), digest_size=16)
    told.update(json.dumps([facts.get(name) for name in _SCALES], sort_keys=True).encode())
    return told.hexdigest()


def _score_one(
    world: World, prompts: Prompts, model: Any, stops: frozenset[int], asked: Asked, folder: Path,
    facts: dict[str, Any],
) -> TaskScore:  # fmt: skip
    from duoka.parallel.task_rows import TaskScore, score_items, summarize
    from duoka.parallel.task_score import compute_rows

    kept = read_result(folder) if world.is_main else None
    kept = world.agree(kept)
    if kept is not None:
        return TaskScore(**kept)
    known: dict[int, Any] = world.agree(_read_part(folder / PART) if world.is_main else None)
    with _Part(folder / PART, world.is_main) as part:
        results = compute_rows(
            prompts, model, world, stop_ids=stops, precision=asked.precision, batch=asked.batch, known=known,
            keep=part.add,
        )  # fmt: skip
    found: TaskScore | None = None
    if world.is_main:
        scored = score_items(prompts, results)
        found = summarize(prompts.task, scored)
        write_text_atomic(folder / ITEMS, "".join(one.line() + "\n" for one in scored))
        write_json_atomic(folder / RESULT, {**facts, "limit": asked.limit, "score": asdict(found)})
        (folder / PART).unlink(missing_ok=True)
    agreed: TaskScore = world.agree(found)
    return agreed


def read_result(folder: Path) -> dict[str, Any] | None:
    """A finished task's score; its lines lie beside it."""
    found = read_json(folder / RESULT)
    return found["score"] if found is not None and (folder / ITEMS).is_file() else None


def _read_part(path: Path) -> dict[int, Any]:
    """Rows of an interrupted computation; its last line may be half of one."""
    if not path.is_file():
        return {}
    found: dict[int, Any] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            one = json.loads(line)
        except ValueError:
            break
        found |= {int(row): result for row, result in one.items()}
    return found


class _Part:
    """Appends each round's rows as one line, on the disk before the next round."""

    def __init__(self, path: Path, writes: bool) -> None:
        self._path, self._writes = path, writes
        self._file: Any = None

    def __enter__(self) -> _Part:
        if self._writes:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            known = _read_part(self._path)
            # Half a line of a killed process would spoil the next one.
            write_text_atomic(self._path, json.dumps(known) + "\n" if known else "")
            self._file = self._path.open("a", encoding="utf-8")
        return self

    def add(self, found: dict[int, Any]) -> None:
        self._file.write(json.dumps(found) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
