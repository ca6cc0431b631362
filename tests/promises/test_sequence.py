"""Ranks that share rows learn what one process learns: losses, norms, every gradient and all weights."""

from dataclasses import replace

import pytest
from sequences import CASES, CLIP, WIDE, adapt_of, distance, learn_alone, learn_together
from worlds import run_world

pytestmark = pytest.mark.timeout(300)

TOLERANCE = 1e-5
FIRST = "6 heads, 3 of keys, Adam"


def compare_all(layouts):
    """Each (layout, names of cases) in this world; the first case that is off ends it."""
    from duoka.comm.world import end_world, start_world
    from duoka.config.schema import ParallelConfig
    from duoka.parallel.mesh import build_mesh
    from duoka.plan.layout import parse_layout

    world = start_world(ParallelConfig(strategy="fsdp"))
    for name, cases in layouts:
        layout = parse_layout(name)
        mesh = build_mesh(layout, world)
        for one in cases:
            case = CASES[one] if layout.dp == 1 else replace(CASES[one], rows=WIDE)
            alone = learn_alone(case, adapt_of(case))
            assert max(alone.norms) > CLIP, "clipping must have been active"
            error, what = distance(learn_together(case, layout, mesh), alone)
            print(f"{name} {one}: {error:.1e} {what}", flush=True)
            assert error < TOLERANCE, f"{what} of {one} under {name} is off by {error:.1e}"
    world.barrier()
    end_world(world)


SOME = ["6 heads, 2 of keys", "LoRA", "5 heads, gathered", "padded rows"]
WIDE_ONES = [FIRST, "LoRA", "9 heads, 3 of keys, gathered, recomputing what is cheap", "padded rows"]


def test_two_ranks_that_share_rows_equal_the_oracle():
    run_world(2, compare_all, [("ddp1·sp2", list(CASES)), ("fsdp1·sp2", SOME), ("zero1x1·sp2", SOME[:2])])


def test_four_ranks_that_share_rows_and_state_equal_the_oracle():
    run_world(4, compare_all, [("fsdp2·sp2", WIDE_ONES[:3]), ("ddp2·sp2", WIDE_ONES[3:]), ("ddp1·sp4", WIDE_ONES[1:3])])


@pytest.mark.nightly
def test_every_layout_of_four_ranks_equals_the_oracle():
    layouts = ("ddp2·sp2", "zero1x2·sp2", "zero2x2·sp2", "fsdp2·sp2", "hsdp2x1·sp2")
    run_world(
        4, compare_all, [(name, WIDE_ONES) for name in layouts] + [("ddp1·sp4", list(CASES)), ("fsdp1·sp4", SOME)]
    )
