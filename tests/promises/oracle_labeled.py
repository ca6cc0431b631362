"""KTO as a plain float64 loop that shares no code with duoka: one answer at a time, unpadded, autograd.

It takes the order of answers as given. The formula is that of arXiv 2402.01306, equations 7 and 8.
"""

import copy
import json
import math
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def read_labeled(file, folder, most):
    """(own ids, mismatched ids, first answer token, good) of every record, by writing ChatML by hand."""
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def tokens(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    records = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
    heads = [tokens(f"<|im_start|>user\n{one['prompt']}<|im_end|>\n<|im_start|>assistant\n") for one in records]
    answers = [tokens(one["completion"] + "<|im_end|>") for one in records]
    answers = [ids[: most - len(head)] for ids, head in zip(answers, heads, strict=True)]  # an answer as it is learned
    found, count = [], len(records)
    asked = [one["prompt"] for one in records] * 3
    for place, record in enumerate(records):
        first = other = place + count
        while asked[first - 1] == asked[place]:  # how many answers to this prompt stand before it
            first -= 1
        while asked[other] == asked[place]:
            other += 1
        size = next(n for n in range(1, count) if asked[(other + n) % count] != asked[other])
        other = (other + (place + count - first) % size) % count
        own, mixed = (torch.tensor((heads[place] + answers[which])[:most]) for which in (place, other))
        found.append((own, mixed, len(heads[place]), record["label"]))
    return found


def log_probability(model, ids, start):
    logps = model(input_ids=ids[None]).logits[0].log_softmax(-1)
    return sum(logps[at - 1, ids[at]] for at in range(start, len(ids)))


def sigma(x):
    return 1 / (1 + torch.exp(-x))


def train(
    file, folder, batches, *, most, lr, warmup, clip, weight_decay, adapt=None, beta=0.1, good=1.0, bad=1.0,
    group=None, through=False,
):  # fmt: skip
    """Losses, norms, z0s, final weights. `group` and `through` are how it is done wrongly: z0 of so many answers each,
    with a gradient through it."""
    found = read_labeled(file, folder, most)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model = (adapt(model) if adapt else model).double()
    start = copy.deepcopy(model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices, vectors = ([p for p in trained.values() if (p.ndim >= 2) is big] for big in (True, False))
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.999), eps=1e-8, foreach=False, fused=False)
    warm = math.ceil(warmup * len(batches))
    losses, norms, baselines = [], [], []

    def ratio(ids, at):
        with torch.no_grad():
            before = log_probability(start, ids, at)
        return log_probability(model, ids, at) - before

    for step, batch in enumerate(batches, start=1):
        cosine = 0.5 * (1 + math.cos(math.pi * (step - 1 - warm) / (len(batches) - warm)))
        for one in optimizer.param_groups:
            one["lr"] = lr * (step / warm if step <= warm else cosine)
        size = group or len(batch)
        total = 0.0
        for part in [batch[at : at + size] for at in range(0, len(batch), size)]:
            with torch.set_grad_enabled(through):
                z0 = (sum(ratio(found[i][1], found[i][2]) for i in part) / len(part)).clamp(min=0)
            for i in part:
                own, _, at, is_good = found[i]
                ahead = beta * (ratio(own, at) - z0)
                loss = good * (1 - sigma(ahead)) if is_good else bad * (1 - sigma(-ahead))
                (loss / len(batch)).backward(retain_graph=through)
                total += loss.item() / len(batch)
        norms.append(float(torch.nn.utils.clip_grad_norm_(list(trained.values()), clip)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        baselines.append(float(z0.detach()))
    return losses, norms, baselines, {name: p.detach().float() for name, p in trained.items()}
