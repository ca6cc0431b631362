"""A stage's loss is sum over k of sum_k / D_k with global D_k: the same on any split, and equal to a float64 oracle."""

import json
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from test_any_split import YAML
from test_sharded import build
from tiny import write_conversations, write_tiny_model
from worlds import run_world

SHIFT = 3.0
ALONE, PAIR = ["single"], ["ddp", "fsdp"]


def build_toy(config):
    """Of each token its likelihood, of each sequence a bent mean: no weight of a token is known beforehand."""
    from duoka.parallel.inputs import model_inputs
    from duoka.parallel.objective import Sums
    from duoka.train.stages.stage import Stage

    class Toy(Stage):
        metrics: ClassVar = {"mean_logp": "sequences"}

        def denominators(self, batch):
            return {"tokens": batch.global_targets, "sequences": batch.num_samples}

        def sums(self, model, micro, device):
            inputs = model_inputs(micro, device)
            logps, _ = model(**inputs, answer="logps")
            first, last = micro.boundaries[:-1], micro.boundaries[1:]
            counts = torch.stack([(inputs["labels"][0, a:b] >= 0).sum() for a, b in zip(first, last, strict=True)])
            totals = torch.stack([logps[0, a:b].sum() for a, b in zip(first, last, strict=True)])
            means = totals[counts > 0] / counts[counts > 0]
            losses = {"tokens": -logps.sum(), "sequences": -F.logsigmoid(means + SHIFT).sum()}
            return Sums(losses, {"mean_logp": means.detach().sum()})

    return Toy(config)


def cut_sequences(batch):
    """(tokens, labels) of each sequence that a rank was given."""
    for micro in batch.micro_batches:
        for a, b in zip(micro.boundaries[:-1], micro.boundaries[1:], strict=True):
            if (micro.labels[0, a:b] >= 0).any():
                yield micro.input_ids[0, a:b].tolist(), micro.labels[0, a:b].tolist()


def learn_toy(yaml, strategies, folder):
    from duoka.comm.world import end_world
    from duoka.train.step import optimizer_step

    world = None
    for name in strategies:
        settings = [] if name == "single" else [f"parallel.strategy={name}"]
        settings += ["data.packing=true", "train.micro_batch=300 tokens"]
        inputs, world, _, contents, feed = build(yaml, settings, f"{folder}/{name}", world)
        engine, toy = contents.engine, build_toy(inputs.config)
        batch = next(feed.from_cursor(0, 0, 1.0))
        assert len(batch.micro_batches) > 1, "nothing is accumulated"
        engine.forward_backward(batch, toy)
        whole = {
            key: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).clone()
            for key, p in engine.named_trainable().items()
        }
        engine.zero_grad(contents.optimizer)
        result = optimizer_step(engine, contents.optimizer, batch, toy, clip=0.0)
        if world.is_main:
            facts = {
                "ids": batch.sample_ids.tolist(), "loss": result.loss, "mean_logp": result.metrics["mean_logp"],
                "names": list(result.losses), "sequences": list(cut_sequences(batch)),
            }  # fmt: skip
            Path(f"{folder}/{name}.json").write_text(json.dumps(facts), encoding="utf-8")
            save_file({key: grad.contiguous() for key, grad in whole.items()}, f"{folder}/{name}.safetensors")
    end_world(world)


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stages")
    model = write_tiny_model(folder / "model", tied=False)  # the head is a unit of its own under FSDP
    data = write_conversations(folder / "chats.jsonl", 48, seed=3)
    yaml = folder / "run.yaml"
    yaml.write_text(YAML.format(model=model, data=data, output=folder / "out"), encoding="utf-8")
    run_world(1, learn_toy, str(yaml), ALONE, str(folder))
    run_world(2, learn_toy, str(yaml), PAIR, str(folder))
    names = (*ALONE, *PAIR)
    facts = {name: json.loads((folder / f"{name}.json").read_text("utf-8")) for name in names}
    return model, facts, {name: load_file(folder / f"{name}.safetensors") for name in names}


@pytest.fixture(scope="module")
def oracle(learned):
    """One sequence at a time, all logits, float64: (gradients, loss, mean of metrics)."""
    from transformers import LlamaForCausalLM

    model, facts, _ = learned
    lm = LlamaForCausalLM.from_pretrained(model, dtype=torch.float64)
    tokens, sequences, means = [], [], []
    for ids, labels in facts["single"]["sequences"]:
        every = lm(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        logps = torch.stack([every[i, label] for i, label in enumerate(labels) if label >= 0])
        tokens += list(-logps)
        sequences.append(-torch.log(1 / (1 + torch.exp(-(logps.mean() + SHIFT)))))
        means.append(float(logps.mean()))
    assert len(sequences) == 8
    loss = sum(tokens) / len(tokens) + sum(sequences) / len(sequences)
    loss.backward()
    return {name: p.grad for name, p in lm.named_parameters()}, float(loss), sum(means) / len(means)


@pytest.mark.parametrize("name", [*ALONE, *PAIR])
def test_two_denominators_equal_the_oracle_on_any_split(learned, oracle, name):
    facts, gradients = learned[1][name], learned[2][name]
    want_gradients, want_loss, want_mean = oracle
    assert sorted(facts["ids"]) == sorted(learned[1]["single"]["ids"]) and facts["names"] == ["tokens", "sequences"]
    assert abs(facts["loss"] / want_loss - 1) < 1e-5 and abs(facts["mean_logp"] / want_mean - 1) < 1e-5
    assert set(gradients) == set(want_gradients)
    for key, want in want_gradients.items():
        error = float((gradients[key] - want).norm() / want.norm())
        assert error < 1e-4, f"{key} is off by {error}"
