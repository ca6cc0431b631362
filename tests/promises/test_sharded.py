"""What each strategy exchanges and holds: its own collectives and bytes, the oracle's gradients; and changing it."""

import gc
import json
import shutil
import threading
import time
import warnings
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from oracle import train as oracle_train
from safetensors.torch import load_file, save_file
from test_any_split import RECIPE, TOLERANCE, YAML, read_run, relative, worst
from tiny import write_conversations, write_tiny_model
from worlds import run_world, train_all

MICRO_BATCHES = 3
LAYERS = 4
# By the number of processes; `make nightly` looks at the others.
LOOKED_AT = {2: ("ddp", "zero1", "zero2", "fsdp"), 4: ("fsdp", "hsdp")}
OTHERS = {4: ("zero1", "zero2")}
PAIRS = "parallel.shard_ranks=2"


def build(yaml, overrides, folder, world=None):
    """(inputs, world, plan, contents, loader) of a run that is not trained."""
    from duoka.comm.world import start_world
    from duoka.config.load import load_config
    from duoka.runs.folder import RunFolder
    from duoka.train.main import read_inputs
    from duoka.train.run import build_run

    place = RunFolder(Path(folder))
    place.make()
    loaded = load_config(yaml, overrides)
    inputs = read_inputs(loaded, place)
    world = world or start_world(loaded.config.parallel)
    run = build_run(inputs, world)
    return inputs, world, run.plan, run.contents, run.feed


def least_of_some(look):
    """Over a moment: a thread of the transport may hold a tensor somewhat longer on a busy machine."""
    found = [look()]
    for _ in range(5):
        time.sleep(0.02)
        found.append(look())
    return min(found)


def live_bytes():
    """Unique storages of all tensors that Python can see, their gradients too."""
    gc.collect()
    warnings.simplefilter("ignore")  # asking odd objects for their type wakes some of torch's deprecations
    tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in local if not t.is_meta}
    return sum(storages.values())


def planned_sends(plan, per_node):
    from duoka.plan.traffic import traffic

    exchanges = traffic(plan.work, plan.layout, per_node, accumulation=MICRO_BATCHES)
    return [(one.kind, one.sent_bytes) for one in exchanges]


def look_at(yaml, strategies, folder):
    """For each strategy: collectives by kind of one step of three micro-batches, bytes held in it, its gradients."""
    from duoka.comm.ledger import LEDGER
    from duoka.comm.world import end_world
    from duoka.optim.build import optimizer_tensors
    from duoka.parallel.inputs import model_inputs
    from duoka.parallel.precision import compute_in
    from duoka.plan.recipe import static_memory
    from duoka.train.stages.stage import build_stage

    world = None
    for strategy in strategies:
        before = live_bytes()
        overrides = [f"parallel.strategy={strategy}", "data.packing=false", "train.micro_batch=1"]
        overrides += [PAIRS] if strategy == "hsdp" else []
        inputs, world, plan, contents, loader = build(yaml, overrides, f"{folder}/{strategy}", world)
        engine = contents.engine
        held = optimizer_tensors(contents.optimizer, engine.named_trainable())  # as after a first step
        batch = next(loader.from_cursor(0, 0, 1.0))
        device = world.device
        # Bytes: in the middle of a step, when all that it accumulates is there.
        micro = batch.micro_batches[0]
        with engine.exchange(False), compute_in(plan.layout.precision, device):
            loss, _ = engine.model(**model_inputs(micro, device))
            loss.backward()
        del loss, held
        measured = least_of_some(live_bytes) - before
        with engine.exchange(True), compute_in(plan.layout.precision, device):
            engine.model(**model_inputs(micro, device))[0].backward()
        contents.optimizer.zero_grad()
        # Collectives and gradients: a step of several micro-batches.
        short = replace(batch, micro_batches=batch.micro_batches[:MICRO_BATCHES])
        LEDGER.take()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as trace:
            times = engine.forward_backward(short, build_stage(inputs.config)).times
        events = [event for event in trace.events() if event.name.startswith("c10d::")]
        names = Counter(event.name for event in events)
        traffic = LEDGER.take()
        contents.optimizer.zero_grad()
        engine.forward_backward(batch, build_stage(inputs.config))
        whole = {
            name: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).clone()
            for name, p in engine.named_trainable().items()
        }
        facts = {
            "collectives": names,
            "measured": measured,
            "planned": static_memory(plan.work, plan.layout).total_bytes,
            # The first shape of each is the whole buffer, of fp32; lists of tensors (all-reduce) show none.
            "traced": {name: sum(4 * e.input_shapes[0][0] for e in events if e.name == name) for name in WHOLE},
            "ledger": {kind: asdict(one) for kind, one in traffic.items()},
            "plan_sends": planned_sends(plan, world.size),
            "num_parameters": sum(p.numel() for p in engine.named_trainable().values()),
            "times": asdict(times),
        }
        (Path(folder) / f"{strategy}-{world.rank}.json").write_text(json.dumps(facts))
        if world.is_main:
            save_file(whole, f"{folder}/{strategy}.safetensors")
        del engine, contents, loader, batch, short, micro, inputs, trace, whole, facts
    end_world(world)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    data = write_conversations(folder / "chats.jsonl", 34, seed=3)
    model = write_tiny_model(folder / "model", layers=LAYERS)
    yaml = folder / "run.yaml"
    yaml.write_text(YAML.format(model=model, data=data, output=folder / "out"), encoding="utf-8")
    return folder, yaml, model, data


