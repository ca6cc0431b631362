"""What a plan says of stage rl: steps on each set of answers, the cache of keys and values as formula and as held."""

from dataclasses import replace
from pathlib import Path

import torch
from tiny import write_tiny_model

from duoka.config.load import load_config
from duoka.plan.batch import count_steps
from duoka.plan.hardware import read_machine
from duoka.plan.layout import Layout
from duoka.plan.lengths import Lengths
from duoka.plan.recipe import Work
from duoka.plan.report import make_plan
from duoka.plan.rollouts import rollout_notes
from duoka.plan.shape import read_shape
from duoka.plan.task import task_of


def test_the_cache_is_what_a_model_holds_while_it_answers(tmp_path):
    from transformers import AutoModelForCausalLM

    folder = write_tiny_model(tmp_path / "model", layers=3)
    yaml = Path(tmp_path / "run.yaml")
    text = f"model: {folder}\nstage: rl\ndata: {{train: [task:sort], max_length: 40}}\n"
    yaml.write_text(text + "rl: {samples: 4, max_new_tokens: 8, rows: 5}\ntrain: {global_batch: 3}\n", encoding="utf-8")
    config, layout = load_config(yaml).config, Layout(precision="fp32")
    found = AutoModelForCausalLM.from_pretrained(folder)(torch.ones(5, 40, dtype=torch.long), use_cache=True)
    held = sum(
        t.numel() * t.element_size() for layer in found.past_key_values.layers for t in (layer.keys, layer.values)
    )
    assert task_of(config, Work(read_shape(folder), None), None).cache_bytes(layout) == held
    (said,) = rollout_notes(config, read_shape(folder), held)
    assert "3 prompts x 4 answers of up to 8 tokens" in said
    held = {
        kl: make_plan(load_config(yaml, [f"rl.kl={kl}"]).config, read_shape(folder), read_machine(), 1) for kl in (0, 1)
    }
    trained = read_shape(folder).num_parameters
    assert held[1].memory.parts["weights"] - held[0].memory.parts["weights"] == 4 * trained, "the run's start"
    two = load_config(yaml, ["rl.algorithm=grpo", "rl.updates=2", "train.epochs=1"]).config
    steps = count_steps(two.train, Lengths("tokenized", 30, 20.0, 20), updates=two.updates)
    assert steps is not None and steps.total == 20


def test_a_value_head_and_a_reward_model_are_planned(tmp_path):
    folder = write_tiny_model(tmp_path / "model", layers=3)
    yaml, shape = Path(tmp_path / "run.yaml"), read_shape(folder)
    text = f"model: {folder}\nstage: rl\ndata: {{train: [task:sort], max_length: 40}}\ntrain: {{precision: fp32}}\n"
    yaml.write_text(text + "rl: {algorithm: grpo, max_new_tokens: 8}\noptim: {name: adamw}\n", encoding="utf-8")

    def plan(*overrides):
        return make_plan(load_config(yaml, list(overrides)).config, shape, read_machine(), 1)

    plain, values, judged = plan(), plan("rl.algorithm=ppo"), plan("rl.rewards=['model:runs/reward']")
    head = shape.hidden_size + 1
    assert values.memory.parts["weights"] - plain.memory.parts["weights"] == 4 * head
    assert sum(values.memory.parts.values()) - sum(plain.memory.parts.values()) >= 16 * head
    assert judged.memory.parts["weights"] - plain.memory.parts["weights"] == 4 * shape.num_parameters
    notes = rollout_notes(load_config(yaml, ["rl.algorithm=ppo"]).config, shape, 0)
    assert f"a value head of {head:,} numbers" in notes[0]


def test_a_run_whose_answers_need_more_than_its_steps_does_not_fit_where_they_do_not(tmp_path):
    folder = write_tiny_model(tmp_path / "model", layers=3)
    yaml, shape = Path(tmp_path / "run.yaml"), read_shape(folder)
    text = f"model: {folder}\nstage: rl\ndata: {{train: [task:sort], max_length: 4096}}\n"
    yaml.write_text(text + "train: {global_batch: 512, recompute: full}\nrl: {samples: 8}\n", encoding="utf-8")

    def plan(rows, room):
        machine = replace(read_machine(), available_bytes=room, gpus=())
        return make_plan(load_config(yaml, [f"rl.rows={rows}"]).config, shape, machine, 1)

    few, many = (plan(rows, 1 << 40).memory for rows in (1, 4096))
    assert many.peak_moment == "drawing of answers" and few.peak_moment != many.peak_moment
    base = many.peak_bytes - many.parts["cache"]
    assert many.parts["cache"] == 4096 * (few.moments["drawing of answers"] - base)
    short = plan(4096, many.peak_bytes // 2)
    assert short.verdict == "does not fit" and short.smaller[0] == "rl.rows: 1024"
    assert plan(1024, many.peak_bytes // 2).verdict != "does not fit"
    away = load_config(yaml, ["rl.engine=vllm:http://127.0.0.1:8000"]).config
    assert "drawing of answers" not in make_plan(away, shape, read_machine(), 1).memory.moments
    assert plan(1, many.peak_bytes // 2).verdict != "does not fit"
