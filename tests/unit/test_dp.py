"""nn.DataParallel's evaluation: weights copied once for all batches, parts of uneven size added exactly."""

import copy

import pytest
import torch

from duoka.model.build import LossModel, load_model
from duoka.model.request import ModelRequest
from duoka.parallel import dp


@pytest.fixture
def two_devices(monkeypatch):
    """Two GPUs that are the CPU: torch's steps, one after the other instead of in threads."""
    copies = []

    def replicate(module, devices, detach):
        assert detach, "no gradient is wanted of them"
        copies.append(len(devices))
        return [copy.deepcopy(module) for _ in devices]

    def scatter_kwargs(inputs, named, devices):
        rows = min(len(devices), len(named["input_ids"]))
        parts = [{key: value.tensor_split(rows)[i] for key, value in named.items()} for i in range(rows)]
        return [()] * rows, parts

    def parallel_apply(modules, parts, named, devices):
        assert len(modules) == len(named) == len(devices)
        return [module(**one) for module, one in zip(modules, named, strict=True)]

    monkeypatch.setattr(dp.parallel, "replicate", replicate)
    monkeypatch.setattr(dp.parallel, "parallel_apply", parallel_apply)
    monkeypatch.setattr(dp.parallel.scatter_gather, "scatter_kwargs", scatter_kwargs)
    return copies


def test_weights_are_copied_once_for_all_batches(tiny_model, two_devices):
    bare = LossModel(load_model(ModelRequest(tiny_model, dtype=torch.float32))).eval()
    model = dp.Replicas(bare, [], "fp32")
    model.replicas.device_ids = [0, 1]
    with torch.no_grad(), model.replicated_once():
        for rows in (3, 2, 1):  # uneven parts, and a batch that is shorter than the GPUs
            ids = torch.randint(200, (rows, 12), generator=torch.Generator().manual_seed(rows))
            batch = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(12).repeat(rows, 1)}
            ours, theirs = model(**batch), bare(**batch)
            assert float(ours[0]) == pytest.approx(float(theirs[0]), rel=1e-6)
            assert int(ours[1]) == int(theirs[1])
            ours, theirs = model(**batch, answer="logps"), bare(**batch, answer="logps")
            assert torch.allclose(ours[0], theirs[0]) and ours[1] is None, "each token's, in the rows' order"
    assert two_devices == [2], "copied once, to two"
    assert not model._held, "and let go of"