@pytest.fixture(
    scope="module",
    params=[pytest.param(LOOKED_AT, id="daily"), pytest.param(OTHERS, id="others", marks=pytest.mark.nightly)],
)
def seen(request, case):
    """What `look_at` saw, by (number of processes, strategy)."""
    folder, yaml, _, _ = case
    found = {}
    for size, strategies in request.param.items():
        place = folder / f"look-{size}-{len(strategies)}-{strategies[0]}"
        place.mkdir()
        run_world(size, look_at, str(yaml), strategies, str(place))
        for strategy in strategies:
            facts = json.loads((place / f"{strategy}-0.json").read_text())
            found[size, strategy] = facts | {"gradients": load_file(place / f"{strategy}.safetensors")}
    return found


# Gloo's own reduce-scatter would send a whole all-reduce: gradients are scattered by an all-to-all and a local sum.
GATHER, SCATTER, REDUCE = "c10d::_allgather_base_", "c10d::alltoall_base_", "c10d::allreduce_"
WHOLE = (GATHER, SCATTER)
UNITS = LAYERS + 1  # and the root, which holds the tied embedding
AGAIN = 2 * LAYERS + 1  # a pass forward and back; the root stays gathered in between
WANTED = {
    "ddp": {REDUCE: 1},
    "zero1": {GATHER: UNITS, SCATTER: UNITS},
    "zero2": {GATHER: UNITS, SCATTER: MICRO_BATCHES * UNITS},
    "fsdp": {GATHER: MICRO_BATCHES * AGAIN, SCATTER: MICRO_BATCHES * UNITS},
    "hsdp": {GATHER: MICRO_BATCHES * AGAIN, SCATTER: MICRO_BATCHES * UNITS, REDUCE: UNITS},
}


def test_each_strategy_has_its_own_collectives(seen):
    for (size, strategy), facts in seen.items():
        # DDP tells its ranks of its buckets once, after the first step.
        found = {name: count for name, count in facts["collectives"].items() if name != "c10d::broadcast_"}
        assert found == WANTED[strategy], f"{strategy} on {size}"


def test_the_ledger_counts_what_the_trace_shows(seen):
    kinds = {"all-gather": GATHER, "reduce-scatter": SCATTER, "all-reduce": REDUCE}
    for (size, strategy), facts in seen.items():
        ledger = facts["ledger"]
        assert {kinds[kind]: one["num_calls"] for kind, one in ledger.items()} == WANTED[strategy], strategy
        for kind in ("all-gather", "reduce-scatter"):
            counted = ledger[kind]["buffer_bytes"] if kind in ledger else 0
            assert counted == facts["traced"][kinds[kind]], f"{kind} under {strategy} on {size}"


