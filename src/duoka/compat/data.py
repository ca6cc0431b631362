"""`load_dataset`: a config's conversations, tokenized once for all ranks, as data sets that know this rank's share."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset

from duoka.compat.config import STEP_SAMPLES, Part
from duoka.data.feed.loader import IGNORED
from duoka.data.feed.map_loader import deal
from duoka.data.tokens.token_store import TokenStore
from duoka.errors import ConfigError

if TYPE_CHECKING:
    from duoka.accelerator import Accelerator


class Conversations(Dataset[dict[str, torch.Tensor]]):
    """All samples of a store, as transformers' models take them (they shift labels themselves)."""

    def __init__(self, store: TokenStore) -> None:
        self.store = store

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = self.store.sample(index)
        ids = torch.from_numpy(sample.input_ids.astype("int64"))
        labels = ids.where(torch.from_numpy(sample.is_target.copy()), torch.tensor(IGNORED))
        return {"input_ids": ids, "labels": labels}


class Pad:
    """Rows of one length, filled up on the right."""

    def __init__(self, pad_id: int) -> None:
        self.pad_id = pad_id

    def __call__(self, rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        def stack(values: list[torch.Tensor], filling: int) -> torch.Tensor:
            return torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=filling)

        return {
            "input_ids": stack([row["input_ids"] for row in rows], self.pad_id),
            "labels": stack([row["labels"] for row in rows], IGNORED),
            "attention_mask": stack([torch.ones_like(row["input_ids"]) for row in rows], 0),
        }


class SharedConversations(Dataset[dict[str, torch.Tensor]]):
    """This rank's share: `len` and `[i]` are of it, `num_total` of all. `dataloader` is what `prepare` takes: it gives
    every rank its part of each batch, shuffled anew in each epoch."""

    def __init__(self, whole: Conversations, rank: int, num_ranks: int, batch_size: int, collate: Pad) -> None:
        self.whole = whole
        self.num_total = len(whole)
        self.batch_size = batch_size
        self.collate = collate
        mine = deal(range(self.num_total), rank, num_ranks)
        self.sample_ids = range(mine.start, min(mine.stop, self.num_total))

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.whole[self.sample_ids[index]]

    @cached_property
    def dataloader(self) -> DataLoader[dict[str, torch.Tensor]]:
        return DataLoader(self.whole, batch_size=self.batch_size, shuffle=True, collate_fn=self.collate)


def load_dataset(
    data: Part, accelerator: Accelerator | None = None
) -> tuple[SharedConversations, SharedConversations | None]:
    """(training data, evaluation data or None); prints once how many there truly are on each rank."""
    from duoka.data.prepare import prepare_data
    from duoka.hub.models import model_folder
    from duoka.units import parse_amount

    config, base = data.run, data.loaded.base
    prepared = prepare_data(config, base, model_folder(config.model, base))
    rank, size = (accelerator.process_index, accelerator.num_processes) if accelerator else (0, 1)
    steps = accelerator.gradient_accumulation_steps if accelerator else 1
    micro = config.train.micro_batch
    amount = parse_amount(config.train.global_batch) if micro == "auto" else parse_amount(micro)
    rows = max(1, amount.count // (size * steps)) if micro == "auto" else amount.count
    batch_size = rows if amount.unit == "samples" else max(1, rows // config.data.max_length)
    if accelerator:
        data.found[STEP_SAMPLES] = batch_size * size * steps
    collate = Pad(prepared.pad_id)

    def share_of(store: object) -> SharedConversations:
        if not isinstance(store, TokenStore):
            raise ConfigError(
                f"load_dataset gives conversations, and stage {config.stage.name} learns {config.stage.kind.learns}",
                fix="train it with duoka's own loop:   duoka train FILE",
            )
        return SharedConversations(Conversations(store), rank, size, batch_size, collate)

    train = share_of(prepared.train)
    held_out = None if prepared.eval is None else share_of(prepared.eval)
    if accelerator:
        shares: Any = accelerator.gather_object([len(train)])
        accelerator.print(f"{train.num_total:,} conversations, by rank: {', '.join(f'{n:,}' for n in shares)}")
    return train, held_out
