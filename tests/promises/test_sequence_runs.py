"""Whole runs with `parallel.sequence`: what they report and leave, where they go on, and how they end."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from struck import finish, start, wait_for_step
from test_any_split import TOLERANCE, YAML, read_run, relative, worst
from tiny import write_conversations, write_tiny_model
from worlds import run_world, train_all

from duoka.cluster.fault_injection import strike
from duoka.runs.folder import RunFolder
from duoka.runs.status import read_status

pytestmark = pytest.mark.timeout(400)

CUT = "train.micro_batch=200 tokens"
PADDED = ("data.packing=false", "train.micro_batch=2")
SHARED = "parallel.sequence=2"
LORA = "lora={rank: 3, dropout: 0.2}"
LOOKS = ("data.eval=0.2", "train.eval_every=3")
TEXT = ("stage=pretrain", "data.max_length=128", *LOOKS)
# All drop attention weights. even: 4 heads, which two ranks deal out; odd: 3, so that they gather keys.
SPLITS = {
    "even": ("even", 1, [CUT, *LOOKS, "checkpoint.every=1", "checkpoint.keep=9"]),
    "odd": ("odd", 1, [CUT]),
    "text": ("text", 1, [*TEXT, "log.samples=2"]),
    "LoRA": ("even", 1, [CUT, LORA]),
    "even, shared": ("even", 2, [CUT, *LOOKS, SHARED, "train.rehearse=true", "train.recompute=selective"]),
    "odd, shared, padded": ("odd", 2, [*PADDED, SHARED, "train.recompute=full"]),
    "odd, shared, fsdp, packed": ("odd", 2, [CUT, SHARED, "parallel.strategy=fsdp"]),
    "text, shared, zero1": ("text", 2, [*TEXT, "log.samples=2", SHARED, "parallel.strategy=zero1"]),
    "LoRA, shared": ("even", 2, [CUT, LORA, SHARED]),
}
# Each goes on from what the one before it saved, after as many steps.
CHAIN = (
    ("even", 1, "then sp2", 2, [SHARED]),
    ("then sp2", 2, "then fsdp2.sp2", 4, [SHARED, "parallel.strategy=fsdp"]),
    ("then fsdp2.sp2", 3, "then ddp2", 2, []),
)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sequence")
    data = write_conversations(folder / "chats.jsonl", 16, seed=3, longest=8)
    yamls = {}
    for name in ("even", "odd", "text"):
        model = write_tiny_model(folder / f"{name}-model", odd=name == "odd", layers=2)
        data = write_text(folder / "text.jsonl") if name == "text" else data
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.1}))
        yamls[name] = folder / f"{name}.yaml"
        yamls[name].write_text(YAML.format(model=model, data=data, output=folder / "out"), encoding="utf-8")
    return folder, yamls


def write_text(path):
    words = ("cat", "rank", "ring", "tokens", "layer", "你好")
    lines = [" ".join(words[(n * k) % 6] for k in range(3 + 7 * (n % 5))) for n in range(30)]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def runs(case):
    folder, yamls = case
    for size in (1, 2):
        jobs = [(str(yamls[model]), how, str(folder / name)) for name, (model, n, how) in SPLITS.items() if n == size]
        train_all(jobs, size)
    return folder


def final_of(folder):
    return load_file(next((folder / "final").glob("*model.safetensors")))


def compare(folder, whole, after=0):
    theirs = read_run(whole)[after:]
    for key in ("loss", "grad_norm", "num_targets", "num_tokens"):
        error = relative([step[key] for step in read_run(folder)], [step[key] for step in theirs])
        assert error < TOLERANCE, f"{key} is off by {error}"
    error, tensor = worst(final_of(folder), final_of(whole))
    assert error < TOLERANCE, f"{tensor} is off by {error}"


@pytest.mark.parametrize("name", [name for name in SPLITS if "shared" in name])
def test_a_run_that_shares_rows_is_the_run_of_one_process(runs, name):
    compare(runs / name, runs / name.split(",")[0])


def events_of(folder, kind):
    lines = [json.loads(line) for line in (folder / "events" / "run.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["type"] == kind]


@pytest.mark.parametrize("name", ["even, shared", "text, shared, zero1"])
def test_evaluations_and_samples_are_those_of_one_process(runs, name):
    whole = name.split(",")[0]
    alone, shared = (events_of(runs / one, "eval") for one in (whole, name))
    assert len(alone) == len(shared) > 1
    for key in ("loss", "accuracy", "num_samples", "num_targets"):
        assert relative([one[key] for one in shared], [one[key] for one in alone]) < TOLERANCE, key
    texts = [[(one["step"], one["samples"]) for one in events_of(runs / one, "samples")] for one in (whole, name)]
    assert texts[0] == texts[1] and len(texts[0]) == (len(alone) if whole == "text" else 0)


def test_each_rank_holds_what_the_plan_says_and_half_of_the_tokens(runs):
    for name in ("odd, shared, fsdp, packed", "even, shared"):
        (held,) = events_of(runs / name, "memory")
        plan = json.loads((runs / name / "plan.json").read_text())
        want = next(row for row in plan["static"] if row["strategy"] == plan["layout"]["strategy"])
        for one in held["ranks"]:
            for part in ("weights", "gradients", "optimizer"):
                assert abs(one[f"{part}_bytes"] / want[f"{part}_bytes"] - 1) < 0.05, (name, part, one, want)
    (alone,), (shared,) = (events_of(runs / name, "memory") for name in ("odd", "odd, shared, fsdp, packed"))
    tokens = alone["ranks"][0]["num_tokens"]
    assert [one["num_tokens"] for one in shared["ranks"]] == [-(-tokens // 2)] * 2


def test_the_banner_and_the_plan_say_how_rows_are_shared(runs):
    reasons = {
        name: json.loads((runs / name / "plan.json").read_text())["reasons"]["parallel.sequence"]
        for name in ("even, shared", "odd, shared, padded")
    }
    assert "all-to-all: each rank attends with 2 of 4 heads" in reasons["even, shared"]
    assert "all-gather: 3 heads do not divide by 2" in reasons["odd, shared, padded"]


def test_a_run_goes_on_under_one_layout_after_the_other(case, runs):
    folder, yamls = case
    for before, step, name, size, how in CHAIN:
        place = f"checkpoints/step-{step:08d}"
        (folder / name / "checkpoints").mkdir(parents=True)
        shutil.copytree(folder / before / place, folder / name / place)
        saves = ["checkpoint.every=1", "checkpoint.keep=9", "checkpoint.resume=auto"]
        train_all([(str(yamls["even"]), [CUT, *LOOKS, *saves, *how], str(folder / name))], size)
        compare(folder / name, folder / "even", after=step)


def test_the_command_stops_goes_on_and_survives_a_killed_rank(case):
    """As a user types it: stopped by a signal, started again, one of its ranks killed."""
    folder, yamls = case
    how = (SHARED, CUT, "train.epochs=6", "checkpoint.every=4")
    train_all([(str(yamls["even"]), list(how), str(folder / "undisturbed"))], 2)
    run = RunFolder(folder / "struck")
    process = start(yamls["even"], run.path, *how)
    ranks = wait_for_step(run, 3)
    strike([ranks[1]], "SIGTERM")
    code, output = finish(process)
    assert code == 75 and "Traceback" not in output, output
    assert "all-to-all: each rank attends" in output
    stopped = read_status(run).step
    process = start(yamls["even"], run.path, *how, "--restarts", "1")
    ranks = wait_for_step(run, stopped + 2, old_pids=[beat.pid for beat in ranks.values()])
    strike([ranks[0]], "SIGKILL")
    code, output = finish(process)
    assert code == 0 and "was killed by SIGKILL" in output and "Traceback" not in output, output
    ours, theirs = (final_of(path) for path in (run.path, folder / "undisturbed"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def count_bytes(yamls, folder):
    """The ledger of one step beside what the plan says of each of its micro-batches."""
    from test_sharded import build

    from duoka.comm.ledger import LEDGER
    from duoka.comm.world import end_world
    from duoka.plan.traffic import traffic
    from duoka.train.stages.stage import build_stage

    world = None
    for name, yaml in yamls.items():
        inputs, world, plan, contents, feed = build(yaml, [CUT, SHARED], f"{folder}/{name}", world)
        batch = next(feed.from_cursor(0, 0, 1.0))
        LEDGER.take()
        contents.engine.forward_backward(batch, build_stage(inputs.config))
        sent = {kind: one.sent_bytes for kind, one in LEDGER.take().items()}
        planned = dict.fromkeys(sent, 0.0)
        for micro in batch.micro_batches:
            for one in traffic(plan.work, plan.layout, 2, accumulation=1, tokens=micro.input_ids.numel()):
                if one.what.startswith("sequence parallel"):
                    planned[one.kind] += one.sent_bytes
        assert len(planned) == (3 if name == "odd" else 2), (name, sent)
        for kind, size in planned.items():
            assert kind == "all-reduce" or abs(sent[kind] / size - 1) < 0.02, (name, kind, sent, planned)
        del contents, feed, batch
    end_world(world)


def test_bytes_of_an_exchange_are_the_plans(case):
    folder, yamls = case
    run_world(2, count_bytes, {name: str(yamls[name]) for name in ("even", "odd")}, str(folder / "counted"))
