"""ZeRO++ under DeepSpeed's own control flow: its quantizer's arithmetic on CPUs (cuda_quantizer.py), all else its own.

Two ranks are two nodes of one, four are two of two: DeepSpeed packs gradients between nodes alone.
"""

import contextlib
import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from needs import need_deepspeed
from safetensors.torch import load_file
from tiny import build_tiny_tokenizer, write_conversations, write_tiny_model
from worlds import run_world, train_jobs

need_deepspeed()
pytestmark = pytest.mark.timeout(400)

YAML = """
model: {model}
data: {{train: [{data}], max_length: 256, packing: false}}
optim: {{lr: 5e-4, clip: 1.0}}
train: {{max_steps: 10, epochs: 100, global_batch: 4, micro_batch: 1, precision: fp32, seed: 7}}
checkpoint: {{every: 3}}
parallel: {{strategy: zero3, check_replicas: 1}}
log: {{to: [], every: 1}}
output: {output}
"""
# Nothing but vectors stays gathered from one use to the next.
SWITCHES = {
    "stage3_param_persistence_threshold": 1000, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 100000,
}  # fmt: skip
ENGINE = ["parallel.engine=deepspeed", *(f"parallel.deepspeed.{name}={value}" for name, value in SWITCHES.items())]
WEIGHTS, GRADIENTS = "parallel.compress={weights: int8}", "parallel.compress={gradients: int4}"
DAILY = "train.max_steps=6"  # at night 10
BOTH, NEAR = "parallel.compress={weights: int8, gradients: int4}", "parallel.reshard=node"
PACKED = {"weights": [WEIGHTS], "gradients": [GRADIENTS], "both": [BOTH], "bf16": [BOTH, "train.precision=bf16"]}
IN_NODES = {"weights, near": [WEIGHTS, NEAR], "both, near": [BOTH, NEAR]}
SHAPES = {"matrix": (256, 512), "odd rows": (250, 264), "narrow": (512, 64), "vector": (512,), "three": (4, 256, 256)}


def write_model(folder):
    """A Llama all of whose matrices ZeRO++ packs: no side is shorter than what a warp reads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=264, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        initializer_range=0.08, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    build_tiny_tokenizer().save_pretrained(folder)
    return folder


def as_nodes_of(near, jobs):
    """`train_jobs` where so many processes are a node, with a quantizer."""
    import cuda_quantizer

    rank = int(os.environ["RANK"])
    os.environ.update(LOCAL_WORLD_SIZE=str(near), LOCAL_RANK=str(rank % near), LOCAL_SIZE=str(near))
    cuda_quantizer.put_in()
    train_jobs(jobs)


def note_calls(file):
    import cuda_quantizer

    file.write_text(json.dumps(cuda_quantizer.CALLS), encoding="utf-8")
    cuda_quantizer.CALLS.clear()


def start_from(source, target):
    shutil.copytree(source / "checkpoints" / "step-00000003", target / "checkpoints" / "step-00000003")


def jobs_of(case, runs):
    for name, settings in runs.items():
        yield str(case / "run.yaml"), [*ENGINE, *settings], str(case / name)
        yield partial(note_calls, case / f"{name}.calls")


def refuse_and_train(folder, jobs):
    """A world of two: a model that cannot be packed is refused, and after that these are trained."""
    from duoka.errors import ConfigError

    odd = (str(folder / "odd.yaml"), [*ENGINE, BOTH], str(folder / "odd"))
    with pytest.raises(ConfigError) as found:
        as_nodes_of(1, [odd])
    (folder / f"refused-{os.environ['RANK']}").write_text(str(found.value), encoding="utf-8")
    (folder / "packable").write_text(json.dumps(packable(200)), encoding="utf-8")
    as_nodes_of(1, jobs)


def packable(most):
    """Of how many numbers DeepSpeed packs a part."""
    import cuda_quantizer
    from deepspeed.runtime.zero.partition_parameters import CUDAQuantizer

    found = []
    for count in range(1, most):
        with contextlib.suppress(AssertionError):
            CUDAQuantizer().quantize(torch.ones(count))
            found.append(count)
    cuda_quantizer.CALLS.clear()
    return found


def go_on(case, name, settings):
    yield partial(start_from, case / "both", case / name)
    yield str(case / "run.yaml"), settings, str(case / name)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zero++")
    data = write_conversations(folder / "chats.jsonl", 24, seed=3)
    models = {"run": write_model(folder / "model"), "odd": write_tiny_model(folder / "odd-model", odd=True)}
    for name, model in models.items():
        text = YAML.format(model=model, data=data, output=folder / "out")
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def runs(case):
    runs = {"plain": [], "both": [BOTH], "bf16": [BOTH, "train.precision=bf16", "train.max_steps=2"]}
    jobs = [
        *jobs_of(case, {name: [DAILY, *settings] for name, settings in runs.items()}),
        *go_on(case, "both again", [*ENGINE, BOTH, DAILY]),
        *go_on(case, "native after", [BOTH, DAILY]),
    ]
    run_world(2, refuse_and_train, case, jobs)
    return case


def read_steps(folder):
    lines = (folder / "events" / "run.jsonl").read_text(encoding="utf-8").splitlines()
    return [one for one in map(json.loads, lines) if one["type"] == "step"]


def compare(case, name, plain, first=0):
    """Losses and the first gradient norm within 2% of those of plain bytes, and none of them the same."""
    own, wanted = read_steps(case / name), read_steps(case / plain)[first:]
    assert [step["step"] for step in own] == [step["step"] for step in wanted]
    for one, other in zip(own, wanted, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=0.02), f"step {one['step']} of {name}"
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=0.05), f"step {one['step']} of {name}"
    assert first or own[0]["grad_norm"] == pytest.approx(wanted[0]["grad_norm"], rel=0.02), name
    assert not {step["loss"] for step in own[1:]} & {step["loss"] for step in wanted[1:]}, "results change, by a little"


def check_calls(case, name, num_steps):
    """All of DeepSpeed's calls that there must be, and no others."""
    calls = json.loads((case / f"{name}.calls").read_text(encoding="utf-8"))
    kinds = {"quantize"} if "weights" in name else {"swizzle_quant", "quantized_reduction"}
    kinds |= {"quantize", "swizzle_quant", "quantized_reduction"} if name.startswith(("both", "bf16")) else set()
    assert calls.keys() == kinds | {"dequantize"}, name
    for kind in kinds:  # of 15 matrices gradients one by one, weights several together
        assert calls[kind] >= num_steps * (15 if kind != "quantize" else 5), f"{kind} of {name}"


