"""The epoch plan's promises, for any lengths, seed, batch, world size, packing and starting point."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duoka.data.feed.epoch_plan import EpochPlan, cost_of, fill_bins, row_cost, share_batch, share_rows, shuffled
from duoka.units import Amount

MAX_LENGTH = 512
many = settings(max_examples=150, deadline=None)
lengths_of_any_kind = st.lists(st.integers(1, MAX_LENGTH), min_size=1, max_size=120).map(
    lambda values: np.array(values, np.int32)
)
global_batches = st.one_of(
    st.builds(Amount, st.integers(1, 64), st.just("samples")),
    st.builds(Amount, st.integers(1, 4000), st.just("tokens")),
)
micros = st.one_of(
    st.builds(Amount, st.integers(1, 9), st.just("samples")), st.builds(Amount, st.integers(1, 2048), st.just("tokens"))
)
seeds = st.integers(0, 2**40)


def plan_of(lengths: np.ndarray, seed: int = 0, batch: Amount | None = None) -> EpochPlan:
    targets = np.maximum(lengths // 2, 1)
    return EpochPlan(lengths, targets, fingerprint="f", seed=seed, global_batch=batch or Amount(16, "samples"))


@many
@given(lengths_of_any_kind, seeds, global_batches, st.integers(0, 3))
def test_an_epoch_has_every_sample_once(lengths: np.ndarray, seed: int, batch: Amount, epoch: int) -> None:
    plan = plan_of(lengths, seed, batch)
    batches = [plan.batch(epoch, index) for index in range(plan.num_batches(epoch))]
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    assert all(len(ids) for ids in batches), "a batch without a sample would be 0/0"
    assert sum(plan.global_targets(epoch, index) for index in range(len(batches))) == plan.num_targets.sum()


@many
@given(lengths_of_any_kind, seeds, st.integers(1, 64))
def test_batches_of_samples_are_full_but_the_last(lengths: np.ndarray, seed: int, count: int) -> None:
    plan = plan_of(lengths, seed, Amount(count, "samples"))
    sizes = [len(plan.batch(0, index)) for index in range(plan.num_batches())]
    assert all(size == count for size in sizes[:-1])
    assert sizes[-1] == len(lengths) - count * (len(sizes) - 1)


@many
@given(lengths_of_any_kind, seeds, st.integers(MAX_LENGTH, 4000), st.integers(0, 3))
def test_batches_of_tokens_are_as_large_as_asked(lengths: np.ndarray, seed: int, count: int, epoch: int) -> None:
    plan = plan_of(lengths, seed, Amount(count, "tokens"))
    window = lengths.sum() / plan.num_batches()
    for index in range(plan.num_batches()):
        tokens = lengths[plan.batch(epoch, index)].sum()
        assert abs(tokens - window) <= MAX_LENGTH, "a batch differs from its window by half a sample at each end"


@many
@given(lengths_of_any_kind, seeds, global_batches)
def test_a_batch_is_the_same_whatever_was_asked_before(lengths: np.ndarray, seed: int, batch: Amount) -> None:
    """Resuming is asking for another batch: there is nothing to replay."""
    walked, fresh = plan_of(lengths, seed, batch), plan_of(lengths, seed, batch)
    last = walked.num_batches() - 1
    for epoch in (0, 1, 0, 2):
        for index in range(last + 1):
            seen = walked.batch(epoch, index)
    assert np.array_equal(seen, fresh.batch(2, last))


def test_the_order_is_another_in_each_epoch_and_seed_and_for_other_data() -> None:
    names = ("f/1/0", "f/1/1", "f/2/0", "g/1/0")
    orders = {tuple(shuffled(1000, name).tolist()) for name in names}
    assert len(orders) == len(names)


def test_the_order_is_the_same_on_every_machine() -> None:
    """Written down once: a resumed run must not depend on NumPy's generators or sorting."""
    assert shuffled(12, "duoka").tolist() == ORDER_OF_TWELVE
    plan = EpochPlan(np.arange(1, 9), np.ones(8), fingerprint="x", seed=7, global_batch=Amount(3, "samples"))
    assert [plan.batch(2, index).tolist() for index in range(3)] == BATCHES_OF_EIGHT


ORDER_OF_TWELVE = [7, 6, 1, 5, 4, 10, 8, 2, 11, 0, 9, 3]
BATCHES_OF_EIGHT = [[4, 6, 5], [0, 3, 7], [1, 2]]


def test_an_order_has_no_pattern() -> None:
    """Neighbors in the data are no neighbors in the order, and places are used evenly."""
    order = shuffled(10_000, "pattern").astype(np.int64)
    assert abs(np.corrcoef(np.arange(10_000), order)[0, 1]) < 0.05
    assert np.mean(np.abs(np.diff(order)) == 1) < 0.002


