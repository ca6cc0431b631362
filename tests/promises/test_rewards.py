"""Stage reward: the float64 oracle's numbers at any split; a saved model whose scores others read; `duoka score`."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from oracle_rewards import train as oracle_train
from safetensors.torch import load_file
from test_any_split import TOLERANCE, read_run, relative, worst
from tiny import write_pairs, write_tiny_model
from worlds import run_world, train_all

pytestmark = pytest.mark.timeout(400)

RECIPE = {"lr": 2e-3, "warmup": 0.2, "clip": 0.5, "weight_decay": 0.1}
NUM_PAIRS = 11  # of which a batch takes 4: the last of an epoch is short
YAML = """
model: {model}
stage: reward
data: {{train: [{data}], max_length: 256}}
optim: {{lr: 2e-3, warmup: 0.2, clip: 0.5, weight_decay: 0.1}}
train: {{epochs: 2, global_batch: 4, precision: fp32, seed: 7}}
checkpoint: {{every: 4}}
log: {{to: []}}
output: {output}
"""
LLAMAFACTORY = """
model_name_or_path: {model}
stage: rm
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: pairs
dataset_dir: {folder}
template: chatml
cutoff_len: 256
output_dir: {folder}/theirs
logging_steps: 10
per_device_train_batch_size: 1
gradient_accumulation_steps: 4
learning_rate: 5.0e-3
num_train_epochs: 1.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
report_to: none
"""
LORA, CENTERED = "lora={rank: 3, dropout: 0}", "stage.centering=0.05"
WHOLE, CUT, ONE = "train.micro_batch=100000 tokens", "train.micro_batch=300 tokens", "train.micro_batch=1"
PADDED = "data.packing=false"
AHEAD = "data.train=[ahead.jsonl]"  # the same pairs, two of three with a margin
# name -> (processes, settings)
SPLITS = {
    "auto": (1, [AHEAD]),
    "cut": (1, [CUT, CENTERED]),
    "one at a time, padded": (1, [ONE, PADDED]),
    "LoRA": (1, [CUT, LORA]),
    "fixed rows": (1, ["data.fixed_rows=true", "train.micro_batch=512 tokens", CENTERED]),
    "2, ddp, LoRA": (2, ["parallel.strategy=ddp", ONE, LORA]),
    "2, zero1, padded": (2, ["parallel.strategy=zero1", WHOLE, PADDED]),
    "2, fsdp": (2, ["parallel.strategy=fsdp", CUT, AHEAD]),
    "2, fsdp, LoRA": (2, ["parallel.strategy=fsdp", ONE, LORA, PADDED]),
}
NIGHTLY = {
    "3, ddp": (3, ["parallel.strategy=ddp", WHOLE, CENTERED]),
    "4, ddp, padded": (4, ["parallel.strategy=ddp", ONE, PADDED]),  # one rank has no pair of the short batch
    "4, zero2, LoRA": (4, ["parallel.strategy=zero2", "train.micro_batch=2", LORA]),
}


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewards")
    model = write_tiny_model(folder / "model", tied=False, odd=True, layers=2)
    data = write_pairs(folder / "pairs.jsonl", NUM_PAIRS, seed=3)
    records = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    for index, record in enumerate(records):
        record["margin"] = [0.75, None, -0.5][index % 3]
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    (folder / "ahead.jsonl").write_text("".join(lines), encoding="utf-8")
    yaml = folder / "run.yaml"
    yaml.write_text(YAML.format(model=model, data=data, output=folder / "out"), encoding="utf-8")
    return folder, yaml, model, data


def run_all(case, splits):
    folder, yaml, _, _ = case
    worlds = {}
    for name, (size, overrides) in splits.items():
        worlds.setdefault(size, []).append((str(yaml), overrides, str(folder / name)))
    for size, jobs in sorted(worlds.items()):
        train_all(jobs, size)


@pytest.fixture(scope="module")
def runs(case):
    """All of them, with the configs that a launcher leaves there."""
    from duoka.config.load import load_config, resolved_yaml
    from duoka.runs.folder import RunFolder

    run_all(case, SPLITS)
    folder, _, model, data = case
    columns = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
    info = {"pairs": {"file_name": data.name, "ranking": True, "columns": columns}}
    (folder / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    (folder / "theirs.yaml").write_text(LLAMAFACTORY.format(model=model, folder=folder), encoding="utf-8")
    train_all([
        (str(folder / "theirs.yaml"), [], str(folder / "theirs")),
        (str(case[1]), [LORA, CUT, "data.eval=0.3", "optim.lr=0.01"], str(folder / "held out")),
    ], 1)  # fmt: skip
    found = {}
    for name, (_, overrides) in SPLITS.items():
        found[name] = RunFolder(case[0] / name)
        found[name].config.write_text(resolved_yaml(load_config(case[1], overrides)), encoding="utf-8")
    return found


@pytest.fixture(scope="module")
def oracle(case):
    from duoka.config.load import load_config
    from duoka.config.schema import LoraConfig
    from duoka.data.feed.epoch_plan import plan_epochs
    from duoka.data.prepare import prepare_data
    from duoka.model.lora import apply_lora

    _, yaml, model, data = case
    adapt = partial(apply_lora, lora=LoraConfig(rank=3, dropout=0.0), seed=7, scores=True)
    known = {}

    def ask(lora, centering, ahead):
        file = yaml.parent / "ahead.jsonl" if ahead else data
        if (lora, centering, file) not in known:
            config = load_config(yaml, [AHEAD] if ahead else []).config
            plan = plan_epochs(prepare_data(config, yaml.parent, model).train, config.train)
            batches = [plan.batch(epoch, i).tolist() for epoch in (0, 1) for i in range(plan.num_batches(epoch))]
            known[lora, centering, file] = oracle_train(
                file, model, batches, **RECIPE, adapt=adapt if lora else None, centering=centering
            )
        return known[lora, centering, file]

    return ask


def compare(case, oracle, name, overrides):
    has_lora = LORA in overrides
    losses, norms, margins, weights = oracle(has_lora, 0.05 if CENTERED in overrides else 0.0, AHEAD in overrides)
    steps = read_run(case[0] / name)
    assert len(steps) == 6 and [step["num_samples"] for step in steps[:3]] == [4, 4, 3]
    if AHEAD not in overrides:
        assert abs(steps[0]["loss"] - 0.69314718) < 1e-6 and steps[-1]["loss"] < 0.69
    for key, want in (("loss", losses), ("grad_norm", norms)):
        error = relative([step[key] for step in steps], want)
        assert error < TOLERANCE, f"{key} of {name} is off by {error}"
    assert max(abs(step["margin"] - want) for step, want in zip(steps, margins, strict=True)) < 1e-5
    file = "adapter_model.safetensors" if has_lora else "model.safetensors"
    weights = {key.replace(".default.", ".").replace(".modules_to_save", ""): value for key, value in weights.items()}
    weights = {key.replace(".default", ""): value for key, value in weights.items()}
    error, tensor = worst(load_file(case[0] / name / "final" / file), weights)
    assert error < TOLERANCE, f"{tensor} of {name} is off by {error}"


@pytest.mark.parametrize("name", SPLITS)
def test_every_split_equals_the_oracle(case, runs, oracle, name):
    compare(case, oracle, name, SPLITS[name][1])


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_more_processes_equal_the_oracle(case, oracle):
    run_all(case, NIGHTLY)
    for name, (_, overrides) in NIGHTLY.items():
        compare(case, oracle, name, overrides)


def score_in_world(run, data, target):
    from duoka.serve.load_run import find_trained
    from duoka.serve.score import read_answers, score

    trained = find_trained(run, say=print)
    done = score(trained, read_answers(trained, data, max_length=None, say=print), Path(target), precision="fp32")
    if done is not None:
        Path(target).with_suffix(".txt").write_text("\n".join(done.lines()), encoding="utf-8")


@pytest.mark.parametrize("name", ["auto", "LoRA"])
def test_transformers_reads_the_scores_that_duoka_writes_on_any_number_of_processes(case, runs, name):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder, _, base, data = case
    for size in (1, 2):
        run_world(size, score_in_world, str(runs[name].path), str(data), str(folder / f"{name} {size}.jsonl"))
    one, two = (folder / f"{name} {size}.jsonl" for size in (1, 2))
    assert one.read_bytes() == two.read_bytes()
    lines = [json.loads(line) for line in one.read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 2 * NUM_PAIRS and [line["answer"] for line in lines[:2]] == ["chosen", "rejected"]
    assert f"of {NUM_PAIRS} pairs" in one.with_suffix(".txt").read_text(encoding="utf-8")

    final = runs[name].final
    tokenizer = AutoTokenizer.from_pretrained(final)
    if name == "LoRA":
        import peft

        plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
        model = peft.PeftModel.from_pretrained(plain, final)
        model.config.pad_token_id = tokenizer.pad_token_id
    else:
        model = AutoModelForSequenceClassification.from_pretrained(final)
        assert model.config.num_labels == 1 and model.config.pad_token_id == tokenizer.pad_token_id
    records = [json.loads(line) for line in Path(data).read_text(encoding="utf-8").splitlines()]
    texts = [
        f"<|im_start|>user\n{one['prompt']}<|im_end|>\n<|im_start|>assistant\n{one[side]}<|im_end|>\n"
        for one in records
        for side in ("chosen", "rejected")
    ]
    batch = tokenizer(texts, add_special_tokens=False, padding=True, padding_side="right", return_tensors="pt")
    with torch.no_grad():
        scores = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]
    assert max(abs(line["score"]) for line in lines) > 0.01
    assert max(abs(line["score"] - float(value)) for line, value in zip(lines, scores, strict=True)) < 1e-5


def test_a_model_s_own_padding_token_says_where_its_score_is_read(case, runs):
    """A folder of another tool may pad with another token than its tokenizer."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder, _, _, data = case
    other = folder / "other padding"
    shutil.copytree(runs["auto"].final, other)
    tokenizer = AutoTokenizer.from_pretrained(other)
    (line_break,) = tokenizer("\n", add_special_tokens=False)["input_ids"]
    facts = json.loads((other / "config.json").read_text(encoding="utf-8")) | {"pad_token_id": line_break}
    (other / "config.json").write_text(json.dumps(facts), encoding="utf-8")
    run_world(1, score_in_world, str(other), str(data), str(folder / "other.jsonl"))
    first, _ = (folder / "other.jsonl").read_text(encoding="utf-8").split("\n", 1)
    record = json.loads(Path(data).read_text(encoding="utf-8").splitlines()[0])
    text = f"<|im_start|>user\n{record['prompt']}<|im_end|>\n<|im_start|>assistant\n{record['chosen']}<|im_end|>\n"
    with torch.no_grad():
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        wanted = AutoModelForSequenceClassification.from_pretrained(other)(input_ids=ids).logits.item()
    assert abs(json.loads(first)["score"] - wanted) < 1e-5


