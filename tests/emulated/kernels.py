"""What CUDA builds of torch have beside operators: kernels that are several on a CPU, NCCL, copies to all GPUs."""

import importlib.util
import os

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

HALF = (torch.bfloat16, torch.float16)


def provide():
    """Put all of it in its place."""
    _provide_nccl()
    _provide_copies()
    _provide_norm()
    _provide_attention()


def _provide_nccl():
    class AlwaysOne(type):
        def __instancecheck__(cls, one):
            return True

    class ProcessGroupNCCL(metaclass=AlwaysOne):
        class Options:
            pass

        def __new__(cls, store, rank, size, options):
            store = dist.PrefixStore("emulated", store)
            gloo = distributed_c10d.ProcessGroupGloo(store, rank, size, timeout=options._timeout)
            gloo._set_sequence_number_for_group()
            return _load_nccl().over(rank, size, gloo)

    for module in (dist, distributed_c10d):
        module.is_nccl_available = lambda: True
        module.ProcessGroupNCCL = ProcessGroupNCCL
    distributed_c10d._NCCL_AVAILABLE = True
    backend = torch._C._distributed_c10d.Backend
    backend._group_start = backend._group_end = lambda self: None


def _load_nccl():
    spec = importlib.util.spec_from_file_location("emulated_nccl", os.environ["EMULATED_NCCL"])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _provide_copies():
    """What DataParallel calls."""

    def there(tensor, index):
        return tensor.cpu() if index is None or index < 0 else tensor.to(torch.device("cuda", index))

    def scatter(tensor, devices, sizes=None, dim=0, streams=None):
        parts = tensor.split(sizes, dim) if sizes else tensor.chunk(len(devices), dim)
        return tuple(there(part, index).contiguous() for part, index in zip(parts, devices, strict=False))

    def broadcast(tensor, devices):
        return [tensor if tensor.device.index == index else there(tensor, index).clone() for index in devices]

    torch._C._scatter = scatter
    torch._C._gather = lambda tensors, dim, index: torch.cat([there(one, index) for one in tensors], dim)
    torch._C._broadcast = broadcast
    torch._C._broadcast_coalesced = lambda tensors, devices, size=0: [
        list(one) for one in zip(*(broadcast(tensor, devices) for tensor in tensors), strict=True)
    ]


def _provide_norm():
    """RMS norm as one kernel, whose backward pass keeps the input and a number a row; a CPU build takes it apart."""

    def forward(rows, shape, weight=None, eps=None):
        wide = rows.cpu().float()
        scale = (wide.pow(2).mean(-1, keepdim=True) + (torch.finfo(wide.dtype).eps if eps is None else eps)).rsqrt()
        out = wide * scale if weight is None else wide * scale * weight.cpu().float()
        return out.to(rows.dtype).to(rows.device), scale.to(rows.device)

    def backward(slope, rows, shape, scale, weight, wanted):
        slope, wide, scale = slope.cpu().float(), rows.cpu().float(), scale.cpu()
        normed = wide * scale
        by_normed = slope if weight is None else slope * weight.cpu().float()
        by_rows = (by_normed - normed * (by_normed * normed).mean(-1, keepdim=True)) * scale
        by_weight = None if weight is None else (slope * normed).flatten(0, -2).sum(0).to(weight.dtype).to(rows.device)
        return by_rows.to(rows.dtype).to(rows.device), by_weight

    library = torch.library.Library("aten", "IMPL")
    library.impl("_fused_rms_norm", forward, "CUDA")
    library.impl("_fused_rms_norm_backward", backward, "CUDA")
    _provide_norm.kept = library


def _provide_attention():
    """FlashAttention's function over documents of any length, by its definition, in the host's memory."""
    from torch.nn.attention import varlen

    @varlen._varlen_attn.register_kernel("cuda")
    def forward(
        query, key, value, query_edges, key_edges, longest_query, longest_key, is_causal=False, scale=None,
        window_size=None, enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
    ):  # fmt: skip
        if torch.cuda.get_device_capability() < (8, 0):
            raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")
        if any(one.dtype not in HALF for one in (query, key, value)):
            raise RuntimeError("FlashAttention only supports fp16 and bf16")
        if not query.shape[-1] == key.shape[-1] == value.shape[-1]:
            raise RuntimeError("v must have shape (total_k, num_heads_k, head_size)")
        assert seqused_k is None and block_table is None and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        for edges, longest, rows in ((query_edges, longest_query, query), (key_edges, longest_key, key)):
            assert edges.is_cuda and edges.dtype == torch.int32
            assert int(edges.diff().max()) <= longest and int(edges[-1]) <= len(rows)
        out = torch.zeros(query.shape, dtype=query.dtype)
        for (asks, _), weights, (_, _, values) in _documents(
            query, key, value, query_edges, key_edges, window_size, scale
        ):
            out[asks] = (weights @ values).transpose(0, 1).to(out.dtype)
        numbers = torch.empty((query.shape[1], len(query)), device=query.device)
        return out.to(query.device), numbers, torch.zeros(2, dtype=torch.uint64, device=query.device)

    @varlen._varlen_attn_backward.register_kernel("cuda")
    def backward(
        slope, query, key, value, out, numbers, query_edges, key_edges, longest_query, longest_key, is_causal, state,
        scale=None, window_size=None,
    ):  # fmt: skip
        slopes = [torch.zeros(one.shape, dtype=one.dtype) for one in (query, key, value)]
        slope, groups = slope.cpu(), query.shape[1] // key.shape[1]
        scaling = query.shape[-1] ** -0.5 if scale is None else scale
        for (asks, sees), weights, (queries, keys, values) in _documents(
            query, key, value, query_edges, key_edges, window_size, scale
        ):
            of_out = slope[asks].transpose(0, 1).float()
            of_weights = of_out @ values.transpose(1, 2)
            of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scaling
            slopes[0][asks] = (of_scores @ keys).transpose(0, 1).to(query.dtype)
            for place, whole in ((1, of_scores.transpose(1, 2) @ queries), (2, weights.transpose(1, 2) @ of_out)):
                narrow = whole.unflatten(0, (-1, groups)).sum(1)
                slopes[place][sees] = narrow.transpose(0, 1).to(query.dtype)
        return tuple(one.to(query.device) for one in slopes)


def _documents(query, key, value, query_edges, key_edges, window, scale):
    """Of each document: its places among queries and keys, its weights, and queries, keys and values by head."""
    query, key, value = (one.cpu().float() for one in (query, key, value))
    query_edges, key_edges = query_edges.tolist(), key_edges.tolist()
    groups, (before, behind) = query.shape[1] // key.shape[1], window or (-1, -1)
    scaling = query.shape[-1] ** -0.5 if scale is None else scale
    for start, end, first, last in zip(query_edges, query_edges[1:], key_edges, key_edges[1:], strict=False):
        if start == end:
            continue
        asks, sees = slice(start, end), slice(first, last)
        queries = query[asks].transpose(0, 1)
        keys, values = (one[sees].transpose(0, 1).repeat_interleave(groups, 0) for one in (key, value))
        # The last query sees the last key.
        ahead = torch.arange(last - first)[None] - (torch.arange(end - start)[:, None] + (last - first) - (end - start))
        seen = (ahead >= -before if before >= 0 else ahead == ahead) & (
            ahead <= behind if behind >= 0 else ahead == ahead
        )
        scores = (queries @ keys.transpose(1, 2) * scaling).masked_fill(~seen, float("-inf"))
        yield (asks, sees), scores.softmax(-1), (queries, keys, values)
