"""Promise 1 and the numbers about memory and traffic on CUDA and NCCL: the bodies are those of tests/promises.

On one GPU the splits of one process run; with more, all splits of as many processes. The oracle stays on the CPU.
"""

import json

import pytest
import torch
from gpus import num_gpus
from test_any_split import EVEN, SPLITS, batches, case, compare_held_with_plan, compare_with_oracle, oracles, run_splits
from test_collectives import KINDS, see_it_all
from test_ddp_options import HALVES, compare_half_with_whole, exchange_thin
from test_sequence import SOME, compare_all
from test_sharded import look_at
from test_together import PAIRS, run_cases
from worlds import run_world, train_all

from duoka.model.build import LossModel, load_model
from duoka.model.request import ModelRequest
from duoka.parallel.dp import Replicas
from duoka.plan.layout import SHARDED

__all__ = ["batches", "case", "oracles"]  # fixtures
# Sums of another order and another kernel: fp32 without TF32, over eight optimizer steps.
TOLERANCE = 1e-4
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")
POSSIBLE = [name for name, (_, size, _) in SPLITS.items() if size <= num_gpus()]


@pytest.fixture(scope="module")
def runs(case):
    return run_splits(case, POSSIBLE)


@pytest.mark.parametrize("name", POSSIBLE or ["no GPU"])
def test_every_split_on_gpus_equals_the_oracle(gpu, request, name):
    runs, oracles = request.getfixturevalue("runs"), request.getfixturevalue("oracles")
    compare_with_oracle(runs[name], name, oracles, TOLERANCE)


@pytest.mark.parametrize("name", [name for name in POSSIBLE if name in EVEN] or ["no GPU"])
def test_bytes_held_on_gpus_are_the_planned_ones(gpu, request, name):
    compare_held_with_plan(request.getfixturevalue("runs")[name], name)


def test_the_peak_lies_in_the_planned_range(gpu, request):
    """The allocator's peak, to which the plan's range less CUDA's own context is compared."""
    folder = request.getfixturevalue("runs")["1 process"]
    memory = json.loads((folder / "plan.json").read_text())["memory"]
    lines = (folder / "events" / "rank00000.jsonl").read_text().splitlines()
    peak = max(json.loads(line).get("memory_bytes", 0) for line in lines)
    framework = memory["parts"].get("framework", 0)
    assert memory["low_bytes"] - framework <= peak <= memory["high_bytes"], (peak, memory)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_begins_where_fp32_does_and_learns(gpu, case, precision):
    folder, yamls, _, _ = case
    count = min(2, num_gpus())
    ways = {name: way for name, way in HALVES.items() if count > 1 or name in SHARDED}
    longer = ["train.epochs=6"]
    jobs = []
    for name, way in ways.items():
        half = [*longer, *way, f"train.precision={precision}"]
        jobs.append((str(yamls["tied"]), [*longer, *way], str(folder / f"whole-{precision}-{name}")))
        jobs.append((str(yamls["tied"]), half, str(folder / f"{precision}-{name}")))
    train_all(jobs, count)
    for name in ways:
        compare_half_with_whole(folder / f"{precision}-{name}", folder / f"whole-{precision}-{name}")


def test_every_collective_of_nccl_is_right(two_gpus, tmp_path):
    run_world(two_gpus, see_it_all, str(tmp_path))
    report = json.loads((tmp_path / f"report-{two_gpus}.json").read_text())
    assert report["backend"] == "nccl" and [one["name"] for one in report["collectives"]] == list(KINDS)


def test_ranks_that_share_rows_on_nccl(two_gpus):
    layouts = [(f"{strategy}1·sp{two_gpus}", SOME) for strategy in ("ddp", "fsdp")]
    run_world(two_gpus, compare_all, layouts, TOLERANCE)


def test_a_model_cut_over_gpus_learns_what_one_process_learns(two_gpus, tmp_path):
    cut = [
        ("qwen3", "single.tp2", "sgd", 3, ""),
        ("tied", "single.pp2", "sgd", 3, ""),
        ("llama", "ddp1.sp2", "sgd", 3, ""),
        ("moe", "single.tp2.ep2", "sgd", 3, ""),
    ]
    run_cases(tmp_path, two_gpus, cut)


@pytest.mark.skipif(num_gpus() < 4, reason="fewer than four GPUs")
def test_two_axes_on_nccl_equal_one_process(gpu, tmp_path):
    run_cases(tmp_path, 4, PAIRS)


def test_thin_gradients_on_nccl(two_gpus):
    run_world(two_gpus, exchange_thin)


def test_strategies_exchange_what_they_should_on_nccl(two_gpus, case, tmp_path):
    """Counted by the ledger; the trace of NCCL's kernels has other names."""
    run_world(two_gpus, look_at, str(case[1]["tied"]), STRATEGIES, str(tmp_path))
    for strategy in STRATEGIES:
        facts = json.loads((tmp_path / f"{strategy}-0.json").read_text())
        kinds = {"ddp": {"all-reduce"}}.get(strategy, {"all-gather", "reduce-scatter"})
        assert set(facts["ledger"]) == kinds, strategy


def test_dp_evaluates_on_all_gpus_as_on_one(two_gpus, tiny_model):
    """The module itself, DataParallel's call, and weights copied once."""
    bare = LossModel(load_model(ModelRequest(tiny_model, dtype=torch.float32))).to("cuda:0").eval()
    model = Replicas(bare, list(range(two_gpus)), "fp32")
    ids = torch.randint(200, (5, 12), device="cuda:0")
    batch = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(12, device="cuda:0").repeat(5, 1)}
    with torch.no_grad():
        answers = [bare(**batch), model(**batch)]
        with model.replicated_once():
            answers += [model(**batch), model(**batch)]
    for loss, correct in answers[1:]:
        assert float(loss) == pytest.approx(float(answers[0][0]), rel=1e-5) and int(correct) == int(answers[0][1])