def test_bytes_sent_are_the_theory_s(seen):
    """2P for DDP and ZeRO-1, (g+1)P for ZeRO-2, 3gP for ZeRO-3, each times (N-1)/N; the tied root is gathered once."""
    g = MICRO_BATCHES
    for (size, strategy), facts in seen.items():
        whole = 4 * facts["num_parameters"]
        root = 4 * 64 * (264 + 1)
        copies = {"ddp": 2, "zero1": 2, "zero2": g + 1, "fsdp": 3 * g, "hsdp": 3 * g}[strategy]
        kept = g * root if strategy in ("fsdp", "hsdp") else 0
        sharing = 2 if strategy == "hsdp" else size
        theory = (copies * whole - kept) * (sharing - 1) / sharing
        # Between two groups: twice the shard, half of which is one's own.
        theory += 2 * whole / sharing * 0.5 if strategy == "hsdp" else 0
        sent = sum(one["sent_bytes"] for one in facts["ledger"].values())
        assert abs(sent / theory - 1) < 0.02, f"{strategy} on {size} sent {sent}, {theory} in theory"


def test_the_plan_sends_what_the_ledger_counts(seen):
    """By kind of collective. benchmarks/traffic.py has the theory a third time, by hand, and the network's counters."""
    for (size, strategy), facts in seen.items():
        planned = Counter()
        for kind, sent in facts["plan_sends"]:
            planned[kind] += sent
        counted = {kind: one["sent_bytes"] for kind, one in facts["ledger"].items() if one["sent_bytes"]}
        assert planned.keys() == counted.keys(), f"{strategy} on {size}"
        for kind, sent in counted.items():
            assert abs(planned[kind] / sent - 1) < 0.02, f"{kind} under {strategy} on {size}: {planned[kind]}, {sent}"


def test_waiting_is_seen_under_sharded_strategies(seen):
    for (size, strategy), facts in seen.items():
        if strategy != "ddp":  # whose waiting the optimizer step adds
            assert facts["times"]["wait_s"] > 0, f"{strategy} on {size}"


def test_bytes_held_in_the_middle_of_a_step_are_the_planned_ones(seen):
    for (size, strategy), facts in seen.items():
        ratio = facts["measured"] / facts["planned"]  # not what FSDP keeps of the last gradients that were sent
        assert abs(ratio - 1) < 0.02, f"{strategy} on {size}: {ratio} of the plan"


def test_gradients_equal_the_oracle(case, seen):
    from duoka.config.load import load_config
    from duoka.data.feed.epoch_plan import EpochPlan
    from duoka.data.prepare import prepare_data
    from duoka.units import parse_amount

    _, yaml, model, data = case
    store = prepare_data(load_config(yaml).config, yaml.parent, model).train
    plan = EpochPlan(
        store.lengths, store.num_targets, fingerprint=store.fingerprint, seed=7, global_batch=parse_amount(8)
    )
    wanted = {}
    oracle_train(data, model, [plan.batch(0, 0).tolist()] * 2, **RECIPE, gradients=wanted)
    for (size, strategy), facts in seen.items():
        error, name = worst(facts["gradients"], wanted)
        assert error < TOLERANCE, f"gradient of {name} under {strategy} on {size} is off by {error}"


