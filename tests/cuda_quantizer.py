"""DeepSpeed's compiled quantizer in plain torch, for ranks without a GPU: the same groups, bytes, order and rounding.

Read off ops/csrc/quantization and quantization_utils.h of 0.19.8. Where its kernels would read beside a tensor, leave a
part of one out, or do what the source does not say, this raises. Only what its Python calls is here, symmetric alone.
"""

import functools
from collections import Counter

import torch

CALLS = Counter()  # of each function; bits=4 and bits=8 of dequantize apart
LOADED = 8  # halves that a thread reads at once, aligned, of one group
LARGEST_GROUP = 5 * 512 * 16  # of swizzle_quant; for a larger one no kernel is started, without a word
WHOLE_WARP = 32 * LOADED  # below, quantized_reduction shuffles values of threads that there are not


def as_halves(tensor):
    """The kernels' view of any tensor: as many fp16 numbers as it has elements, from its first byte on."""
    assert tensor.is_contiguous(), "read in the order of memory"
    return tensor.view(-1).view(torch.float16)[: tensor.numel()]


def pack(groups, bits):
    """(codes of a matrix of fp16 with a group in each row, what a code of 1 stands for)."""
    largest = groups.abs().float()
    # A maximum of halves passes over what is not a number; of nothing else it is -inf.
    largest = torch.where(largest.isnan(), -torch.inf, largest).amax(1, keepdim=True)
    scale = torch.where(largest == 0, 1.0, 2**bits / (2 * largest))
    codes = (groups.float() * scale).nan_to_num(nan=0.0, posinf=2.0**31, neginf=-(2.0**31)).round()
    return codes.clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).to(torch.int8), 1 / scale


def to_bytes(codes, bits):
    """Of two 4-bit codes the first has the upper half of a byte: PackedInt4's `low`, declared after `high`."""
    if bits == 8:
        return codes
    first, second = codes[..., ::2].int(), codes[..., 1::2].int()
    return ((first << 4) | (second & 15)).to(torch.uint8).view(torch.int8)


def from_bytes(stored, bits):
    if bits == 8:
        return stored.float()
    wide = stored.int()
    second = ((wide & 15) ^ 8) - 8
    return torch.stack((wide >> 4, second), dim=-1).flatten(-2).float()


def counted(function):
    @functools.wraps(function)
    def call(*arguments):
        CALLS[function.__name__] += 1
        return function(*arguments)

    return call


class Quantizer:
    """What QuantizerBuilder().load() gives."""

    Symmetric = "symmetric"

    @staticmethod
    @counted
    def quantize(values, groups, bits, kind):
        size = _size_of_group(values.numel(), groups)
        assert kind == Quantizer.Symmetric and size < 16384, size
        codes, scales = pack(as_halves(values).view(groups, size), bits)
        return to_bytes(codes, bits).view(*values.shape[:-1], -1), scales

    @staticmethod
    @counted
    def dequantize(stored, scales, groups, bits, kind):
        """fp16, whatever was packed. The size of a group is what there is by their number."""
        assert kind == Quantizer.Symmetric and scales.numel() == groups and stored.is_contiguous()
        count = stored.numel() * 8 // bits
        size = _size_of_group(count, groups)
        halves = (from_bytes(stored.view(groups, -1), bits) * scales.view(groups, 1)).half()
        assert halves.shape == (groups, size)
        return halves.view(*stored.shape[:-1], stored.shape[-1] * 8 // bits)

    @staticmethod
    @counted
    def swizzle_quant(values, groups, bits, kind, pipelining, nodes, near):
        """Parts for ranks lie by their place in a node first, as the exchange inside a node wants them."""
        assert kind == Quantizer.Symmetric and pipelining == 1 and groups % (nodes * near) == 0, groups
        size = _size_of_group(values.numel(), groups)
        assert size <= LARGEST_GROUP, size
        codes, scales = pack(as_halves(values).view(groups, size), bits)

        def by_place(rows):
            return rows.view(nodes, near, -1).transpose(0, 1).reshape(-1)

        return by_place(to_bytes(codes, bits)), by_place(scales).view(groups, 1)

    @staticmethod
    @counted
    def quantized_reduction(stored, scales, groups_in, groups_out, bits, kind, near):
        """The sum, no mean, over the ranks of a node, added in fp16."""
        assert kind == Quantizer.Symmetric and groups_in % near == 0 and groups_in // near == groups_out
        size = _size_of_group(stored.numel() * 8 // bits // near, groups_out)
        assert size >= WHOLE_WARP, size
        halves = (from_bytes(stored.view(near, groups_out, -1), bits) * scales.view(near, groups_out, 1)).half()
        codes, scales = pack(functools.reduce(torch.add, halves), bits)
        return to_bytes(codes, bits).view(-1), scales


def _size_of_group(count, groups):
    size, rest = divmod(count, groups)
    assert rest == 0 and size % LOADED == 0, f"{count} numbers in {groups} groups"
    return size


class Builder:
    def load(self):
        return Quantizer


def put_in():
    """From now on, of this process: DeepSpeed loads it, and duoka takes the machine for one with a quantizer."""
    from duoka.parallel.deepspeed_package import load_deepspeed
    from duoka.plan import choose

    load_deepspeed(torch.device("cpu"))
    from deepspeed.ops import op_builder

    op_builder.QuantizerBuilder = Builder
    choose.has_quantizer = lambda machine: True
