"""ZeRO++ around DeepSpeed's quantizer: what it is given, what is made of its answers, and what is refused."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from duoka.config.schema import ParallelConfig
from duoka.config.schema_running import CompressConfig
from duoka.errors import ConfigError
from duoka.parallel.deepspeed_packed import AsHalf, check_nodes, check_weights, is_packed
from duoka.plan.axes import check_shape
from duoka.plan.shape import shape_from_config


def sum_of_nodes(times: int, seen: list[torch.Tensor]) -> Callable[..., list[torch.Tensor]]:
    """DeepSpeed's exchange of ranks that all have the same gradients: of matrices that it packs a node's sum."""

    def reduce(tensors: list[torch.Tensor], groups: object) -> list[torch.Tensor]:
        seen.extend(tensors)
        return [tensor.view(-1) * (times if tensor.dim() > 1 else 1) for tensor in tensors]

    return reduce


@pytest.mark.parametrize("times", [1, 4])
def test_packed_gradients_are_fp16_when_it_reads_their_bytes_and_come_back_as_their_mean(
    times: int,
) -> None:
    """Its kernel takes any tensor's bytes for fp16, and adds up a node's, as another version may not."""
    seen: list[torch.Tensor] = []
    exchange = AsHalf(sum_of_nodes(times, seen), 8, 4)
    exchange.look(None, torch.device("cpu"))
    matrix = torch.linspace(-4.0, 4.0, 256 * 256).view(256, 256)
    given = [matrix, torch.tensor([1e-9, 1.0]), matrix[:, :8], matrix.t()]
    answers = exchange(given, None)
    assert [one.dtype for one in seen[1:]] == [torch.float16, torch.float32, torch.float32, torch.float16]
    assert [one.dim() for one in seen[1:]] == [2, 1, 1, 2] and all(one.is_contiguous() for one in seen)
    for one, answer in zip(given, answers, strict=True):
        assert answer.dtype == torch.float32
        torch.testing.assert_close(answer, one.reshape(-1), rtol=1e-3, atol=0)
    broken = matrix.clone()
    broken[0, 0] = torch.nan
    exchange([broken], None)
    assert seen[-1][0, 0].isinf(), "of NaN the kernels would make 0"


def test_a_quantizer_that_does_otherwise_is_refused() -> None:
    with pytest.raises(ConfigError, match="makes -3 to -3 of minus ones"):
        AsHalf(sum_of_nodes(3, []), 8, 4).look(None, torch.device("cpu"))


@pytest.mark.parametrize(
    ("shape", "num_ranks", "told"),
    [
        ((4096, 1024), 16, True),
        ((1024,), 16, False),
        ((50257, 768), 8, False),  # 50257 groups are no multiple: a part would be left out
        ((4096, 8), 8, False),  # an adapter
        ((4096, 100), 8, False),  # a load of 8 would reach into the next group
        ((8, 4096, 4096), 8, True),
        ((128, 1536, 2048), 8, False),  # experts: 170,667 numbers of a group are too many
        ((65536, 65536), 8, False),
    ],
)
def test_gradients_of_shapes_that_kernels_do_not_take_travel_as_they_are(
    shape: tuple[int, ...], num_ranks: int, told: bool
) -> None:
    assert is_packed(shape, num_ranks) is told


def test_weights_that_deepspeed_cannot_pack_are_refused_before_anything_starts() -> None:
    """It asserts that a rank's part of what it packs is a multiple of 8 numbers, in the middle of a step."""
    parallel = ParallelConfig(engine="deepspeed", strategy="zero3", compress=CompressConfig(weights="int8"))
    facts = {
        "model_type": "gpt2", "n_embd": 768, "n_layer": 2, "n_head": 12, "vocab_size": 50257, "n_positions": 1024,
    }  # fmt: skip
    shape = shape_from_config(facts)
    assert not check_shape(parallel, shape, 32)
    (fault,) = check_shape(parallel, shape, 64)
    assert "the embedding has 38,597,376: 603,084 for each of 64 processes" in fault.what
    assert fault.key == "parallel.compress" and "--nproc 48 " in fault.fix and "engine: native" in fault.fix
    natively = parallel.model_copy(update={"engine": "native"})
    assert not check_shape(natively, shape, 64) and not check_shape(parallel, shape, 1)
    model = torch.nn.Sequential(torch.nn.Linear(999, 101), torch.nn.Linear(9, 3))
    check_weights(model, 2, 100_899)  # smaller ones stay gathered
    with pytest.raises(ConfigError, match=r"0.weight has 100,899: 50,449.5 for each of 2 processes"):
        check_weights(model, 2, 100_000)


@pytest.mark.parametrize(("num_ranks", "near", "fits"), [(4, 8, True), (16, 8, True), (12, 8, False), (3, 2, False)])
def test_nodes_that_are_not_whole_are_refused(
    num_ranks: int, near: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed takes a node for as many ranks as a process sees GPUs."""
    import deepspeed.accelerator

    there = SimpleNamespace(device_count=lambda: near)
    monkeypatch.setattr(deepspeed.accelerator, "get_accelerator", lambda: there)
    if fits:
        check_nodes(num_ranks)
        return
    with pytest.raises(ConfigError, match=f"and {num_ranks} processes are no multiple") as found:
        check_nodes(num_ranks)
    assert f"a multiple of {near} processes" in str(found.value.fix)
