"""Experts by boxes: of files that hold each expert by itself a rank reads a part of what transformers loads."""

import itertools
import random

import pytest
import torch
from families import write_family

from duoka.model.box import Box
from duoka.model.experts import compute_experts, find_experts, use_own_experts
from duoka.model.request import ModelRequest
from duoka.model.shards import build_without_memory


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_any_box_of_any_tensor_is_what_transformers_loads(model_type, tmp_path):
    from transformers import AutoModelForCausalLM

    write_family(tmp_path, model_type)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    biases = {name: one for name, one in whole.named_buffers() if name.endswith("correction_bias")}
    if biases:  # of a router: a part of the model that is no parameter
        for bias in biases.values():
            bias.copy_(torch.arange(len(bias)) * 0.5 - 0.3)
        whole.save_pretrained(tmp_path)
    model, source = build_without_memory(ModelRequest(tmp_path, dtype=torch.float32))
    named, dice = dict(whole.named_parameters()), random.Random(3)
    joined = [name for name, one in named.items() if one.ndim == 3]
    assert joined and not any(name in source.files for name in joined)
    for name, wanted in named.items():
        assert source.knows(name, wanted.shape) and not source.knows(name, (*wanted.shape[:-1], wanted.shape[-1] + 1))
        assert torch.equal(source.read(name, wanted.shape), wanted)
        for _ in range(4):
            starts = [dice.randrange(size) for size in wanted.shape]
            sizes = [dice.randint(1, size - start) for start, size in zip(starts, wanted.shape, strict=True)]
            box = Box(tuple(starts), tuple(sizes))
            assert torch.equal(source.read(name, wanted.shape, box), wanted[box.slices]), (name, box)
    source.close()
    built = dict(model.named_buffers())
    assert all(torch.equal(built[name], bias) for name, bias in biases.items())


def test_files_that_lack_an_expert_are_loaded_whole(tmp_path):
    """And then transformers says what is missing."""
    from safetensors.torch import load_file, save_file

    write_family(tmp_path, "qwen3_moe")
    tensors = load_file(tmp_path / "model.safetensors")
    gone = next(name for name in tensors if ".experts.3." in name)
    save_file(
        {name: one for name, one in tensors.items() if name != gone}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    assert build_without_memory(ModelRequest(tmp_path, dtype=torch.float32)) is None


def one_layer(tmp_path):
    from transformers import AutoModelForCausalLM

    write_family(tmp_path, "qwen3_moe")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    return model, next(find_experts(model))[1]


def test_every_split_of_tokens_over_experts_gives_each_of_them_a_gradient(tmp_path):
    """Also zero tokens: a strategy waits for a gradient of each parameter."""
    _, experts = one_layer(tmp_path)
    width = experts.down_proj.shape[1]
    for counts in itertools.islice(itertools.product((0, 2), repeat=experts.num_experts), 0, None, 3):
        experts.zero_grad()
        rows = torch.randn(sum(counts), width)
        out = compute_experts(experts, rows, torch.tensor(counts))
        assert out.shape == rows.shape
        out.square().sum().backward()
        for parameter in experts.parameters():
            used = [bool(parameter.grad[place].any()) for place in range(len(counts))]
            assert used == [count > 0 for count in counts]


def test_under_autocast_experts_compute_in_its_type_whatever_the_weights_are(tmp_path):
    model, experts = one_layer(tmp_path)
    use_own_experts(model)
    hidden = torch.randn(5, experts.down_proj.shape[1])
    index, weights = torch.tensor([[0, 1], [1, 2], [3, 0], [2, 3], [1, 3]]), torch.full((5, 2), 0.5)
    with torch.autocast("cpu", torch.bfloat16):
        wide = experts(hidden, index, weights)
        narrow = experts.to(torch.bfloat16)(hidden, index, weights)
    assert torch.equal(wide, narrow)
