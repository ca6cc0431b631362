"""A model that was made narrower as it was read keeps no file mapped into memory for the few weights that were not."""

import sys
from pathlib import Path

import pytest
import torch
from families import write_family
from tiny import build_tiny_tokenizer

from duoka.model.mapped_files import leave_files
from duoka.model.reading import read_model
from duoka.train.record import forget_peak, peak_memory_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


def mapped(folder):
    return str(folder) in Path("/proc/self/maps").read_text(encoding="utf-8")


def test_a_correction_in_fp32_keeps_no_file_of_a_narrow_model(tmp_path):
    folder = write_family(tmp_path / "model", "deepseek_v3", tokenizer=build_tiny_tokenizer())
    model = read_model(folder, scores=False, dtype=torch.bfloat16, local_files_only=True, use_safetensors=True)
    kept = {name for name, one in model.state_dict().items() if one.dtype == torch.float32}
    assert any(name.endswith("e_score_correction_bias") for name in kept), "the family keeps nothing wide any more"
    assert not mapped(folder)


def test_a_model_that_lies_in_its_file_stays_there(tmp_path):
    from safetensors.torch import load_file, save_file

    model = torch.nn.Linear(256, 256)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    model.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=True)
    before = model.weight.data_ptr()
    leave_files(model)
    assert model.weight.data_ptr() == before


def test_the_peak_is_that_of_training():
    ballast = torch.ones(100 * 2**20)
    high = peak_memory_bytes()
    del ballast
    forget_peak()
    assert peak_memory_bytes() < high - 300 * 2**20
