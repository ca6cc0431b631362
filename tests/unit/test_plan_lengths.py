"""What the plan knows of samples: tokens at once beside the loader's own layout, and where the figures come from."""

import json
import os
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from duoka.config.schema import RunConfig, StageConfig, TrainConfig
from duoka.data.dataset_lengths import find_lengths, lengths_of, remember_lengths
from duoka.data.feed.epoch_plan import EpochPlan, share_batch
from duoka.data.feed.text_rows import TextRows
from duoka.data.read.example import Example, Message
from duoka.data.tokens.template import Sample, encode
from duoka.data.tokens.tokenizer import load_tokenizer
from duoka.plan.hardware import Gpu, Machine
from duoka.plan.layout import Layout
from duoka.plan.lengths import Lengths, Rows, tokens_at_once, tokens_later
from duoka.plan.recipe import Work
from duoka.plan.report import make_plan
from duoka.plan.shape import demo_shape
from duoka.plan.task import task_of
from duoka.units import Amount

GIB = 2**30


def fullest(lengths, ranks, micro, packing):
    """As the loader lays it out: tokens, padding included, of the fullest micro-batch, and of those after the first."""
    plans = share_batch(np.arange(len(lengths)), np.array(lengths), ranks, micro, packing=packing, max_length=512)
    sizes = [[], [0]]
    for place, plan in (one for rank in plans for one in enumerate(rank) if one[1].rows):
        rows = [sum(lengths[sample] for sample in row) for row in plan.rows]
        sizes[place > 0].append(len(rows) * max(rows))
    assert max(sizes[0]) >= max(sizes[1]), "the fullest is not the first"
    return max(sizes[0]), max(sizes[1])


def test_tokens_at_once_are_those_of_the_loader():
    dice = random.Random(0)
    off, off_later = [], []
    for _ in range(300):
        lengths = sorted((dice.randint(5, 512) for _ in range(dice.choice((8, 16, 64)))), reverse=True)
        ranks, packing = dice.choice((1, 2, 4)), dice.random() < 0.6
        micro = dice.choice((Amount(512, "tokens"), Amount(4096, "tokens"), Amount(1, "samples"), Amount(4, "samples")))
        known = Lengths("tokenized", 99, sum(lengths) / len(lengths), lengths[0], tuple(lengths))
        step, rows = Amount(len(lengths), "samples"), Rows(512, packing)
        real, later = fullest(lengths, ranks, micro, packing)
        expected = tokens_at_once(step, ranks, micro, rows, known)
        off_later.append((min(expected, tokens_later(known, ranks, micro, packing)) - later) / real)
        off.append(expected / real - 1)
        assert real <= tokens_at_once(step, ranks, micro, rows) + 1e-9, "the bound is none"
    off.sort(key=abs)
    off_later.sort(key=abs)
    assert abs(off_later[150]) < 0.02 and abs(off_later[285]) < 0.25, (off_later[150], off_later[285], off_later[-1])
    assert abs(off[150]) < 0.02 and abs(off[285]) < 0.25, (off[150], off[285], off[-1])


@pytest.mark.parametrize(("packing", "expected"), [(True, 1500), (False, 3000)])
def test_the_longest_sample_counts_in_whatever_batch_it_lies(packing, expected):
    known = Lengths("tokenized", 99, 105.0, 1500, (100,) * 16)
    assert tokens_at_once(Amount(16, "samples"), 4, Amount(4096, "tokens"), Rows(4096, packing), known) == expected


def test_an_evaluation_of_few_samples_computes_few_at_once():
    known = Lengths("tokenized", 108, 40.0, 73, (73,) * 8)
    layout = Layout(micro=Amount(16384, "tokens"))
    tokens = {}
    for words in ({}, {"eval": 0.1}, {"eval": ["x"]}):
        data = {"train": ["x"], "max_length": 512, **words}
        config = RunConfig.model_validate({"model": "demo", "data": data})
        tokens[str(words)] = task_of(config, Work(demo_shape(), None), known).eval_tokens(layout)
    assert list(tokens.values()) == [0, 12 * 512, 16384]  # 12 of 120 samples were kept aside


