"""A model from nothing is the same model, and learns the same, whoever draws how much of it."""

import json
import math
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import build_tiny_tokenizer, write_conversations
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from worlds import run_world, train_all

from duoka.cli import run
from duoka.config.load import load_config
from duoka.hub.models import model_folder
from duoka.model.build import load_model
from duoka.model.request import ModelRequest

TOLERANCE = 1e-5
STEPS = 8
LONG = 48  # to learn more than counting

YAML = """
model: {{depth: 2, tokenizer: {tokenizer}, width: 64, head_dim: 16, kv_heads: 2}}
data: {{train: [{text}], eval: [{held_out}], max_length: 64}}
optim: {{lr: 0.01, adamw_lr: 0.02, embedding_lr: 0.1, head_lr: 0.02}}
train: {{global_batch: 1024 tokens, max_steps: {steps}, precision: fp32, seed: 5, eval_every: 100}}
checkpoint: {{every: 100}}
log: {{to: [], samples: [import, "def f("]}}
"""
# The same run in a guide's words.
FLAGS = (
    "--depth=2", "--head_dim=16", "--max-seq-len=64", "--total_batch_size=1024", f"--num_iterations={STEPS}",
    "--matrix-lr=0.01", "--scalar_lr=0.02", "--embedding_lr=0.1", "--unembedding-lr=0.02", "--eval-every=100",
    "--seed=5", "--save_every=100", "--device_batch_size=4", "model.width=64", "model.kv_heads=2",
    "train.precision=fp32", "log.to=[]",
)  # fmt: skip
SFT = """
model: {{name: "{model}"}}
data: {{train: [{data}], max_length: 128}}
lora: {{rank: 2}}
train: {{max_steps: 2, global_batch: 4, precision: fp32}}
log: {{to: []}}
"""
CUT = "train.micro_batch=200 tokens"
SPLITS = {
    "1 process": (1, []),
    "1 process, accumulating": (1, [CUT]),
    "2 processes, ddp": (2, ["parallel.strategy=ddp"]),
    "2 processes, zero1": (2, ["parallel.strategy=zero1", CUT]),
    "2 processes, fsdp": (2, ["parallel.strategy=fsdp"]),
}


