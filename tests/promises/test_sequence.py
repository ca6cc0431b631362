"""Ranks that share rows learn what one process learns: losses, norms, every gradient and all weights."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from sequences import CASES, CLIP, WIDE, Likelihood, distance, learn_alone_once, learn_together
from worlds import run_world

pytestmark = pytest.mark.timeout(300)

TOLERANCE = 1e-5
FIRST, KEYS = "6 heads, 3 of keys, Adam", "6 heads, 1 of keys, recomputing"


def compare_all(layouts, tolerance=TOLERANCE):
    """Each (layout, names of cases) in this world; the first case that is off ends it."""
    from duoka.comm.world import end_world, start_world
    from duoka.config.schema import ParallelConfig
    from duoka.model import one_document
    from duoka.parallel.mesh import build_mesh
    from duoka.plan.layout import parse_layout

    one_document.SCORES_AT_ONCE = 100  # a few queries at once, as of rows that are a thousand times longer
    world = start_world(ParallelConfig(strategy="fsdp"))
    for name, cases in layouts:
        layout = parse_layout(name)
        mesh = build_mesh(layout, world)
        for one in cases:
            case = CASES[one] if layout.dp == 1 else replace(CASES[one], rows=WIDE)
            alone = learn_alone_once(case, world)
            assert max(alone.norms) > CLIP, "clipping must have been active"
            error, what = distance(learn_together(case, layout, mesh), alone)
            print(f"{name} {one}: {error:.1e} {what}", flush=True)
            assert error < tolerance, f"{what} of {one} under {name} is off by {error:.1e}"
    world.barrier()
    end_world(world)


SOME = ["6 heads, 2 of keys", "LoRA", "5 heads, gathered", "padded rows"]
WIDE_ONES = [FIRST, "LoRA", "9 heads, 3 of keys, gathered, recomputing what is cheap", "padded rows"]


def test_two_ranks_that_share_rows_equal_the_oracle():
    run_world(2, compare_all, [("ddp1·sp2", list(CASES)), ("fsdp1·sp2", SOME), ("zero1x1·sp2", SOME[:2])])


def test_four_ranks_that_share_rows_and_state_equal_the_oracle():
    run_world(4, compare_all, [("fsdp2·sp2", WIDE_ONES[:2]), ("ddp1·sp4", WIDE_ONES[2:3])])


@pytest.mark.nightly
def test_every_layout_of_four_ranks_equals_the_oracle():
    layouts = ("ddp2·sp2", "zero1x2·sp2", "zero2x2·sp2", "fsdp2·sp2", "hsdp2x1·sp2")
    run_world(
        4, compare_all, [(name, WIDE_ONES) for name in layouts] + [("ddp1·sp4", list(CASES)), ("fsdp1·sp4", SOME)]
    )


def edges_at_the_cut(part, place, size):
    ends = torch.arange(size + 1, dtype=torch.int32) * part.input_ids.shape[1]
    return replace(part, boundaries=torch.unique(torch.cat((part.boundaries, ends))))


def no_edges(part, place, size):
    return replace(part, boundaries=part.boundaries[[0, -1]])


def no_label_at_the_cut(part, place, size):
    labels = part.labels.clone()
    labels[:, -1] = -100
    return replace(part, labels=labels)


def positions_of_its_own(part, place, size):
    return replace(part, position_ids=torch.arange(part.input_ids.shape[1])[None])


def find_mistakes(rank):
    """What others got wrong, by name: the case that shows it, and the mistake as a context."""
    from duoka.parallel import apply, engine, sequence

    right_cut = sequence.cut_rows

    def cut(mistake):
        return FIRST, mock.patch.object(engine, "cut_rows", lambda micro, *at: mistake(right_cut(micro, *at), *at))

    def patched(of, name, wrong, case=FIRST):
        return case, mock.patch.object(of, name, wrong)

    def heads_of_the_first(*sizes):
        right = key_value_heads(*sizes)
        return right[: len(right) // sizes[-1]] * sizes[-1]

    def mean_over_ranks(_, batch):
        own = sum(right_cut(micro, rank, 2).num_targets for micro in batch.micro_batches)
        return {"tokens": 2 * own}

    key_value_heads, both = sequence.key_value_heads, sequence.HeadsAndRows
    return {
        "documents end where the row is cut": cut(edges_at_the_cut),
        "documents see each other": cut(no_edges),
        "the target behind the cut is lost": cut(no_label_at_the_cut),
        "positions begin again at the cut": cut(positions_of_its_own),
        "a mean of means": patched(Likelihood, "denominators", mean_over_ranks),
        "nothing is exchanged": patched(apply, "share_sequences", lambda model, world: None, "padded rows"),
        "all ranks get the first one's key-value heads": patched(sequence, "key_value_heads", heads_of_the_first),
        "gradients of gathered keys are not summed": patched(
            both, "scatter", lambda self, whole: whole[self.rank].clone(), "5 heads, gathered"
        ),
        "a key-value head's gradients are not summed": patched(
            torch.Tensor, "index_add_", torch.Tensor.index_copy_, KEYS
        ),
    }


def make_each_mistake():
    from duoka.comm.world import end_world, start_world
    from duoka.config.schema import ParallelConfig
    from duoka.parallel.mesh import build_mesh
    from duoka.plan.layout import parse_layout

    world, layout = start_world(ParallelConfig()), parse_layout("ddp1·sp2")
    mesh = build_mesh(layout, world)
    for mistake, (name, made) in find_mistakes(world.rank).items():
        case = CASES[name]
        alone = learn_alone_once(case, world)
        with made:
            error, what = distance(learn_together(case, layout, mesh), alone)
        print(f"{mistake}: {error:.1e} {what}", flush=True)
        assert error > 100 * TOLERANCE, f"{mistake}, and no test would see it"
    end_world(world)


def test_each_mistake_would_be_seen():
    run_world(2, make_each_mistake)
