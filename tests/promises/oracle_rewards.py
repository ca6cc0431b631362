"""A reward model as a plain float64 loop that shares no code with duoka: one answer at a time, unpadded, autograd."""

import json
import math

import torch
from oracle_pairs import read_pairs
from transformers import AutoModelForSequenceClassification


def train(file, folder, batches, *, lr, warmup, clip, weight_decay, adapt=None, centering=0.0):
    """Losses, norms, margins, final weights."""
    pairs = read_pairs(file, folder)
    asked = [json.loads(line).get("margin") or 0.0 for line in file.read_text(encoding="utf-8").splitlines()]
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", num_labels=1
    )
    torch.nn.init.zeros_(model.score.weight)
    model = (adapt(model) if adapt else model).double()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices, vectors = ([p for p in trained.values() if (p.ndim >= 2) is big] for big in (True, False))
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.999), eps=1e-8, foreach=False, fused=False)
    warm = math.ceil(warmup * len(batches))
    losses, norms, margins = [], [], []
    for step, batch in enumerate(batches, start=1):
        cosine = 0.5 * (1 + math.cos(math.pi * (step - 1 - warm) / (len(batches) - warm)))
        for group in optimizer.param_groups:
            group["lr"] = lr * (step / warm if step <= warm else cosine)
        total = margin = 0.0
        for i in batch:
            w, l = (model(input_ids=ids[None]).logits[0, 0] for ids, _ in pairs[i])  # noqa: E741
            loss = (-torch.log(1 / (1 + torch.exp(l + asked[i] - w))) + centering * (w + l) ** 2) / len(batch)
            loss.backward()
            total += loss.item()
            margin += float((w - l).detach()) / len(batch)
        norms.append(float(torch.nn.utils.clip_grad_norm_(list(trained.values()), clip)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        margins.append(margin)
    return losses, norms, margins, {name: p.detach().float() for name, p in trained.items()}
