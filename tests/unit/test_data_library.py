"""The loader in people's own loops: state, prefetch, fixed rows, text rows, and exact wrappers for any data set."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data_loader import MAX_LENGTH, PAD, loader_of, pairs_learned, store_of

from duoka.data.feed.ahead import Walk, prefetched
from duoka.data.feed.epoch_plan import EpochPlan
from duoka.data.feed.loader import IGNORED, GlobalBatch, Loader, Place
from duoka.data.feed.map_loader import ExactLoader, ExactStream
from duoka.data.feed.prefetch import EpochLoader
from duoka.data.feed.text_rows import TextRows
from duoka.data.tokens.template import Sample
from duoka.data.tokens.token_store import TokenPart, TokenStore, pack_arrays, write_part
from duoka.errors import ConfigError
from duoka.units import Amount


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    lengths = np.random.default_rng(5).integers(2, MAX_LENGTH + 1, 45)
    return store_of(tmp_path_factory.mktemp("store") / "part", lengths.tolist())


def places(batches: Any) -> list[tuple[int, int, list[int]]]:
    return [(batch.epoch, batch.index, batch.sample_ids.tolist()) for batch in batches]


@pytest.mark.parametrize("prefetch", [0, 3])
def test_state_in_the_middle_of_an_epoch_goes_on_at_another_world_size(store: TokenStore, prefetch: int) -> None:
    loader = EpochLoader(loader_of(store), prefetch=prefetch)
    whole = places(loader) + places(loader)
    assert len(whole) == 2 * len(loader)
    first = EpochLoader(loader_of(store, 0, 2), prefetch=prefetch)
    walk = iter(first)
    seen = places(itertools.islice(walk, 3))
    state = first.state_dict()
    walk.close()
    assert state["index"] == 3, "what was built ahead but not handed over is still to come"
    second = EpochLoader(loader_of(store, 2, 3), prefetch=prefetch)
    second.load_state_dict(state)
    assert seen + places(second) + places(second) == whole


def test_set_epoch_begins_that_epoch(store: TokenStore) -> None:
    loader = EpochLoader(loader_of(store))
    loader.set_epoch(4)
    assert {batch.epoch for batch in loader} == {4}


def test_the_place_of_another_order_is_refused(store: TokenStore) -> None:
    state = EpochLoader(loader_of(store, batch=Amount(8, "samples"))).state_dict()
    with pytest.raises(ConfigError, match="global_batch"):
        EpochLoader(loader_of(store, batch=Amount(4, "samples"))).load_state_dict(state)


def test_pinned_batches_are_the_same_batches(store: TokenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for pinning, which needs a GPU: each tensor is pinned once, and nothing else changes."""
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self.clone()) or pinned[-1])
    plain, held = EpochLoader(loader_of(store), prefetch=0), EpochLoader(loader_of(store), pin_memory=True)
    num_tensors = 0
    for one, other in zip(plain, held, strict=True):
        for a, b in zip(one.micro_batches, other.micro_batches, strict=True):
            tensors = {name: value for name, value in vars(a).items() if isinstance(value, torch.Tensor)}
            num_tensors += len(tensors) + 1  # a GPU is told where targets are, too
            assert torch.equal(a.labels.reshape(-1)[b.target_places], a.labels[a.labels != -100])
            assert all(torch.equal(value, vars(b)[name]) for name, value in tensors.items())
            assert all(any(vars(b)[name] is one for one in pinned) for name in tensors)
            assert (a.num_targets, a.num_tokens, a.num_samples) == (b.num_targets, b.num_tokens, b.num_samples)
    assert len(pinned) == num_tensors > 0


def test_prefetching_ends_its_thread_and_passes_errors_on() -> None:
    before = threading.active_count()
    walk = prefetched(itertools.count(), 2)
    assert [next(walk) for _ in range(3)] == [0, 1, 2]
    walk.close()
    assert threading.active_count() == before

    def broken() -> Iterator[int]:
        yield 1
        raise ValueError("from the data")

    with pytest.raises(ValueError, match="from the data"):
        list(prefetched(broken(), 2))
    assert threading.active_count() == before


def _ids(batches: list[GlobalBatch]) -> list[list[list[int]]]:
    return [[micro.input_ids.flatten().tolist() for micro in batch.micro_batches] for batch in batches]