def check_bytes(case, name, settings, size, per_node):
    from duoka.config.load import load_config
    from duoka.plan.hardware import Gpu, Machine
    from duoka.plan.report import make_plan
    from duoka.plan.shape import read_shape
    from duoka.plan.traffic import traffic

    config = load_config(str(case / "run.yaml"), [*ENGINE, *settings]).config
    machine = Machine(2, 2**34, 2**34, gpus=(Gpu("NVIDIA H100", 80 << 30, 80 << 30, 9.0),) * per_node)
    plan = make_plan(config, read_shape(case / "model"), machine, size, local_size=per_node)
    planned = [
        sum(one.sent_bytes for one in traffic(plan.work, plan.layout, per_node, accumulation=num, tokens=100))
        for num in (1, 2, 3, 4)  # micro-batches
    ]
    for step in read_steps(case / name)[1:]:  # the first has what is sent at the start
        nearest = min(planned, key=lambda wanted: abs(wanted - step["sent_bytes"]))
        assert step["sent_bytes"] == pytest.approx(nearest, rel=0.03), f"step {step['step']} of {name}: {planned}"


def test_weights_in_8_bits_and_gradients_in_4_learn_as_plain_bytes_do(runs):
    compare(runs, "both", "plain")
    check_calls(runs, "both", 6)
    assert read_steps(runs / "bf16")[0]["loss"] == pytest.approx(read_steps(runs / "plain")[0]["loss"], rel=0.02)
    check_calls(runs, "bf16", 2)  # DeepSpeed by itself refuses autocast beside packed weights
    assert json.loads((runs / "plain.calls").read_text(encoding="utf-8")) == {}


def test_bytes_sent_are_the_planned_ones(runs):
    check_bytes(runs, "plain", [], 2, 1)
    check_bytes(runs, "both", PACKED["both"], 2, 1)


def test_a_run_goes_on_bit_for_bit_and_natively(runs):
    own, wanted = (read_steps(runs / name) for name in ("both again", "both"))
    numbers = [[(step["step"], step["loss"], step["grad_norm"]) for step in steps] for steps in (own, wanted[3:])]
    assert numbers[0] == numbers[1] and len(own) == 3
    mine, theirs = (load_file(runs / name / "final" / "model.safetensors") for name in ("both again", "both"))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    compare(runs, "native after", "both", 3)


