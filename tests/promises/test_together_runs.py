"""Whole runs under several axes: the numbers of one process, through checkpoints of one layout after the other."""

import shutil
import signal

import pytest
from commands import start_duoka
from struck import finish
from test_tensor_runs import check_same, told
from tiny import write_conversations
from worlds import train_all

from duoka.cluster.fault_injection import wait_for_ranks
from duoka.runs.folder import RunFolder
from duoka.runs.status import read_status

YAML = """
model: {model}
data: {{train: [{data}], eval: 0.2, max_length: 256}}
optim: {{lr: 5e-3, warmup: 0.2, clip: 0.5, weight_decay: 0.1}}
train: {{max_steps: 6, global_batch: 6, micro_batch: "200 tokens", precision: fp32, seed: 7, eval_every: 3}}
checkpoint: {{every: 2, keep: 9}}
parallel: {{check_replicas: 2}}
log: {{to: []}}
output: {output}
"""
LORA = ["lora={rank: 4}", "train.max_steps=2", "optim.eps=1e-3"]  # smaller ones make whole steps of what is noise
TEXT = ["stage=pretrain", "data.max_length=128", "train.max_steps=2", "train.eval_every=2", "log.samples=2"]
# Each goes on from what the one before it saved, after so many steps.
CHAIN = (("one", 2, "sp2.tp2"), ("sp2.tp2", 4, "pp2.tp2"))


@pytest.fixture(scope="module")
def case(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("together")
    data = write_conversations(folder / "chats.jsonl", 60, seed=3)
    yaml = folder / "run.yaml"
    yaml.write_text(YAML.format(model=tiny_model, data=data, output=folder / "out"), encoding="utf-8")
    return folder, yaml


@pytest.fixture(scope="module")
def runs(case):
    folder, yaml = case

    def job(name, settings):
        return str(yaml), settings, str(folder / name)

    def goes_on(before, step, name):
        resume = f"checkpoint.resume={folder / before}/checkpoints/step-{step:08d}"
        return job(name, [f"parallel.layout={name}", resume])

    text = [*TEXT, f"data.train=[{write_text(folder / 'text.jsonl')}]"]
    train_all([job("one", []), job("one-lora", LORA), job("one-text", text)], 1)
    together = [
        job("lora", [*LORA, "parallel.layout=pp2.tp2", "train.recompute=full"]),
        job("text", [*text, "parallel.layout=pp2.sp2"]),
    ]
    train_all([*(goes_on(*link) for link in CHAIN), *together], 4)
    return folder


def write_text(path):
    import json

    words = ("cat", "rank", "ring", "tokens", "layer", "你好")
    lines = [" ".join(words[(n * k) % 6] for k in range(3 + 7 * (n % 5))) for n in range(60)]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.mark.parametrize(("name", "step"), [(name, step) for _, step, name in CHAIN])
def test_a_run_goes_on_under_two_axes_as_if_never_stopped(runs, name, step):
    check_same(runs / name, runs / "one", after=step)
    found = told(runs / name, "eval")
    wanted = [line for line in told(runs / "one", "eval") if line["step"] > step]
    assert [line["step"] for line in found] == [line["step"] for line in wanted] != []
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["accuracy"] == theirs["accuracy"]


def test_adapters_are_written_by_stages_whose_layers_are_cut(runs):
    check_same(runs / "lora", runs / "one-lora", file="adapter_model.safetensors")


def test_samples_are_those_of_one_process(runs):
    check_same(runs / "text", runs / "one-text")
    ours, theirs = ([one["samples"] for one in told(runs / name, "samples")] for name in ("text", "one-text"))
    assert ours == theirs != []


LAYOUTS = ("", "tp2", "pp2", "fsdp2.tp2", "sp2", "pp2.tp2", "ddp4", "")


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_one_run_goes_through_every_layout_as_it_is_typed(case):
    """Stopped by a signal and started again, eight times, with another layout each: the run of one process."""
    folder, yaml = case
    longer = ("train.max_steps=100", "train.epochs=20", "optim.lr=5e-4", "train.eval_every=100", "checkpoint.every=100")
    train_all([(str(yaml), list(longer), str(folder / "undisturbed"))], 1)
    run, pids, step = RunFolder(folder / "typed"), [], 0
    for place, layout in enumerate(LAYOUTS):
        size = {"": 1, "tp2": 2, "pp2": 2, "sp2": 2}.get(layout, 4)
        named = [f"parallel.layout={layout}"] if layout else []
        process = start_duoka("train", yaml, f"output={run.path}", "--nproc", str(size), *longer, *named)
        try:
            if place < len(LAYOUTS) - 1:
                ranks = wait_for_ranks(
                    run, size, lambda beat, least=step + 2: beat.step >= least, old_pids=pids, within_s=150
                )
                process.send_signal(signal.SIGTERM)
                pids += [beat.pid for beat in ranks.values()]
            code, output = finish(process)
        finally:
            process.kill()
        assert code == (75 if place < len(LAYOUTS) - 1 else 0) and "Traceback" not in output, output
        assert read_status(run).step > step, "each layout has trained"
        step = read_status(run).step
    check_same(run.path, folder / "undisturbed")
    shutil.rmtree(run.path)
