"""In a step every rank of a group asks for the same collectives in the same order, of the same bytes and types.

Where one does not, NCCL hangs or adds up what does not belong together. Seen by torch's flight recorder, which notes
what reaches the backend itself: FSDP's, DDP's and DTensor's own collectives beside duoka's. A pipeline's messages are
held against what the other side awaits.
"""

import json
import os
from collections import defaultdict

import pytest
from tensor_models import CLIP, Mean, build, global_batch, make_optimizer, write_model
from worlds import run_world

# (model, layout): three micro-batches of which one has no target, or not even a token, and with data ranks other
# lengths on each of them.
CASES = [
    ("llama", "ddp4"),
    ("llama", "zero2x4"),
    ("tied", "fsdp4"),
    ("llama", "hsdp2x2"),
    ("llama", "fsdp2.tp2"),
    ("llama", "single.tp2.pp2"),
    ("llama", "fsdp2.pp2"),
    ("qwen3", "fsdp2.sp2"),
    ("moe", "fsdp4.ep2"),
]


def record_steps(folder, cases):
    """Each rank writes what it asked for in the second step of each case."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100000"
    import torch.distributed as dist
    from torch._C._distributed_c10d import _dump_fr_trace_json

    from duoka.comm.world import end_world, start_world
    from duoka.config.schema import ParallelConfig
    from duoka.plan.layout import parse_layout

    def collectives():
        return json.loads(_dump_fr_trace_json(True, False)).get("entries", [])

    messages = []

    def noting(kind, send):
        def sent(tensor, group=None, **where):
            other = where["group_dst" if kind == "send" else "group_src"]
            messages.append([kind, dist.get_global_rank(group, other), list(tensor.shape), str(tensor.dtype)])
            return send(tensor, group=group, **where)

        return sent

    dist.isend, dist.irecv = noting("send", dist.isend), noting("recv", dist.irecv)
    world = start_world(ParallelConfig(strategy="fsdp"))
    seen = {}
    for name, text in cases:
        engine = build(folder / name, parse_layout(text), world)
        optimizer = make_optimizer("adamw", engine.named_trainable())
        for step in range(2):
            before = max((one["record_id"] for one in collectives()), default=-1)
            messages.clear()
            engine.forward_backward(global_batch(step, engine.mesh, 3), Mean())
            engine.clip(optimizer, CLIP)
            engine.step(optimizer)
            engine.zero_grad(optimizer)
        groups = dist.distributed_c10d._world
        ranks = {name: sorted(groups.pg_group_ranks[group]) for group, name in groups.pg_names.items()}
        asked = [asked_for(one, ranks, "ep" in text) for one in collectives() if one["record_id"] > before]
        seen[f"{name} {text}"] = {"collectives": asked, "messages": list(messages)}
    (folder / f"rank-{world.rank}.json").write_text(json.dumps(seen))
    world.barrier()
    end_world(world)


def asked_for(entry, ranks, has_experts):
    group = entry["process_group"][0]
    kind = entry["profiling_name"].partition(":")[2]
    # Rows that go to experts are as many as were routed: each rank has a number of its own.
    sizes = [] if has_experts and kind == "all_to_all" else entry["input_sizes"]
    return {"group": group, "ranks": ranks[group], "what": [kind, sizes, entry["input_dtypes"]]}


def differences(by_rank):
    """Of one case, in words: what ranks of one group did not do alike. `by_rank`: what each asked for, in order."""
    of_group, members = defaultdict(dict), {}
    for rank, entries in enumerate(by_rank):
        for entry in entries:
            group = (entry["group"], *entry["ranks"])
            members[group] = entry["ranks"]
            of_group[group].setdefault(rank, []).append(entry["what"])
    found = []
    for group, ranks in members.items():
        lists = [of_group[group].get(rank, []) for rank in ranks]
        for rank, one in zip(ranks, lists, strict=True):
            if one != lists[0]:
                at = next(
                    (place for place, (a, b) in enumerate(zip(one, lists[0], strict=False)) if a != b),
                    min(len(one), len(lists[0])),
                )
                found.append(f"group {ranks}: rank {rank} differs from rank {ranks[0]} at its collective {at}")
    return found


def test_a_difference_is_seen():
    def asked(kind, size=4, group="0", ranks=(0, 1)):
        return {"group": group, "ranks": list(ranks), "what": [kind, [[size]], ["Float"]]}

    a, b = asked("all_reduce"), asked("all_gather")
    assert not differences([[a, b], [a, b]])
    assert differences([[a, b], [b, a]]) == ["group [0, 1]: rank 1 differs from rank 0 at its collective 0"]
    assert differences([[a, b], [a]]) == ["group [0, 1]: rank 1 differs from rank 0 at its collective 1"]
    assert differences([[a], [asked("all_reduce", 8)]])
    other = asked("all_reduce", group="1", ranks=(0,))
    assert not differences([[a, other, b], [a, b]]), "of groups that a rank is not in it knows nothing"
    assert differences([[a], []])


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("order")
    for name in dict.fromkeys(name for name, _ in CASES):
        write_model(name, folder / name)
    run_world(4, record_steps, folder, CASES)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.parametrize("case", [f"{name} {text}" for name, text in CASES])
def test_every_rank_asks_for_the_same_in_the_same_order(seen, case):
    by_rank = [rank[case]["collectives"] for rank in seen]
    assert min(len(rank) for rank in by_rank) >= 1, "nothing was recorded"
    assert not differences(by_rank)


@pytest.mark.parametrize("case", [f"{name} {text}" for name, text in CASES if "pp" in text])
def test_what_a_stage_sends_is_what_the_next_one_awaits(seen, case):
    messages = [rank[case]["messages"] for rank in seen]
    for one, sent in enumerate(messages):
        for other, awaited in enumerate(messages):
            out = [what for kind, rank, *what in sent if (kind, rank) == ("send", other)]
            into = [what for kind, rank, *what in awaited if (kind, rank) == ("recv", one)]
            assert out == into, (one, other)
    assert sum(len(rank) for rank in messages) >= 4 * 2 * 2, "two micro-batches with a target, there and back"