SCRATCH = {
    "gpt2": {"n_embd": 48, "n_layer": 2, "n_head": 3, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
             "attn_pdrop": 0.0},
    "qwen3_moe": {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1,
                  "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip
SHARED = {"alone": (1, []), "fsdp": (2, ["parallel.strategy=fsdp"]), "ddp": (2, ["parallel.strategy=ddp", CUT])}


def write_text(path, first, last):
    """Files of Python's own library as text."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts = [file.read_text(encoding="utf-8")[:6000] for file in sorted(folder.glob("*.py"))[first:last]]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts if text.strip()), encoding="utf-8")
    return texts


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Every split trained, and a twin: the same model begun from a standard folder of its weights."""
    folder = tmp_path_factory.mktemp("nothing")
    build_tiny_tokenizer().save_pretrained(folder / "tokenizer")
    write_text(folder / "text.jsonl", 0, 12)
    write_text(folder / "held_out.jsonl", 12, 13)
    yaml = folder / "new.yaml"
    paths = {"tokenizer": folder / "tokenizer", "text": folder / "text.jsonl", "held_out": folder / "held_out.jsonl"}
    yaml.write_text(YAML.format(steps=STEPS, **paths), encoding="utf-8")
    loaded = load_config(yaml)
    begun = load_model(
        ModelRequest(model_folder(loaded.config.model, folder), dtype=torch.float32, seed=5, attention="sdpa")
    )
    begun.save_pretrained(folder / "begun")
    build_tiny_tokenizer().save_pretrained(folder / "begun")
    text = yaml.read_text(encoding="utf-8").replace(f"depth: 2, tokenizer: {paths['tokenizer']}", "name: begun")
    text = text.replace(", width: 64, head_dim: 16, kv_heads: 2", "")
    settings = "name: muon, betas: [0.8, 0.95], eps: 1.0e-10, schedule: wsd, decay: 0.5, warmup: 0.01, "
    twin = folder / "twin.yaml"
    twin.write_text(text.replace("optim: {", "optim: {" + settings) + "stage: pretrain\n", encoding="utf-8")

    for size in (1, 2):
        jobs = [(yaml, more, folder / name) for name, (number, more) in SPLITS.items() if number == size]
        if size == 1:
            jobs += [(twin, [], folder / "twin"), (yaml, [f"train.max_steps={LONG}"], folder / "long")]
        train_all(jobs, size)
    return folder


@pytest.fixture(scope="module")
def scratch(runs):
    """Other architectures, from their config.json alone."""
    for family, sizes in SCRATCH.items():
        (runs / family).mkdir()
        AutoConfig.for_model(family, **sizes).save_pretrained(runs / family)
        model = f"model: {{name: {family}, from_scratch: true, tokenizer: tokenizer}}\nstage: pretrain\n"
        text = (runs / "new.yaml").read_text(encoding="utf-8")
        rest = text[text.index("data:") :].replace(
            "lr: 0.01, adamw_lr: 0.02, embedding_lr: 0.1, head_lr: 0.02", "lr: 1e-3"
        )
        (runs / f"{family}.yaml").write_text(model + rest, encoding="utf-8")
    for size in (1, 2):
        train_all(
            [
                (runs / f"{family}.yaml", ["train.max_steps=4", *more], runs / f"{family} {name}")
                for family in SCRATCH
                for name, (number, more) in SHARED.items()
                if number == size
            ],
            size,
        )
    return runs


@pytest.mark.parametrize("name", ["fsdp", "ddp"])
@pytest.mark.parametrize("family", SCRATCH)
def test_from_scratch_any_architecture_begins_the_same_on_any_split(scratch, family, name):
    ours, one = events(scratch / f"{family} {name}", "step"), events(scratch / f"{family} alone", "step")
    assert len(ours) == len(one) == 4 and abs(one[0]["loss"] / math.log(256) - 1) < 0.3
    for key in ("loss", "grad_norm"):
        error = max(abs(a[key] / b[key] - 1) for a, b in zip(ours, one, strict=True))
        assert error < TOLERANCE, f"{key} is off by {error}"


def events(folder, kind):
    lines = (folder / "events" / "run.jsonl").read_text(encoding="utf-8").splitlines()
    return [line for line in map(json.loads, lines) if line["type"] == kind]


@pytest.mark.parametrize("name", [*list(SPLITS)[1:], "twin"])
def test_any_split_begins_and_learns_the_same(runs, name):
    """The twin knows nothing of depth: its settings are written, its weights are read from a folder."""
    ours, one = events(runs / name, "step"), events(runs / "1 process", "step")
    assert len(ours) == len(one) == STEPS
    for key in ("loss", "grad_norm"):
        error = max(abs(a[key] / b[key] - 1) for a, b in zip(ours, one, strict=True))
        assert error < TOLERANCE, f"{key} is off by {error}"
    weights, wanted = (load_file(runs / run / "final" / "model.safetensors") for run in (name, "1 process"))
    assert weights.keys() == wanted.keys()
    for key, value in wanted.items():
        error = float((weights[key] - value).norm() / value.norm())
        assert error < 20 * TOLERANCE, f"{key} is off by {error}"


def test_it_begins_knowing_nothing_and_learns_more_than_how_often_bytes_are(runs):
    """A loss below the entropy of single bytes needs more than counting them: what stands before is used."""
    steps = events(runs / "long", "step")
    assert steps[0]["loss"] == pytest.approx(math.log(320), abs=0.01)  # 259 tokens, in rows up to a multiple of 64
    texts = (json.loads(line)["text"] for line in (runs / "text.jsonl").read_text(encoding="utf-8").splitlines())
    counts = Counter(byte for text in texts for byte in text.encode())
    total = sum(counts.values())
    unigram = -sum(count / total * math.log(count / total) for count in counts.values())
    assert steps[-1]["loss"] < unigram, f"{steps[-1]['loss']} after {LONG} steps; counting bytes alone gives {unigram}"


def test_bits_per_byte_are_the_loss_over_the_bytes_of_the_text(runs):
    """Counted anew: by transformers, window by window, and from the file."""
    model = AutoModelForCausalLM.from_pretrained(runs / "1 process" / "final")
    tokenizer = AutoTokenizer.from_pretrained(runs / "1 process" / "final")
    text = json.loads((runs / "held_out.jsonl").read_text(encoding="utf-8"))["text"]
    ids = [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    nats = 0.0
    for start in range(0, len(ids) - 1, 63):
        window = torch.tensor([ids[start : start + 64]])
        with torch.no_grad():
            logits = model(window).logits[0, :-1]
        nats += float(torch.nn.functional.cross_entropy(logits.double(), window[0, 1:], reduction="sum"))
    bits = nats / len(text.encode()) / math.log(2)
    for name in SPLITS:
        found = events(runs / name, "eval")[-1]
        assert found["num_bytes"] == len(text.encode()) and found["num_targets"] == len(ids) - 1, name
        assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-4), name


def test_samples_are_what_the_model_goes_on_with(runs):
    model = AutoModelForCausalLM.from_pretrained(runs / "1 process" / "final")
    tokenizer = AutoTokenizer.from_pretrained(runs / "1 process" / "final")
    for name in SPLITS:
        (found,) = events(runs / name, "samples")
        for sample, prompt in zip(found["samples"], ("import", "def f("), strict=True):
            ids = [tokenizer.bos_token_id, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]
            said = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :].tolist()
            said = said[: said.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in said else said
            assert sample == {"prompt": prompt, "text": tokenizer.decode(said)}, name


def test_a_guides_line_under_torchrun_is_the_same_run(runs):
    out = runs / "guide"
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "duoka.pretrain"]
    line.append("--")  # as the guides write it before the flags
    more = [
        f"--tokenizer={runs / 'tokenizer'}",
        f"--data={runs / 'text.jsonl'}",
        f"data.eval=[{runs / 'held_out.jsonl'}]",
    ]
    done = subprocess.run([*line, *FLAGS, *more, f"output={out}"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("means:   duoka train") == 1, "said once, not once per rank"
    ours, one = events(out, "step"), events(runs / "1 process", "step")
    assert max(abs(a["loss"] / b["loss"] - 1) for a, b in zip(ours, one, strict=True)) < TOLERANCE


def test_its_result_is_a_model_like_any_other(runs, capsys):
    """Chat, adapters on top, and their export: all from the folder that pretraining left."""
    data = write_conversations(runs / "chats.jsonl", 6)
    (runs / "sft.yaml").write_text(SFT.format(model=runs / "1 process" / "final", data=data), encoding="utf-8")
    train_all([(runs / "sft.yaml", [], runs / "sft")], 1)
    assert run(["chat", str(runs / "1 process"), "--prompt", "hi", "--max-new-tokens", "4"]) == 0
    assert run(["export", str(runs / "sft" / "final"), "-o", str(runs / "merged")]) == 0
    capsys.readouterr()
    merged = AutoModelForCausalLM.from_pretrained(runs / "merged")
    assert merged.config.model_type == "qwen3" and merged.config.num_hidden_layers == 2


DEPTH_FOUR = """
model: {{depth: 4, tokenizer: {folder}/tok, head_dim: 64}}
data: {{train: [{folder}/text.jsonl], eval: [{folder}/held_out.jsonl], max_length: 256}}
train: {{global_batch: 2048 tokens, max_steps: 60, precision: fp32, eval_every: 60}}
checkpoint: {{every: 60}}
log: {{to: []}}
"""


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_depth_four_by_the_rules_alone_learns_much_more_than_how_often_tokens_are(tmp_path, capsys):
    """Tokenizer, sizes and rates as a user gets them; a few minutes on one core, and as much on two processes."""
    write_text(tmp_path / "text.jsonl", 0, 150)
    write_text(tmp_path / "held_out.jsonl", 150, 160)
    assert run(["data", "tokenizer", f"{tmp_path}/text.jsonl", "--vocab-size", "2048", "--out", f"{tmp_path}/tok"]) == 0
    yaml = tmp_path / "four.yaml"
    yaml.write_text(DEPTH_FOUR.format(folder=tmp_path), encoding="utf-8")
    train_all([(yaml, [], tmp_path / "one")], 1)
    train_all([(yaml, ["parallel.strategy=zero1"], tmp_path / "two")], 2)
    one, two = (events(tmp_path / name, "step") for name in ("one", "two"))
    apart = max(abs(a["loss"] / b["loss"] - 1) for a, b in zip(one, two, strict=True))
    assert len(one) == 60 and apart < TOLERANCE, f"losses are apart by {apart:.2g}"

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tok")
    texts = [
        json.loads(line)["text"] for line in (tmp_path / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    counts = Counter(token for ids in tokenizer(texts, add_special_tokens=False)["input_ids"] for token in ids)
    total = sum(counts.values())
    unigram = -sum(count / total * math.log2(count / total) for count in counts.values())
    bits = events(tmp_path / "one", "eval")[-1]["loss"] / math.log(2)
    with capsys.disabled():
        print(f"{bits:.2f} bits per token after 60 steps; unigram entropy {unigram:.2f}; apart {apart:.1g}")
    assert bits < 0.9 * unigram


def greet(folder):
    """What a guide's script does first. On CPUs too there is a group afterwards: nobody trains alone unawares."""
    import torch.distributed as dist

    import duoka

    is_distributed, rank, local_rank, size, device = duoka.compute_init("cpu")
    assert (is_distributed, size, device.type) == (True, 2, "cpu")
    assert duoka.get_dist_info() == (True, rank, local_rank, size)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    assert total.item() == 3.0
    with (folder / f"{rank}.txt").open("w", encoding="utf-8") as file:
        duoka.print0("once", file=file, flush=True)
    dist.destroy_process_group()


def test_compute_init_makes_a_group_on_cpus_and_print0_prints_once(tmp_path):
    run_world(2, greet, tmp_path)
    assert [(tmp_path / f"{rank}.txt").read_text(encoding="utf-8") for rank in (0, 1)] == ["once\n", ""]