def test_a_runs_walk_is_built_ahead_in_the_same_order_from_any_place(store: TokenStore) -> None:
    before = threading.active_count()
    loader = loader_of(store, 1, 2)
    built: list[tuple[int, int]] = []
    global_batch = loader.global_batch
    loader.global_batch = lambda *at: (built.append(at), global_batch(*at))[1]  # type: ignore[method-assign]
    every = list(loader.from_cursor(0, 0, 2.0))
    built.clear()
    with Walk[Place, GlobalBatch](lambda place: loader.batches(place, 2.0)) as walk:
        walk.go_to(Place())
        seen = [next(walk), next(walk)]
        while len(built) < 3:  # the thread's work; a time limit ends this where nothing is built ahead
            time.sleep(0.001)
        walk.go_to(seen[0].after)  # back, as a rollback goes: what was built ahead is not handed over
        again = [next(walk), next(walk)]
        assert threading.active_count() == before + 1
    assert _ids(seen) == _ids(every[:2])
    assert _ids(again) == _ids(every[1:3])
    assert threading.active_count() == before, "the thread outlives its walk"
    assert _ids(list(loader.batches(every[3].after, 2.0))) == _ids(every[4:])


def test_what_lies_ahead_is_cut_anew_after_memory_was_short(store: TokenStore) -> None:
    loader, small = loader_of(store), loader_of(store, micro=Amount(MAX_LENGTH, "tokens"))
    walk = loader.batches(Place(), 1.0)
    first, expected = next(walk), list(small.from_cursor(0, 0, 1.0))
    loader.micro = small.micro
    rest = list(walk)
    assert _ids([first]) != _ids(expected[:1]), "both sizes cut alike: this test shows nothing"
    assert _ids(rest) == _ids(expected[1:])


def test_a_fault_of_the_data_reaches_the_loop_as_itself_and_ends_the_thread(store: TokenStore) -> None:
    before, loader = threading.active_count(), loader_of(store)
    fault = OSError("the disk is gone")
    global_batch = loader.global_batch

    def broken(epoch: int, index: int) -> GlobalBatch:
        if index == 2:
            raise fault
        return global_batch(epoch, index)

    loader.global_batch = broken  # type: ignore[method-assign]
    with (
        pytest.raises(OSError, match="the disk is gone") as caught,
        Walk[Place, GlobalBatch](lambda place: loader.batches(place, 1.0)) as walk,
    ):
        walk.go_to(Place())
        assert [next(walk).index, next(walk).index] == [0, 1]
        next(walk)
    assert caught.value is fault
    assert threading.active_count() == before


# --------------------------------------------------------------------------------------------- fixed rows


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 30))
def test_fixed_rows_learn_the_same_in_one_shape(store: TokenStore, num_ranks: int, rows: int, batch: int) -> None:
    alone = loader_of(store, batch=Amount(batch, "samples"), micro=Amount(10**6, "tokens"), packing=False)
    options: dict[str, Any] = {"batch": Amount(batch, "samples"), "micro": Amount(rows * MAX_LENGTH, "tokens")}
    ranks = [loader_of(store, rank, num_ranks, fixed_rows=True, **options) for rank in range(num_ranks)]
    for index in range(alone.plan.num_batches()):
        expected = alone.global_batch(0, index)
        parts = [rank.global_batch(0, index) for rank in ranks]
        every = [one for part in parts for one in part.micro_batches]
        assert {tuple(one.input_ids.shape) for one in every} == {(1, rows * MAX_LENGTH)}
        assert len({len(part.micro_batches) for part in parts}) == 1
        assert pairs_learned(every) == pairs_learned(expected.micro_batches)
        assert sum(one.num_tokens for one in every) == expected.num_tokens
        assert sum(one.num_targets for one in every) == expected.global_targets
        assert sum(one.num_samples for one in every) == expected.num_samples


def test_fixed_rows_refuse_padding(store: TokenStore) -> None:
    with pytest.raises(ValueError, match="fixed rows are packed"):
        loader_of(store, packing=False, fixed_rows=True)


# ---------------------------------------------------------------------------------------------- text rows


def text_store(folder: Path, lengths: list[int]) -> TokenStore:
    """Documents whose tokens are all different, so that each can be followed."""
    starts = np.cumsum([10, *lengths])
    samples = [
        Sample(np.arange(start, start + length, dtype=np.int32), np.ones(length, bool))
        for start, length in zip(starts, lengths, strict=False)
    ]
    folder.mkdir()
    write_part(folder, [pack_arrays(samples)], {})
    return TokenStore([TokenPart(folder)])


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=15), st.integers(2, 17), st.integers(1, 3))
def test_rows_of_text_predict_every_token_once(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], row_tokens: int, num_ranks: int
) -> None:
    rows = TextRows(text_store(tmp_path_factory.mktemp("text") / "part", lengths), row_tokens)
    plan = EpochPlan(
        rows.lengths, rows.num_targets, fingerprint=rows.fingerprint, seed=1, global_batch=Amount(4, "samples")
    )
    learned: list[tuple[int, int]] = []
    for rank in range(num_ranks):
        loader = Loader(
            rows, plan, rank=rank, num_ranks=num_ranks, micro=Amount(2, "samples"), packing=True,
            max_length=row_tokens, pad_id=PAD,
        )  # fmt: skip
        for batch in loader.from_cursor(0, 0, 1.0):
            learned += targets_of(batch)
    starts = np.cumsum([10, *lengths])
    expected = [(t - 1, t) for start, n in zip(starts, lengths, strict=False) for t in range(start + 1, start + n)]
    assert sorted(learned) == expected
    assert int(rows.num_targets.sum()) == len(expected)
    assert (rows.lengths[:-1] == row_tokens).all()