def test_short_samples_need_less_than_the_bound_and_the_plan_says_both():
    config = RunConfig.model_validate({"model": "demo", "data": {"train": ["x"], "max_length": 512}, "lora": {}})
    machine = Machine(2, 64 * GIB, 60 * GIB)
    blind = make_plan(config, demo_shape(), machine, 1)
    seen = make_plan(config, demo_shape(), machine, 1, lengths=Lengths("tokenized", 99, 50.0, 90, (50,) * 16))
    assert (blind.memory.tokens, seen.memory.tokens) == (2048, 800)
    assert seen.at_most_bytes == blind.memory.peak_bytes > 1.5 * seen.memory.peak_bytes
    assert "at most" in blind.memory_sentence() and "at most" not in seen.memory_sentence()
    # A look into files may be wrong by a factor of two: what would not fit then is not called safe.
    tight = Machine(2, 64 * GIB, int(1.35 * seen.memory.peak_bytes))
    words = {}
    for basis in ("tokenized", "sampled"):
        known = Lengths(basis, 99, 50.0, 90, (50,) * 16)
        words[basis] = make_plan(config, demo_shape(), tight, 1, lengths=known).verdict
    assert words == {"tokenized": "fits", "sampled": "tight"}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with 64 conversations of 20 to 83 characters and a config for them."""
    monkeypatch.setenv("DUOKA_CACHE", str(tmp_path / "cache"))
    lines = [
        json.dumps({"messages": [{"role": "user", "content": "x" * 20}, {"role": "assistant", "content": "y" * i}]})
        for i in range(1, 65)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines), encoding="utf-8")
    data = {"train": [str(tmp_path / "chats.jsonl")], "max_length": 512}
    return tmp_path, RunConfig.model_validate({"model": "demo", "data": data, "train": {"epochs": 2}})


def test_a_look_guesses_number_and_lengths_of_untokenized_files(place):
    folder, config = place
    found = find_lengths(config, folder)
    assert (found.basis, found.num_samples) == ("sampled", 64)
    assert found.mean == pytest.approx((20 + 32.5) / 4 + 10, abs=1) and len(found.batch) == 16
    assert 16 * found.mean < sum(found.batch) < 1.3 * 16 * found.mean
    assert find_lengths(config.model_copy(update={"stage": StageConfig(name="pretrain")}), folder).batch == ()
    os.remove(folder / "chats.jsonl")
    assert find_lengths(config, folder) is None


def test_a_look_guesses_what_both_answers_of_a_pair_begin_with(tmp_path):
    pair = {"prompt": "q" * 100, "chosen": "c" * 30, "rejected": "r" * 20}
    (tmp_path / "pairs.jsonl").write_text(f"{json.dumps(pair)}\n" * 9, encoding="utf-8")
    data = {"train": [str(tmp_path / "pairs.jsonl")]}
    config = RunConfig.model_validate({"model": "demo", "stage": "dpo", "data": data, "lora": {}})
    found = find_lengths(config, tmp_path)
    assert (found.shared, found.least_shared) == (pytest.approx(0.4), pytest.approx(0.4))
    whole = config.model_copy(update={"data": config.data.model_copy(update={"prefix_sharing": False})})
    assert find_lengths(whole, tmp_path).shared == 0


def test_a_look_counts_tokens_where_the_models_tokenizer_is_here(place, tiny_model):
    """A template's words around each sample, and a vocabulary that knows few words: no rule of thumb has either."""
    folder, config = place
    rule = find_lengths(config, folder)  # the demo model is not in this cache
    config = config.model_copy(update={"model": config.model.model_copy(update={"name": str(tiny_model)})})
    found, tokenizer = find_lengths(config, folder), load_tokenizer(tiny_model)
    real = []
    for line in (folder / "chats.jsonl").read_text(encoding="utf-8").splitlines():
        messages = tuple(Message(one["role"], one["content"]) for one in json.loads(line)["messages"])
        real.append(len(encode(Example(messages), tokenizer).input_ids))
    assert rule.mean < 0.7 * np.mean(real)
    assert (found.basis, found.num_samples) == ("sampled", 64)
    assert found.mean == pytest.approx(np.mean(real), rel=0.02) and found.longest == pytest.approx(max(real), rel=0.05)