def test_a_score_is_read_where_transformers_reads_it_though_the_end_is_the_padding():
    from transformers import LlamaConfig, LlamaForSequenceClassification

    from duoka.data.feed.loader import pack_segments
    from duoka.data.tokens.template import Sample
    from duoka.model.scores import ScoreModel
    from duoka.train.stages.rewards import last_tokens

    torch.manual_seed(0)
    small = {"vocab_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16}
    lm = LlamaForSequenceClassification(LlamaConfig(**small, intermediate_size=32, num_labels=1)).eval()
    model = ScoreModel(lm, pad_id=5).eval()
    rows = [[7, 8, 5, 9, 5], [7, 6, 10], [5, 11, 5, 5]]  # 5 ends an answer, stands inside, and fills
    batch = pack_segments([Sample(torch.tensor(row).numpy(), torch.ones(len(row)).bool().numpy()) for row in rows], 3)
    assert last_tokens(batch, 5).tolist() == [3, 7, 9]
    padded = torch.tensor([row + [5] * (5 - len(row)) for row in rows])
    theirs = lm(input_ids=padded, attention_mask=torch.ones_like(padded)).logits[:, 0]
    ours = torch.stack([
        model(torch.tensor([row]), torch.full((1, len(row)), -100), torch.arange(len(row))[None])[0][0, at]
        for row, at in zip(rows, (3, 2, 1), strict=True)
    ])  # fmt: skip
    assert torch.allclose(ours, theirs, atol=1e-6)


def test_a_reward_model_says_no_words_and_others_give_no_scores(case, runs):
    from duoka.errors import ConfigError
    from duoka.serve.load_run import find_trained, load_trained

    for name in (str(runs["auto"].path), str(runs["LoRA"].path), str(runs["auto"].final)):
        with pytest.raises(ConfigError, match="reward model"):
            load_trained(find_trained(name, say=print), dtype=torch.float32)
    with pytest.raises(ConfigError, match="gives no scores"):
        load_trained(find_trained(str(case[2]), say=print), dtype=torch.float32, scores=True)
    step = load_trained(find_trained(str(runs["LoRA"].path), step=4, say=print), dtype=torch.float32, scores=True)
    assert step(input_ids=torch.arange(3, 20)[None]).logits.shape == (1, 1)


def test_a_file_of_llamafactory_runs_and_evaluations_have_the_stages_numbers(case, runs):
    steps = read_run(case[0] / "theirs")
    assert abs(steps[0]["loss"] - 0.69314718) < 1e-6 and len(steps) == 3
    facts = json.loads((case[0] / "theirs" / "final" / "adapter_config.json").read_text(encoding="utf-8"))
    assert facts["task_type"] == "SEQ_CLS" and "score" in facts["modules_to_save"]
    lines = (case[0] / "held out" / "events" / "run.jsonl").read_text(encoding="utf-8").splitlines()
    (last,) = [event for line in lines if (event := json.loads(line))["type"] == "eval"][-1:]
    assert last["num_samples"] == 3 and last["perplexity"] is None and last["margin"] > 0


def test_the_command_scores_pairs_and_conversations(case, runs, capsys):
    from duoka.cli import run as duoka

    answers = case[0] / "answers.jsonl"
    answers.write_text(json.dumps({"prompt": "cat", "completion": "sum rank"}) + "\n", encoding="utf-8")
    assert duoka(["score", str(runs["auto"].path), str(answers), "--precision=fp32"]) == 0
    (line,) = (runs["auto"].path / "scores.jsonl").read_text(encoding="utf-8").splitlines()
    assert set(json.loads(line)) == {"sample", "tokens", "score"}
    assert "1 answers, by 1 process" in capsys.readouterr().out
    lost = answers.with_name("lost.jsonl")
    lost.write_text('{"prompt": "cat", "completion": 5}\n' + answers.read_text(encoding="utf-8"), encoding="utf-8")
    settings = runs["auto"].path / "config.yaml"
    whole = settings.read_text(encoding="utf-8")
    settings.write_text(whole.replace("on_bad: error", "on_bad: skip"), encoding="utf-8")
    assert duoka(["score", str(runs["auto"].path), str(lost), "--precision=fp32"]) == 0
    settings.write_text(whole, encoding="utf-8")
    assert "note: 1 records were wrong or had no answer left, and have no number" in capsys.readouterr().out
    answers.with_name("plain.txt").write_text("words alone\n", encoding="utf-8")
    assert duoka(["score", str(runs["auto"].path), str(answers.with_name("plain.txt"))]) == 2
    assert "holds plain text, and a score is of an answer" in capsys.readouterr().err
    assert duoka(["score", str(case[2]), str(answers)]) == 2
    assert "gives no scores" in capsys.readouterr().err