def test_weights_that_it_cannot_pack_are_refused_on_every_rank(runs):
    assert json.loads((runs / "packable").read_text(encoding="utf-8")) == [*range(8, 200, 8)], "DeepSpeed's own rule"
    for rank in range(2):
        said = (runs / f"refused-{rank}").read_text(encoding="utf-8")
        assert "of a multiple of 8 numbers" in said and "for each of 2 processes" in said and "engine: native" in said


# --- many more, at night ---


@pytest.fixture(scope="module")
def in_nodes(case):
    """Two nodes of two."""
    runs = {f"{name} on 4": settings for name, settings in ({"plain": []} | PACKED | IN_NODES).items()}
    run_world(4, as_nodes_of, 2, list(jobs_of(case, runs)))
    run_world(4, look_at_exchange, case)
    return case


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*PACKED, *IN_NODES])
def test_nodes_of_two_do_too(in_nodes, name):
    compare(in_nodes, f"{name} on 4", "plain on 4")
    check_calls(in_nodes, f"{name} on 4", 10)
    if name != "bf16":
        check_bytes(in_nodes, f"{name} on 4", (PACKED | IN_NODES)[name], 4, 2)


@pytest.mark.nightly
def test_copies_inside_a_node_change_no_bit(in_nodes):
    for name in ("weights", "both"):
        own, wanted = (
            [(step["loss"], step["grad_norm"]) for step in read_steps(in_nodes / f"{one} on 4")]
            for one in (f"{name}, near", name)
        )
        assert own == wanted, name


def look_at_exchange(folder):
    """Four ranks: what DeepSpeed's exchange of gradients gives each, of those that its kernels take and of others."""
    import cuda_quantizer
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    os.environ.update(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(rank % 2), LOCAL_SIZE="2")
    cuda_quantizer.put_in()
    from deepspeed.runtime.zero import stage3
    from deepspeed.utils import groups

    from duoka.parallel.deepspeed_package import begin_deepspeed
    from duoka.parallel.deepspeed_packed import pack_as_half

    dist.init_process_group("gloo")
    begin_deepspeed(torch.device("cpu"))
    ours = groups._get_local_all_to_all_group()
    pack_as_half(ours, torch.device("cpu"))
    facts = {}
    for dtype in (torch.float32, torch.bfloat16):
        everyone = [
            [torch.randn(shape, generator=torch.Generator().manual_seed(one)).to(dtype) for shape in SHAPES.values()]
            for one in range(4)
        ]
        means = [torch.stack([one[at].float() for one in everyone]).mean(0) for at in range(len(SHAPES))]
        found = stage3.all_to_all_quant_reduce([one.clone() for one in everyone[rank]], ours)
        for name, own, mean in zip(SHAPES, found, means, strict=True):
            wanted = mean.view(-1).chunk(4)[rank]
            facts[f"{name}, {dtype}"] = ((own.float() - wanted).norm() / wanted.norm()).item()
            assert own.dtype == dtype and own.shape == wanted.shape, name
    broken = torch.ones(256, 512)
    broken[0, 0] = torch.nan if rank == 3 else 1.0
    (part,) = stage3.all_to_all_quant_reduce([broken], ours)
    facts["not finite"] = part.isnan().sum().item()
    Path(folder, f"exchange-{rank}").write_text(json.dumps(facts), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.nightly
def test_gradients_arrive_as_their_mean_and_what_kernels_do_not_take_arrives_whole(in_nodes):
    """4 bits of noise are off by a tenth or two; a sum of a node's would be off by 1, bytes of fp32 by more."""
    facts = [json.loads((in_nodes / f"exchange-{rank}").read_text(encoding="utf-8")) for rank in range(4)]
    for rank, told in enumerate(facts):
        assert told["not finite"] == (256 if rank == 0 else 0), "of a group with NaN all is NaN, and of no other"
        for name in SHAPES:
            for dtype, whole in (("float32", 1e-6), ("bfloat16", 1e-2)):
                error = told[f"{name}, torch.{dtype}"]
                assert 0.05 < error < 0.25 if name in ("matrix", "three") else error < whole, (
                    f"{name}, {dtype}: {error}"
                )