@many
@given(lengths_of_any_kind, st.integers(1, 9), micros, st.booleans())
def test_ranks_share_a_batch_exactly(lengths: np.ndarray, num_ranks: int, micro: Amount, packing: bool) -> None:
    ids = np.arange(len(lengths))
    shares = share_batch(ids, lengths, num_ranks, micro, packing=packing, max_length=MAX_LENGTH)
    assert len(shares) == num_ranks
    assert len({len(share) for share in shares}) == 1, "a rank with fewer micro-batches would miss a collective"
    assert any(share[-1].rows for share in shares), "a micro-batch that is empty on every rank is no work at all"
    seen = [sample for share in shares for plan in share for sample in plan.sample_ids]
    assert sorted(seen) == ids.tolist()
    for plan in (plan for share in shares for plan in share if plan.rows):
        own = [int(lengths[sample]) for sample in plan.sample_ids]
        if packing:
            assert len(plan.rows) == 1
        else:
            assert all(len(row) == 1 for row in plan.rows)
        if micro.unit == "samples":
            assert len(own) <= micro.count
        else:
            computed = sum(own) if packing else max(own) * len(own)
            assert computed <= micro.count or len(own) == 1


@many
@given(lengths_of_any_kind, st.integers(1, 6), micros, st.booleans(), st.randoms(use_true_random=False))
def test_sharing_knows_no_order(
    lengths: np.ndarray, num_ranks: int, micro: Amount, packing: bool, dice: object
) -> None:
    ids = np.arange(len(lengths))
    mixed = ids.copy()
    dice.shuffle(mixed)  # type: ignore[attr-defined]
    first = share_batch(ids, lengths, num_ranks, micro, packing=packing, max_length=MAX_LENGTH)
    assert first == share_batch(mixed, lengths, num_ranks, micro, packing=packing, max_length=MAX_LENGTH)


@many
@given(lengths_of_any_kind, st.integers(1, 9))
def test_ranks_get_equal_cost(lengths: np.ndarray, num_ranks: int) -> None:
    """Longest first to the least loaded: no rank has more than the mean and one sample, the square counted."""
    shares = share_batch(
        np.arange(len(lengths)), lengths, num_ranks, Amount(4, "samples"), packing=True, max_length=MAX_LENGTH
    )
    costs = [sum(cost_of(int(lengths[i])) for plan in share for i in plan.sample_ids) for share in shares]
    assert max(costs) <= sum(costs) / num_ranks + cost_of(int(lengths.max()))


def test_the_costliest_of_8_ranks_with_64_samples_each_is_within_5_percent_of_the_mean() -> None:
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(5.9, 0.9, 8 * 64), 16, 2048).astype(np.int32)
    shares = share_batch(np.arange(512), lengths, 8, Amount(4096, "tokens"), packing=True, max_length=2048)
    costs = [sum(cost_of(int(lengths[i])) for plan in share for i in plan.sample_ids) for share in shares]
    assert max(costs) <= 1.05 * np.mean(costs), f"the costliest rank has {max(costs) / np.mean(costs):.3f} of the mean"
    assert cost_of(2048) > 2 * cost_of(1024), "the square must count"


def test_a_rank_with_a_long_sample_gets_fewer_short_ones() -> None:
    lengths = np.array([2048] + [32] * 256, np.int32)
    shares = share_batch(np.arange(257), lengths, 2, Amount(4096, "tokens"), packing=True, max_length=2048)
    costs = [sum(cost_of(int(lengths[i])) for plan in share for i in plan.sample_ids) for share in shares]
    assert max(costs) <= 1.01 * np.mean(costs), f"the costliest rank has {max(costs) / np.mean(costs):.3f} of the mean"


@many
@given(lengths_of_any_kind, st.integers(1, 5), st.integers(1, 6), st.sampled_from((64, 300, 5000)))
def test_samples_that_begin_alike_are_packed_side_by_side(
    lengths: np.ndarray, num_ranks: int, per_family: int, tokens: int
) -> None:
    """Each once, within a micro-batch's tokens, equally many micro-batches on each rank, no rank far above the mean."""
    ids, micro = np.arange(len(lengths)), Amount(tokens, "tokens")
    alike = ids // per_family
    shares = share_batch(ids, lengths, num_ranks, micro, packing=True, max_length=MAX_LENGTH, alike=alike)
    assert sorted(one for share in shares for plan in share for one in plan.sample_ids) == ids.tolist()
    assert len({len(share) for share in shares}) == 1
    plans = [plan.sample_ids for share in shares for plan in share if plan.sample_ids]
    assert all(len(plan) == 1 or lengths[list(plan)].sum() <= tokens for plan in plans)
    loads = [sum(int(lengths[one]) for plan in share for one in plan.sample_ids) for share in shares]
    assert max(loads) <= 1.25 * sum(loads) / num_ranks + lengths.max()
    families = [lengths[alike == family] for family in np.unique(alike)]
    if num_ranks == 1 and all(family.sum() <= tokens // 2 for family in families):
        where = {int(one): place for place, plan in enumerate(plans) for one in plan}
        assert all(len({where[one] for one in ids[alike == family].tolist()}) == 1 for family in np.unique(alike))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 512), min_size=1, max_size=120), st.integers(1, 6), st.integers(1, 3))
