"""Texts to vectors: the mean of the last hidden states, scaled to length 1, a row for each line in the lines' order.

Called by `duoka embed` in each process of its world. Every process loads the model once and keeps it (nothing is
copied per batch, as nn.DataParallel would), and writes its own rows into the one file.
"""

from __future__ import annotations

import json
import os
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from duoka.data.tokens.rows import refuse_texts_without_row
from duoka.errors import ConfigError, DataError, typed
from duoka.plan.find_family import longest_text
from duoka.runs.disk_room import reserve_disk
from duoka.serve.load_run import Trained, agree_on_checkpoint, choose_dtype, load_chat_tokenizer, load_trained

if TYPE_CHECKING:
    import numpy as np
    import torch

    from duoka.comm.world import World

TOKENS_AT_ONCE = 8192
_RECORDS = (".json", ".csv", ".tsv", ".parquet")  # whose lines are no texts


@dataclass(frozen=True)
class Embedded:
    """What was written: `num_empty` lines have no token, and a row of zeros; `num_cut` were longer than allowed."""

    path: Path
    num_texts: int
    num_dims: int
    num_empty: int
    num_cut: int
    world_size: int

    def lines(self) -> list[str]:
        notes = [f"{self.num_empty:,} empty ones are rows of zeros"] if self.num_empty else []
        notes += [f"{self.num_cut:,} were cut"] if self.num_cut else []
        how = "1 process" if self.world_size == 1 else f"{self.world_size} processes"
        said = f" ({'; '.join(notes)})" if notes else ""
        return [f"{self.num_texts:,} texts{said}, {self.num_dims:,} numbers each, by {how}: {self.path}"]


def read_texts(path: Path) -> list[str]:
    """One text per line, or of a .jsonl one record with a `text`; the order of lines is the order of rows."""
    if path.suffix.lower() in _RECORDS and path.is_file():
        raise ConfigError(
            f"{path} holds records, and vectors are made of texts",
            fix='write its texts into a .jsonl, one {"text": ...} a line, or into a .txt, one text a line',
        )
    texts = _read_lines(path)
    return [_text_of(path, place, line) for place, line in enumerate(texts, 1)] if _is_jsonl(path) else texts


def _is_jsonl(path: Path) -> bool:
    return path.suffix.lower() in (".jsonl", ".ndjson")


def _text_of(path: Path, place: int, line: str) -> str:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}, line {place} is no JSON: {error}", fix="rename a file of plain texts to .txt"
        ) from None
    text = found.get("text") if isinstance(found, dict) else found
    if not isinstance(text, str):
        keys = f" (its keys: {', '.join(found)})" if isinstance(found, dict) else ""
        raise DataError(
            f'{path}, line {place} has no "text" that is text{keys}',
            fix='write one {"text": ...} a line; a file of plain texts is a .txt',
        )
    return text


def _read_lines(path: Path) -> list[str]:
    try:
        *texts, last = path.read_text(encoding="utf-8-sig").split("\n")  # not at marks that stand inside of texts
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}", fix="write a text file with one text per line") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder", fix="name one text file in it, with one text per line") from None
    except UnicodeDecodeError as error:
        what = f"{path} is no UTF-8 text: {error.reason} at byte {error.start}"
        raise DataError(what, fix=_unpack_or_convert(path)) from None
    texts += [last] if last else []
    if not texts:
        raise DataError(f"{path} is empty", fix="write one text per line")
    return texts