def targets_of(batch: GlobalBatch) -> list[tuple[int, int]]:
    pairs = []
    for micro in batch.micro_batches:
        for token, label in zip(micro.input_ids[0].tolist(), micro.labels[0].tolist(), strict=True):
            if label != IGNORED:
                pairs.append((token, label))
    assert len(pairs) == sum(micro.num_targets for micro in batch.micro_batches)
    return pairs


def test_rows_are_for_text_only(store: TokenStore) -> None:
    with pytest.raises(ValueError, match="plain text"):
        TextRows(store, 8)


# --------------------------------------------------------------------------------------------- exact wrappers


class Numbers:
    def __init__(self, count: int) -> None:
        self.count = count
        self.num_read = 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        self.num_read += 1
        return 100 + index


class Places:
    """An iterable that knows its place."""

    def __init__(self, count: int) -> None:
        self.count, self.at, self.num_read = count, 0, 0

    def __iter__(self) -> Iterator[int]:
        while self.at < self.count:
            self.at += 1
            self.num_read += 1
            yield 99 + self.at
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


KINDS = st.sampled_from(["map", "iterable", "stateful"])


def wrapped(kind: str, count: int, global_batch: int, rank: int, num_ranks: int) -> Any:
    layout = {"global_batch": global_batch, "rank": rank, "num_ranks": num_ranks, "collate": list}
    if kind == "map":
        return ExactLoader(Numbers(count), **layout)  # type: ignore[arg-type]
    data = Places(count) if kind == "stateful" else [100 + number for number in range(count)]
    return ExactStream(data, **layout)  # type: ignore[arg-type]


@settings(max_examples=80, deadline=None)
@given(KINDS, st.integers(0, 60), st.integers(1, 12), st.integers(1, 5))
def test_any_data_set_is_seen_once_over_all_ranks(kind: str, count: int, global_batch: int, num_ranks: int) -> None:
    ranks = [list(wrapped(kind, count, global_batch, rank, num_ranks)) for rank in range(num_ranks)]
    assert len({len(steps) for steps in ranks}) == 1, "a rank with fewer steps would miss a collective"
    seen = [item for steps in ranks for share in steps for item in share.batch or []]
    assert sorted(seen) == [100 + number for number in range(count)]
    for step in zip(*ranks, strict=True):
        assert sum(len(share.sample_ids) for share in step) == step[0].num_global
        assert all((share.batch is None) == (not share.sample_ids) for share in step)
        assert all(
            item == 100 + i for share in step for item, i in zip(share.batch or [], share.sample_ids, strict=True)
        )


@settings(max_examples=60, deadline=None)
@given(KINDS, st.integers(1, 60), st.integers(1, 12), st.integers(1, 4), st.integers(1, 4), st.integers(0, 9))
def test_a_wrapped_data_set_goes_on_at_another_world_size(
    kind: str, count: int, global_batch: int, before: int, after: int, stop: int
) -> None:
    def globals_of(shares: list[Any]) -> list[list[int]]:
        return [sorted(item for share in step for item in share.batch or []) for step in zip(*shares, strict=True)]

    whole = globals_of([list(wrapped(kind, count, global_batch, 0, 1))])
    stop = min(stop, len(whole) - 1)
    first = [wrapped(kind, count, global_batch, rank, before) for rank in range(before)]
    seen = globals_of([list(itertools.islice(iter(one), stop)) for one in first])
    second = [wrapped(kind, count, global_batch, rank, after) for rank in range(after)]
    for one in second:
        one.load_state_dict(first[0].state_dict())
    assert seen + globals_of([list(one) for one in second]) == whole


def test_resuming_reads_only_what_is_to_come() -> None:
    loader = wrapped("map", 100, 10, 0, 1)
    loader.load_state_dict({**loader.state_dict(), "num_seen": 90})
    assert len(list(loader)) == 1 and loader.dataset.num_read == 10
    stream = wrapped("stateful", 100, 10, 0, 1)
    stream.load_state_dict({"epoch": 0, "num_seen": 90, "inner": {"at": 90}})
    assert len(list(stream)) == 1 and stream.dataset.num_read == 10


def test_epoch_two_has_another_order_and_worker_processes_change_nothing() -> None:
    layout = {"global_batch": 7, "rank": 1, "num_ranks": 2, "collate": list}
    here, there = (ExactLoader(list(range(40)), num_workers=n, **layout) for n in (0, 2))  # type: ignore[arg-type]
    first, second = list(here), list(here)
    assert first == list(there)
    assert [share.sample_ids for share in first] != [share.sample_ids for share in second]