def test_fixed_rows_are_shared_by_cost_without_more_micro_batches(lengths: list[int], ranks: int, rows: int) -> None:
    own = np.array(lengths, np.int32)
    shares = share_rows(np.arange(len(own)), own, ranks, rows, max_length=512)
    every = [row for share in shares for micro in share for row in micro.rows]
    assert sorted(sample for row in every for sample in row) == list(range(len(own)))
    assert {len(share) for share in shares} == {max(1, -(-len(every) // (ranks * rows)))}
    costs = [[row_cost(own[list(row)].tolist(), 512) for micro in share for row in micro.rows] for share in shares]
    assert max(map(sum, costs)) - min(map(sum, costs)) <= max(map(max, filter(None, costs))) * rows


def test_rows_of_long_and_of_short_documents_are_dealt_out() -> None:
    """One long document costs more than many short ones in a row of the same length: each rank gets of both."""
    lengths = np.array([2048] * 4 + [128] * 64, np.int32)
    shares = share_rows(np.arange(68), lengths, 4, 1, max_length=2048)
    costs = [sum(row_cost(lengths[list(row)].tolist(), 2048) for m in share for row in m.rows) for share in shares]
    assert len(set(costs)) == 1


def test_packed_micro_batches_are_nearly_full() -> None:
    generator = np.random.default_rng(1)
    lengths = np.clip(generator.lognormal(5.9, 0.9, 512), 16, 2048).astype(np.int32)
    (share,) = share_batch(np.arange(512), lengths, 1, Amount(4096, "tokens"), packing=True, max_length=2048)
    fewest = -(-int(lengths.sum()) // 4096)
    assert len(share) <= fewest + 1


class CountedLength(int):
    """A length that counts how often it is held against what room there is."""

    comparisons = 0

    def __gt__(self, room: int) -> bool:
        CountedLength.comparisons += 1
        return int(self) > int(room)

    def __le__(self, room: int) -> bool:
        return not self > room


def _comparisons_of_packing(count: int) -> int:
    lengths = np.sort(np.random.default_rng(7).integers(1, 1 << 20, count))[::-1]
    CountedLength.comparisons = 0
    fill_bins([(place, CountedLength(length)) for place, length in enumerate(lengths.tolist())], 1 << 20)
    return CountedLength.comparisons


def test_packing_compares_n_log_n_lengths() -> None:
    few, many = _comparisons_of_packing(1 << 9), _comparisons_of_packing(1 << 13)
    assert few >= 1 << 9, "nothing was counted"
    assert many <= 16 * few * 13 / 9 * 1.5, f"{few} comparisons for 512 samples, {many} for 16 times as many"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 40), max_size=80), st.integers(10, 40))
def test_each_sample_goes_to_the_first_of_the_fullest_bins_with_room(lengths: list[int], size: int) -> None:
    """Best fit as its definition says it, looking at every bin; samples longer than a bin get one of their own."""
    pairs = list(enumerate(sorted(lengths, reverse=True)))
    bins: list[list[tuple[int, int]]] = []
    for pair in pairs:
        free = [(size - sum(length for _, length in one), place) for place, one in enumerate(bins)]
        fitting = sorted(one for one in free if one[0] >= pair[1])
        if fitting:
            bins[fitting[0][1]].append(pair)
        else:
            bins.append([pair])
    assert fill_bins(pairs, size) == bins


def test_a_sample_longer_than_max_length_is_a_bug_of_ours() -> None:
    with pytest.raises(ValueError, match="max_length is 8"):
        share_batch(np.arange(1), np.array([9]), 1, Amount(1, "samples"), packing=True, max_length=8)


def test_parts_of_epochs_are_counted() -> None:
    plan = plan_of(np.ones(100, np.int32), batch=Amount(10, "samples"))
    assert [plan.num_steps(epochs) for epochs in (0.01, 0.5, 0.51, 1.0, 1.1, 2.25)] == [1, 5, 6, 10, 11, 23]


def test_what_is_outside_the_plan_is_refused() -> None:
    plan = plan_of(np.ones(5, np.int32))
    with pytest.raises(IndexError):
        plan.batch(0, 1)
    with pytest.raises(ValueError, match="no sample"):
        plan_of(np.ones(0, np.int32))
