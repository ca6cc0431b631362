"""What a config.json does not tell of a model is counted in its files: types without a row, towers beside the text."""

import json

import pytest
import torch
from families import all_families, write_family
from safetensors.torch import load_file, save_file

from duoka.plan.families import FAMILIES
from duoka.plan.in_files import count_in_files
from duoka.plan.shape import read_shape

# Mamba in place of attention, layers of several kinds, tables beside the embedding, norms without weights, no gate.
KINDS = ("mamba2", "nemotron_h", "jamba", "lfm2", "gemma4_text", "gemma3n_text", "qwen3_5", "deepseek_v4", "cohere2")
SEEING = ("gemma3", "mistral3", "qwen3_vl", "internvl", "llava_onevision", "smolvlm", "qwen3_5", "mllama")
# transformers stores buffers with these, which are no parameters: of the tiny ones they are a share that is seen.
WITH_BUFFERS = {"minimax": 0.08, "bigbird_pegasus": 0.02, "cpmant": 0.01}
BROKEN = (
    "blt", "dbrx", "dots3_note", "dots3_note_text", "gemma3n", "gemma4_assistant", "git", "musicgen",
    "musicgen_melody", "prophetnet", "qwen4_exp", "qwen4_exp_text", "reformer", "gemma4_unified_assistant",
)  # fmt: skip


def compare(folder, name):
    from duoka.model.build import load_model
    from duoka.model.request import ModelRequest

    lm = load_model(ModelRequest(write_family(folder, name), dtype=torch.float32, trains=True))
    shape, total = read_shape(folder), sum(parameter.numel() for parameter in lm.parameters())
    assert shape.num_parameters + shape.num_beside == pytest.approx(total, rel=WITH_BUFFERS.get(name, 3e-4))
    if name in SEEING:
        assert shape.num_beside == sum(one.numel() for one in lm.parameters() if not one.requires_grad)
    return shape


@pytest.mark.parametrize("name", KINDS)
def test_a_type_without_a_row_has_the_parameters_of_its_files(tmp_path, name):
    shape = compare(tmp_path, name)
    assert shape.is_counted and not shape.exact


@pytest.mark.parametrize("name", SEEING)
def test_towers_are_counted_beside_what_reads_text(tmp_path, name):
    assert compare(tmp_path, name).num_beside > 0


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in all_families() if name not in {*FAMILIES, *BROKEN}])
def test_all_types_without_a_row(tmp_path, name):
    compare(tmp_path, name)


def test_towers_whose_files_are_not_here_are_guessed(tmp_path):
    """Of the tower of Gemma 3's models, and of Qwen2.5-VL's, whose MLP has a gate."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    from duoka.model.layers import beside_text

    sizes = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
    for name, near, vision in (("gemma3", 0.06, sizes), ("qwen2_5_vl", 0.3, {})):
        config = AutoConfig.for_model(name)
        vars(config.vision_config).update(vision)
        config.text_config.num_hidden_layers = 1
        config.save_pretrained(tmp_path)
        with torch.device("meta"):
            towers = beside_text(AutoModelForImageTextToText.from_config(config))
        true = sum(one.numel() for tower in towers.values() for one in tower.parameters())
        assert read_shape(tmp_path).num_beside == pytest.approx(true, rel=near), name


def test_what_is_packed_damaged_or_absent_is_not_counted(tmp_path):
    write_family(tmp_path, "mamba2")
    facts = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    weights = tmp_path / "model.safetensors"
    assert count_in_files(tmp_path, facts) is not None
    tensors = load_file(weights)
    save_file({**tensors, "packed": torch.zeros(4, dtype=torch.uint8)}, weights)
    assert count_in_files(tmp_path, facts) is None
    weights.write_bytes(weights.read_bytes()[:100])
    assert count_in_files(tmp_path, facts) is None
    weights.unlink()
    assert count_in_files(tmp_path, facts) is None
    assert not read_shape(tmp_path).is_counted
