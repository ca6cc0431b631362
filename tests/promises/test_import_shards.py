"""What FSDP saved in shards becomes a model folder, number by number, and nothing in its index is called."""

import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from importing import import_from
from safetensors.torch import load_file, save_file
from tiny import write_tiny_model
from worlds import run_world

from duoka.errors import ConfigError, StorageError

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def odd_model(tmp_path_factory):
    """Sizes that two and three ranks cannot share evenly, and a head of its own."""
    return write_tiny_model(tmp_path_factory.mktemp("odd"), odd=True, tied=False)


def save_shards(model, folder, top):
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **({} if "RANK" in os.environ else alone))
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in lm.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(lm, mesh=mesh)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-2)
    ids = torch.arange(24).view(2, 12) + 5 + dist.get_rank()
    lm(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    weights, state = get_state_dict(lm, optimizer)
    tree = weights
    for name in reversed(top.split(".") if top else ()):
        tree = {name: tree}
    if top:
        tree = {**tree, "optim": state}
    dcp.save(tree, checkpoint_id=folder)
    known = {name: value.full_tensor().contiguous() for name, value in weights.items()}
    if dist.get_rank() == 0:
        save_file(known, Path(folder).with_suffix(".safetensors"))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def saved(tmp_path_factory, odd_model):
    folder = tmp_path_factory.mktemp("shards") / "checkpoint-2" / "pytorch_model_fsdp_0"
    run_world(3, save_shards, str(odd_model), str(folder), "model")
    return folder


@pytest.mark.parametrize(("size", "top"), [(1, ""), (2, "app.model"), (3, "model")])
def test_shards_of_any_number_of_ranks_are_the_whole_weights(odd_model, tmp_path, size, top):
    folder = tmp_path / "shards"
    run_world(size, save_shards, str(odd_model), str(folder), top)
    told = import_from(folder, odd_model, tmp_path / "new")
    assert (f"under {top}." in told) == bool(top)
    found, known = load_file(tmp_path / "new/model.safetensors"), load_file(tmp_path / "shards.safetensors")
    assert found.keys() == known.keys() and len(found) > 20
    start = load_file(odd_model / "model.safetensors")
    for name, value in known.items():
        assert torch.equal(found[name], value) and not torch.equal(value, start[name]), name
    assert (tmp_path / "new/tokenizer.json").is_file()


def test_a_trainers_checkpoint_is_named_by_its_own_folder(saved, odd_model, tmp_path):
    (saved.parent / "trainer_state.json").write_text('{"global_step": 2}')
    assert "step 2" in import_from(saved.parent, odd_model, tmp_path / "new")
    (saved.parent / "trainer_state.json").unlink()
    found, known = load_file(tmp_path / "new/model.safetensors"), load_file(saved.with_suffix(".safetensors"))
    assert all(torch.equal(found[name], value) for name, value in known.items())


class Bomb:
    def __reduce__(self):
        return Path.touch, (Path("struck"),)


def test_code_in_an_index_is_not_run_and_gaps_are_named(saved, odd_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def refusal(kind, words, model=odd_model):
        with pytest.raises(kind, match=words):
            import_from(tmp_path / "copy", model, tmp_path / "new")
        assert not (tmp_path / "new").exists()

    shutil.copytree(saved, tmp_path / "copy")
    lost = next((tmp_path / "copy").glob("__1_*.distcp"))
    data = lost.read_bytes()
    lost.unlink()
    refusal(StorageError, f"lacks {lost.name}, which holds a part of")
    lost.write_bytes(data[:1000])
    refusal(StorageError, "cannot be read")
    lost.write_bytes(data)
    refusal(ConfigError, "not those of the model", write_tiny_model(tmp_path / "other"))
    index = tmp_path / "copy/.metadata"
    held = pickle.loads(index.read_bytes())
    index.write_bytes(pickle.dumps([Bomb(), held]))
    refusal(StorageError, "written otherwise")
    held.planner_data = Bomb()
    index.write_bytes(pickle.dumps(held))
    import_from(tmp_path / "copy", odd_model, tmp_path / "new")
    assert not Path("struck").exists()
