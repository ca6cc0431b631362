"""What losses over chunks of logits, and attention, take of an emulated GPU, beside what was held before. JSON."""

import json
import os

import torch

from duoka.model import chunks
from duoka.model.attention import attend
from duoka.model.logps import token_logps
from duoka.model.loss import sum_cross_entropy

WORDS, WIDTH, ROWS, TOKENS = 8192, 64, 512, 1024


def measure(compute):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(WORDS, WIDTH).cuda())
    hidden = torch.randn(1, ROWS, WIDTH).cuda().requires_grad_()
    labels = torch.randint(0, WORDS, (1, ROWS)).cuda()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.autocast("cuda", torch.bfloat16):
        total = compute(hidden, weight, labels)
    total.backward()
    return torch.cuda.max_memory_allocated() - before


def add_entropy(hidden, weight, labels):
    logps, entropy = token_logps(hidden, weight, labels, more="entropy")
    return logps.sum() + entropy.sum()


def cap_softly(hidden, weight, labels):
    """In four chunks: each has a slope of the cap, as large as its logits."""
    chunks.GPU_CHUNK_BYTES = 4 * WORDS * ROWS // 4
    return sum_cross_entropy(hidden, weight, labels, bend=chunks.Bend(softcap=30.0))[0]


def attend_to(tokens, dtype, **how):
    """Bytes of a document whose heads share keys, forward and backward."""
    rows = {
        name: torch.randn(1, heads, tokens, 32, dtype=dtype).cuda().requires_grad_()
        for name, heads in (("query", 8), ("key", 2), ("value", 2))
    }
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    attend(torch.nn.Module(), **rows, attention_mask=None, **how)[0].square().sum().backward()
    return torch.cuda.max_memory_allocated() - before


if __name__ == "__main__":
    losses = {
        "loss": lambda *inputs: sum_cross_entropy(*inputs)[0],
        "log-probabilities": lambda *inputs: token_logps(*inputs)[0].sum(),
        "entropy": add_entropy,
        "soft cap": cap_softly,
    }
    peaks = {name: measure(compute) for name, compute in losses.items()}
    peaks["attention in fp32"] = attend_to(TOKENS, torch.float32)
    peaks["attention within a window"] = attend_to(TOKENS, torch.bfloat16, sliding_window=TOKENS // 2)
    print(json.dumps(peaks), flush=True)
    os._exit(0)  # how an interpreter ends beside threads that serve devices is not what is measured