def resident_bytes():
    """Memory of this process that no file stands behind."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return 1024 * int(line.split()[1])
    raise AssertionError("no RssAnon")


def grow(function):
    """(result, how much the process's own memory had grown at most while `function` ran)."""
    seen, done, before = [0], threading.Event(), resident_bytes()

    def watch():
        while not done.wait(0.001):
            seen.append(resident_bytes() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result = function()
    finally:
        done.set()
        watcher.join()
    return result, max(*seen, resident_bytes() - before)


def load_both_ways(yaml, folder):
    from duoka.comm.world import end_world
    from duoka.model.build import load_model
    from duoka.model.request import ModelRequest
    from duoka.model.shards import WeightSource

    plain_read, num_read = WeightSource.read, [0]

    def read(self, *arguments, **options):
        values = plain_read(self, *arguments, **options)
        num_read[0] += values.numel()
        return values

    WeightSource.read = read
    (inputs, world, _, contents, _), sharded = grow(lambda: build(yaml, ["parallel.strategy=fsdp"], folder))
    num_parameters = sum(p.numel() for p in contents.engine.bare.lm.parameters())
    total = 4 * num_parameters
    whole, plain = grow(lambda: load_model(ModelRequest(inputs.folder, dtype=torch.float32)))
    seen = [sharded / total, plain / total, num_read[0] / num_parameters]
    Path(folder, f"grew-{world.rank}.json").write_text(json.dumps(seen))
    del whole
    end_world(world)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_loading_never_holds_a_full_copy_per_rank(tmp_path, case):
    model = write_tiny_model(tmp_path / "model", tied=False, hidden=768, layers=LAYERS, dtype="bfloat16")
    yaml = tmp_path / "run.yaml"
    yaml.write_text(YAML.format(model=model, data=case[3], output=tmp_path / "out"), encoding="utf-8")
    run_world(4, load_both_ways, str(yaml), str(tmp_path))
    shares = []
    for rank in range(4):
        sharded, plain, read = json.loads((tmp_path / f"grew-{rank}.json").read_text())
        shares.append(read)
        assert plain > 0.9, "the way to measure must see a full copy"
        assert sharded < 0.5, f"rank {rank} held {sharded:.2f} of the model; its share is a quarter"
    assert abs(sum(shares) - 1) < 1e-6, f"the ranks of a node read the weights {sum(shares)} times, not once: {shares}"
    assert max(shares) < 0.27


def start_from(source, step, target):
    (target / "checkpoints").mkdir(parents=True)
    name = f"step-{step:08d}"
    shutil.copytree(source / "checkpoints" / name, target / "checkpoints" / name)


def test_a_run_goes_on_under_another_strategy(case):
    """ddp on 2 -> fsdp on 4 -> zero1 on 2 -> one process: the numbers and weights of the run that never changed."""
    folder, yaml, _, _ = case
    settings = ["checkpoint.every=2", "checkpoint.keep=10", "train.micro_batch=300 tokens"]

    def job(name, strategy):
        return (str(yaml), [*settings, f"parallel.strategy={strategy}"], str(folder / name))

    train_all([job("whole", "ddp")], 2)
    start_from(folder / "whole", 2, folder / "on-fsdp")
    train_all([job("on-fsdp", "fsdp")], 4)
    start_from(folder / "on-fsdp", 4, folder / "on-zero1")
    train_all([job("on-zero1", "zero1")], 2)
    start_from(folder / "on-zero1", 6, folder / "on-one")
    train_all([job("on-one", "single")], 1)
    whole = read_run(folder / "whole")
    for name, first in (("on-fsdp", 2), ("on-zero1", 4), ("on-one", 6)):
        steps = read_run(folder / name)
        assert [step["step"] for step in steps] == list(range(first + 1, len(whole) + 1))
        for key in ("loss", "grad_norm", "lr"):
            error = relative([step[key] for step in steps], [step[key] for step in whole[first:]])
            assert error < TOLERANCE, f"{key} of {name} is off by {error}"
        weights = (load_file(one / "final" / "model.safetensors") for one in (folder / name, folder / "whole"))
        error, tensor = worst(*weights)
        assert error < TOLERANCE, f"{tensor} of {name} is off by {error}"


def test_the_same_sharded_layout_goes_on_bit_for_bit(case):
    folder, yaml, _, _ = case
    settings = ["checkpoint.every=4", "checkpoint.keep=10", "parallel.strategy=fsdp"]
    train_all([(str(yaml), settings, str(folder / "unbroken"))], 2)
    start_from(folder / "unbroken", 4, folder / "resumed")
    train_all([(str(yaml), settings, str(folder / "resumed"))], 2)
    keys = ("loss", "grad_norm", "lr")
    ours, want = ([[step[key] for key in keys] for step in read_run(folder / name)] for name in ("resumed", "unbroken"))
    assert ours == want[4:]
    mine, theirs = (load_file(folder / name / "final" / "model.safetensors") for name in ("resumed", "unbroken"))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def drift(yaml, folder):
    """Rank 3 has another value than rank 1, which holds the same shard; rank 2 has the same as rank 0."""
    from duoka.comm.world import end_world
    from duoka.errors import WorkerFailed
    from duoka.train.replicas import check_replicas

    _, world, _, contents, _ = build(yaml, ["parallel.strategy=hsdp", PAIRS], folder)
    check_replicas(contents, world)
    name = "model.layers.1.mlp.up_proj.weight"
    if world.rank == 3:
        with torch.no_grad():
            contents.engine.named_trainable()[name].to_local()[0, 0] += 1e-3
    with pytest.raises(WorkerFailed, match=rf"(?s)rank 3 has other values than rank 1 in model.{name}"):
        check_replicas(contents, world)
    end_world(world)


def test_a_shard_that_drifts_from_its_replica_is_found(case):
    run_world(4, drift, str(case[1]), str(case[0] / "drift"))