def _unpack_or_convert(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(2)
    if head == b"\x1f\x8b":
        return f"unpack it: gunzip -k {typed(path)}"
    kind = "UTF-16" if head in (BOM_UTF16_LE, BOM_UTF16_BE) else "ITS_ENCODING"
    return f"write it as UTF-8: iconv -f {kind} -t UTF-8 {typed(path)} > new{path.suffix}"


def embed(
    trained: Trained,
    texts: Sequence[str],
    target: Path,
    *,
    max_length: int,
    precision: str = "auto",
    base_only: bool = False,
) -> Embedded | None:
    """Write `target` (.npy, float32) together with the other processes; the summary on rank 0, None on others."""
    import numpy as np

    from duoka.comm.world import end_world, start_world
    from duoka.config.schema import ParallelConfig

    world = start_world(ParallelConfig())
    draft = target.with_name(f".{target.name}.draft")  # rows that are not there yet would pass for vectors of zeros
    try:
        trained = agree_on_checkpoint(world, trained)
        tokenizer = load_chat_tokenizer(trained)
        lm = load_trained(trained, dtype=choose_dtype(precision), base_only=base_only).to(world.device)
        max_length = min(max_length, longest_text(lm.config.to_dict()) or max_length)  # type: ignore[union-attr, operator]
        num_dims = int(lm.config.get_text_config().hidden_size)  # type: ignore[union-attr, operator]
        if world.is_main:
            np.lib.format.open_memmap(draft, mode="w+", dtype=np.float32, shape=(len(texts), num_dims)).flush()
            with draft.open("rb+") as file:
                reserve_disk(file.fileno(), draft.stat().st_size)
        world.barrier()
        own = {place: tokenizer.encode(texts[place])[0] for place in range(world.rank, len(texts), world.size)}
        if not trained.is_adapted:  # an adapter may have brought rows
            refuse_texts_without_row(own.values(), tokenizer, trained.full or trained.base)
        counts = world.sum(list(_fill(world, lm, own, _open_shared(draft), max_length)))
        if world.is_main:
            os.replace(draft, target)
        world.barrier()
    finally:
        if world.is_main:
            draft.unlink(missing_ok=True)
        end_world(world)
    if not world.is_main:
        return None
    return Embedded(target, len(texts), num_dims, int(counts[0]), int(counts[1]), world.size)


def _open_shared(target: Path) -> np.ndarray:
    import numpy as np

    try:
        rows: np.ndarray = np.lib.format.open_memmap(target, mode="r+")
    except FileNotFoundError:
        raise ConfigError(
            f"rank 0 made {target}, and it does not exist on this machine",
            fix="write to a folder that all machines share, or use the processes of one machine",
        ) from None
    return rows


def _fill(
    world: World, lm: torch.nn.Module, ids: dict[int, list[int]], rows: np.ndarray, longest: int
) -> tuple[float, float]:
    """The rows of this rank's texts; returns how many of these were empty, and cut."""
    import torch

    from duoka.model.own_lengths import find_stretch

    num_cut = sum(len(one) > longest for one in ids.values())
    ids = {place: one[:longest] for place, one in ids.items()}
    decoder: Any = lm.get_base_model() if hasattr(lm, "get_base_model") else lm  # type: ignore[operator]
    decoder = decoder.get_decoder()
    for places in _batches(ids):
        lengths = torch.tensor([len(ids[place]) for place in places])
        batch = torch.zeros(len(places), int(lengths.max()), dtype=torch.long)
        for row, place in enumerate(places):
            batch[row, : lengths[row]] = torch.tensor(ids[place])
        real = torch.arange(batch.shape[1])[None] < lengths[:, None]
        options: dict[str, torch.Tensor] = {"input_ids": batch.to(world.device)}
        if find_stretch(decoder.config) is not None:  # padding is no part of a text, nor of its length
            options["position_ids"] = ((real.cumsum(1) - 1) * real).to(world.device)
        with torch.no_grad():
            # Padding is on the right, so causal attention never sees it, and the mean leaves it out.
            hidden = decoder(**options, use_cache=False).last_hidden_state
        mean = (hidden.float() * real[..., None].to(world.device)).sum(1) / lengths[:, None].to(world.device)
        rows[places] = torch.nn.functional.normalize(mean, dim=-1).cpu().numpy()
    rows.flush()  # type: ignore[attr-defined]
    return float(sum(not one for one in ids.values())), float(num_cut)


def _batches(ids: dict[int, list[int]]) -> Iterator[list[int]]:
    """Places of texts of about the same length, longest first: the first batch shows whether memory is enough."""
    places = sorted((place for place, one in ids.items() if one), key=lambda place: -len(ids[place]))
    while places:
        count = max(1, TOKENS_AT_ONCE // len(ids[places[0]]))
        yield places[:count]
        places = places[count:]