def test_tokenized_data_is_exact_and_remembered_until_something_changes(place):
    folder, config = place
    lengths = np.random.default_rng(0).integers(5, 500, 100).astype(np.int32)

    def segments(self, index):
        """All begin with the same fifty tokens, as far as they go."""
        ids = np.where(np.arange(lengths[index]) < 50, np.arange(lengths[index]), 100 + index)
        return [Sample(ids.astype(np.int32), np.ones(len(ids), bool))]

    store = type("Store", (), {"__len__": lambda self: 100, "segments": segments})()
    store.lengths, store.num_targets, store.fingerprint = lengths, lengths - 1, "f"
    found = lengths_of(SimpleNamespace(train=store), config)
    plan = EpochPlan(lengths, lengths, fingerprint="f", seed=config.train.seed, global_batch=Amount(16, "samples"))
    batches = [lengths[plan.batch(epoch, index)] for epoch in range(2) for index in range(7)]
    assert found.batch == tuple(sorted(max(batches, key=lambda batch: batch.sum()), reverse=True))
    # Micro-batches of up to 2,048 tokens have four samples and more, each but one with fifty that others have too.
    assert 150 / 2048 < found.least_shared <= found.shared < 0.5
    remember_lengths(found, config, folder)
    assert find_lengths(config, folder) == found
    (folder / "chats.jsonl").write_text((folder / "chats.jsonl").read_text(encoding="utf-8") + "\n", encoding="utf-8")
    assert find_lengths(config, folder).basis == "sampled"


@pytest.mark.parametrize(("more", "used"), [("", 300), ("max_steps: 5", 40), ("max_steps: 50", 300)])
def test_a_run_that_ends_within_its_first_epoch_comes_to_fewer_samples(more, used):
    train = TrainConfig.model_validate({"global_batch": 8, **(yaml.safe_load(more) or {})})
    assert Lengths("tokenized", 300, 100.0, 200).num_used(train) == used
    in_tokens = train.model_copy(update={"global_batch": "800 tokens"})
    assert Lengths("tokenized", 300, 100.0, 200).num_used(in_tokens) == used


def test_attention_of_packed_text_sees_its_documents_and_no_whole_row(place):
    """Known of rows that were laid out, and guessed from a look into the files; MFU counts so too."""
    folder, config = place
    config = config.model_copy(update={"stage": StageConfig(name="pretrain")})
    lengths = np.array([400, 10, 100, 90] * 50, np.int32)
    store = type("Store", (), {"__len__": lambda self: len(lengths)})()
    store.lengths, store.num_targets, store.fingerprint = lengths, lengths - 1, "f"
    store.sample = lambda at: Sample(np.zeros(lengths[at], np.int32), np.ones(lengths[at], bool))
    found = lengths_of(SimpleNamespace(train=TextRows(store, config.data.max_length)), config)
    assert found.mean > 500 and 150 < found.document < (400**2 + 10**2 + 100**2 + 90**2) / 600
    assert 0 < find_lengths(config, folder).document < found.mean
    gpu = Machine(8, 2**38, 2**37, gpus=(Gpu("H200", 141 * GIB, 140 * GIB, 9.0),))
    plans = [make_plan(config, demo_shape(), gpu, 1, lengths=one) for one in (found, replace(found, document=0.0))]
    assert plans[0].speed.parts["attention"] < plans[1].speed.parts["attention"] / 2
    flops = [plan.to_json()["compute"]["flops_per_token"] for plan in plans]
    assert flops[0] < flops[1]
