"""Batches of tensors: every sample once, targets to the token, the same for any world size and layout."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from duoka.data.feed.epoch_plan import EpochPlan
from duoka.data.feed.loader import IGNORED, Batch, Loader, eval_batches, shifted_labels
from duoka.data.tokens.template import Sample
from duoka.data.tokens.token_store import Arrays, TokenPart, TokenStore, pack_arrays, write_part
from duoka.units import Amount

MAX_LENGTH = 64
PAD = 3


def store_of(folder: Path, lengths: Sequence[int], seed: int = 0) -> TokenStore:
    """Samples whose tokens name them: sample i begins with 1000 + i."""
    dice = np.random.default_rng(seed)
    samples = []
    for number, length in enumerate(lengths):
        ids = dice.integers(10, 999, length).astype(np.int32)
        ids[0] = 1000 + number
        mask = dice.random(length) < 0.5
        mask[-1] = True
        samples.append(Sample(ids, mask))
    folder.mkdir()
    write_part(folder, [pack_arrays(samples[: len(samples) // 2]), pack_arrays(samples[len(samples) // 2 :])], {})
    return TokenStore([TokenPart(folder)])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    lengths = np.random.default_rng(5).integers(2, MAX_LENGTH + 1, 45)
    return store_of(tmp_path_factory.mktemp("store") / "part", lengths.tolist())


def loader_of(store: TokenStore, rank: int = 0, num_ranks: int = 1, **options: object) -> Loader:
    batch = options.pop("batch", Amount(8, "samples"))
    plan = EpochPlan(store.lengths, store.num_targets, fingerprint=store.fingerprint, seed=1, global_batch=batch)  # type: ignore[arg-type]
    layout = {"micro": Amount(2, "samples"), "packing": True, "max_length": MAX_LENGTH, "pad_id": PAD} | options
    return Loader(store, plan, rank=rank, num_ranks=num_ranks, **layout)  # type: ignore[arg-type]


def pairs_learned(batches: Sequence[Batch]) -> list[tuple[int, ...]]:
    """What a loss sees, without its layout: for each target the whole text before it, and the target."""
    seen = []
    for batch in batches:
        for row in range(len(batch.input_ids)):
            starts = (batch.position_ids[row] == 0).nonzero().flatten().tolist()
            for place in (batch.labels[row] != IGNORED).nonzero().flatten().tolist():
                start = max(at for at in starts if at <= place)
                before = batch.input_ids[row, start : place + 1].tolist()
                seen.append((*before, int(batch.labels[row, place])))
    return sorted(seen)


batches_of_any_kind = st.one_of(
    st.builds(Amount, st.integers(1, 50), st.just("samples")),
    st.builds(Amount, st.integers(1, 1500), st.just("tokens")),
)
micros = st.one_of(
    st.builds(Amount, st.integers(1, 9), st.just("samples")), st.builds(Amount, st.integers(1, 300), st.just("tokens"))
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches_of_any_kind, micros, st.integers(1, 5), st.booleans())
def test_any_layout_learns_the_same_from_each_global_batch(
    store: TokenStore, batch: Amount, micro: Amount, num_ranks: int, packing: bool
) -> None:
    alone = loader_of(store, batch=batch, micro=Amount(10**6, "tokens"), packing=False)
    ranks = [loader_of(store, r, num_ranks, batch=batch, micro=micro, packing=packing) for r in range(num_ranks)]
    learned_targets = 0
    for index in range(alone.plan.num_batches()):
        expected = alone.global_batch(1, index)
        parts = [rank.global_batch(1, index) for rank in ranks]
        every = [one for part in parts for one in part.micro_batches]
        assert len({len(part.micro_batches) for part in parts}) == 1
        assert sum(one.num_targets for one in every) == expected.global_targets
        assert sum(one.num_tokens for one in every) == expected.num_tokens
        assert sum(one.num_samples for one in every) == expected.num_samples == len(expected.sample_ids)
        assert pairs_learned(every) == pairs_learned(expected.micro_batches)
        assert {part.global_targets for part in parts} == {expected.global_targets}
        learned_targets += sum(int((one.labels != IGNORED).sum()) for one in every)
    assert learned_targets == int(store.num_targets.sum()), "the plan's targets are those that the loss sees"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 20), st.integers(1, 3), st.integers(1, 4))
def test_going_on_anywhere_gives_the_rest_of_the_epochs(
    store: TokenStore, start: int, num_ranks_before: int, num_ranks_after: int
) -> None:
    """A run stopped at any batch, resumed on other ranks, sees what the uninterrupted one does."""
    before, after = loader_of(store, 0, num_ranks_before), loader_of(store, 0, num_ranks_after)
    whole = [(one.epoch, one.index, one.sample_ids.tolist()) for one in before.from_cursor(0, 0, 2.5)]
    start = min(start, len(whole) - 1)
    epoch, index = whole[start][:2]
    rest = [(one.epoch, one.index, one.sample_ids.tolist()) for one in after.from_cursor(epoch, index, 2.5)]
    assert rest == whole[start:]
    assert len(whole) == after.num_steps(2.5)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 9), micros, st.booleans())
def test_an_evaluation_sees_every_sample_once(store: TokenStore, num_ranks: int, micro: Amount, packing: bool) -> None:
    layout = {"micro": micro, "packing": packing, "max_length": MAX_LENGTH, "pad_id": PAD}
    ranks = [list(eval_batches(store, rank=rank, num_ranks=num_ranks, **layout)) for rank in range(num_ranks)]  # type: ignore[arg-type]
    assert len({len(batches) for batches in ranks}) == 1
    names = [int(t) for batches in ranks for one in batches for t in one.input_ids.flatten() if t >= 1000]
    assert sorted(names) == [1000 + number for number in range(len(store))]
    assert sum(one.num_samples for batches in ranks for one in batches) == len(store)


def test_packed_rows_restart_positions_and_say_where_samples_begin(store: TokenStore) -> None:
    (one,) = loader_of(store, micro=Amount(10**6, "tokens")).global_batch(0, 0).micro_batches
    assert one.input_ids.shape[0] == 1 and one.attention_mask is None and one.boundaries is not None
    starts = one.boundaries.tolist()
    assert one.boundaries.dtype == torch.int32
    assert starts[0] == 0 and starts[-1] == one.input_ids.shape[1] == one.num_tokens
    for start, end in itertools.pairwise(starts):
        assert one.position_ids[0, start:end].tolist() == list(range(end - start))
        assert one.input_ids[0, start] >= 1000
        assert one.labels[0, end - 1] == IGNORED, "the last token of a sample must not predict the next sample"


def test_padded_rows_are_padded_on_the_right_and_masked(store: TokenStore) -> None:
    for one in loader_of(store, packing=False).global_batch(0, 0).micro_batches:
        assert one.boundaries is None and one.attention_mask is not None
        assert int(one.attention_mask.sum()) == one.num_tokens
        assert bool((one.input_ids[~one.attention_mask] == PAD).all())
        assert bool((one.labels[~one.attention_mask] == IGNORED).all())
        assert bool(one.attention_mask[:, 0].all()) and int(one.attention_mask.sum(1).max()) == one.input_ids.shape[1]


def test_tensors_are_long(store: TokenStore) -> None:
    for packing in (True, False):
        one = loader_of(store, packing=packing).global_batch(0, 0).micro_batches[0]
        assert {one.input_ids.dtype, one.labels.dtype, one.position_ids.dtype} == {torch.int64}


@pytest.mark.parametrize("packing", [True, False])
def test_a_rank_without_samples_has_an_empty_micro_batch(store: TokenStore, packing: bool) -> None:
    rank = loader_of(store, 2, 3, batch=Amount(2, "samples"), packing=packing)
    (one,) = rank.global_batch(0, 0).micro_batches
    assert (one.num_samples, one.num_tokens, one.num_targets) == (0, 0, 0)
    assert one.input_ids.tolist() == [[PAD]] and one.labels.tolist() == [[IGNORED]]
    if packing:
        assert one.boundaries is not None and one.boundaries.tolist() == [0, 1]


def test_labels_are_the_next_token_where_it_is_a_target() -> None:
    sample = Sample(np.array([5, 6, 7, 8], np.int32), np.array([True, False, True, True]))
    assert shifted_labels(sample).tolist() == [IGNORED, 7, 8, IGNORED]
    assert sample.num_targets == 2


def test_a_store_reads_back_what_was_written(tmp_path: Path) -> None:
    store = store_of(tmp_path / "part", [3, 9, 5])
    assert store.lengths.tolist() == [3, 9, 5]
    assert [int(store.sample(index).input_ids[0]) for index in range(3)] == [1000, 1001, 1002]
    assert [store.sample(index).num_targets for index in range(3)] == store.num_targets.tolist()
    chosen = TokenStore([store.parts[0], store.parts[0]], np.array([4, 0]))
    assert [int(chosen.sample(index).input_ids[0]) for index in range(2)] == [1001, 1000]
    assert chosen.fingerprint != store.fingerprint
    with pytest.raises(IndexError):
        store.sample(3)


def test_pieces_are_joined_one_after_another(tmp_path: Path) -> None:
    """A set may be larger than memory."""
    alive: list[weakref.ref[np.ndarray]] = []
    most = 0
    samples = [Sample(np.arange(n, n + 7, dtype=np.int32), np.arange(7) % 2 == 0) for n in range(6)]

    def pieces() -> Iterator[Arrays]:
        nonlocal most
        for sample in samples:
            piece = pack_arrays([sample])
            alive.append(weakref.ref(piece.ids))
            most = max(most, sum(one() is not None for one in alive))
            yield piece
            del piece

    write_part(tmp_path, pieces(), {}, 42)
    store = TokenStore([TokenPart(tmp_path)])
    assert all(np.array_equal(store.sample(n).input_ids, sample.input_ids) for n, sample in enumerate(samples))
    assert most <= 2 and store.num_targets.tolist() == [3] * 6
    with pytest.raises(ValueError, match="hold 42 tokens, and 43"):
        write_part(tmp_path, map(pack_arrays, [samples]), {}, 43)


def test_an_empty_part_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    write_part(tmp_path / "part", [pack_arrays([])], {})
    assert TokenPart.is_whole(tmp_path / "part")
    assert len(TokenStore([TokenPart(tmp_path / "part")])) == 0
