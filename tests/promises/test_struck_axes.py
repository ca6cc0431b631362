"""A rank of each axis is asked to stop, killed, or stands still: the others end, and say which it was, and where."""

import re
import time

import pytest
from families import write_family
from struck import finish, start, start_really
from tiny import build_tiny_tokenizer, write_conversations

from duoka.cluster.fault_injection import strike, wait_for_ranks
from duoka.runs.events import read_steps
from duoka.runs.folder import RunFolder
from duoka.runs.status import read_status

YAML = """
model: {model}
data: {{train: [{data}], max_length: 128}}
optim: {{lr: 2e-3}}
train: {{epochs: 30, global_batch: 8, micro_batch: "128 tokens", precision: fp32}}
checkpoint: {{every: 1000}}
log: {{to: []}}
output: {output}
"""
# The layout on two ranks, and what the rank is called that is struck: the last one.
AXES = {
    "tp": ("parallel.layout=tp2", "tensor rank 1 of 2"),
    "pp": ("parallel.layout=pp2", "pipeline rank 1 of 2"),
    "sp": ("parallel.layout=ddp1.sp2", "sequence rank 1 of 2"),
    "ep": ("parallel.layout=zero1x2.ep2", "expert rank 1 of 2"),
}
WITHIN_S, HANG_S = 100, 5


@pytest.fixture(scope="module")
def case(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("axes")
    data = write_conversations(folder / "chats.jsonl", 40, seed=3)
    experts = write_family(folder / "experts", "qwen3_moe", tokenizer=build_tiny_tokenizer())
    for name, model in (("dense", tiny_model), ("experts", experts)):
        (folder / f"{name}.yaml").write_text(
            YAML.format(model=model, data=data, output=folder / "out"), encoding="utf-8"
        )
    return folder


def strike_at(run, step, how, old=()):
    """The last rank, when both have done so many steps; returns the pids."""
    ranks = wait_for_ranks(run, 2, lambda beat: beat.step >= step, old_pids=old, within_s=WITHIN_S)
    strike([ranks[1]], how)
    return [beat.pid for beat in ranks.values()]


@pytest.mark.parametrize("axis", AXES)
def test_a_rank_of_an_axis_stops_with_a_save_and_is_named_when_it_is_killed(case, axis):
    layout, place = AXES[axis]
    yaml, run = case / ("experts.yaml" if axis == "ep" else "dense.yaml"), RunFolder(case / axis)
    process = start(yaml, run.path, layout)
    old = strike_at(run, 2, "SIGTERM")
    code, output = finish(process)
    assert code == 75 and "Traceback" not in output, output
    stopped = read_status(run).step
    assert (run.checkpoints / f"step-{stopped:08d}").is_dir(), "a request to stop saves"
    process = start(yaml, run.path, layout, "--restarts", "0")
    strike_at(run, stopped + 2, "SIGKILL", old)
    struck = time.monotonic()
    code, output = finish(process)
    assert time.monotonic() - struck < 30, "the other rank waits for nobody"
    assert code == 5 and f"going on from step-{stopped:08d}" in output, output
    assert "rank 1 of 2 was killed by SIGKILL" in output and f"it was {place}, in " in output, output


@pytest.mark.parametrize("axis", ["pp", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("tp", "sp", "ep"))])
def test_a_rank_that_stands_still_ends_the_run_by_its_place_and_micro_batch(case, axis):
    layout, place = AXES[axis]
    run = RunFolder(case / f"still-{axis}")
    yaml = case / ("experts.yaml" if axis == "ep" else "dense.yaml")
    # Forked, a launcher finds no rank that it would kill: the run went on, to its last step.
    process = start_really(yaml, run.path, layout, "--restarts", "0", f"faults.hang_after={HANG_S}")
    strike_at(run, 2, "SIGSTOP")
    struck = time.monotonic()
    code, output = finish(process)
    assert time.monotonic() - struck < 120, "not the half of an hour that a stopped rank could stay"
    assert len(read_steps(run)) < 100, "the ranks are ended, and do not come to an end by themselves"
    assert code == 5 and "rank 1 of 2 is stopped (SIGSTOP" in output, output
    own, other = (next(line for line in output.splitlines() if f"rank {rank} (pid" in line) for rank in (1, 0))
    assert place in own and place.replace("rank 1", "rank 0") in other, output
    # Under zero1 it may be FSDP's gathering of weights, which goes on beside the pass and says that it was the last.
    assert "in which it waits" in other or axis == "ep", output
    for line in (own, other):  # struck between two steps, it was in none
        assert " of micro-batch " in line or not re.search(r"in (forward|backward)", line), output
