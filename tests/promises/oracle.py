"""A plain training loop that shares no code with duoka: one conversation at a time, torch's own AdamW.

It takes the order of samples as given and computes all else itself: text, tokens, targets, loss, clipping, rate.
"""

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer


def read_samples(file, folder):
    """(token ids, target mask) of every conversation, by writing ChatML by hand."""
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def tokens(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    samples = []
    for line in Path(file).read_text(encoding="utf-8").splitlines():
        ids, mask = [], []
        for message in json.loads(line)["messages"]:
            answers = message["role"] == "assistant"
            head = tokens(f"<|im_start|>{message['role']}\n")
            body = tokens(message["content"] + "<|im_end|>")
            ids += head + body + tokens("\n")
            mask += [False] * len(head) + [answers] * len(body) + [False]
        samples.append((torch.tensor(ids), torch.tensor(mask)))
    return samples


def train(file, folder, batches, *, lr, warmup, clip, weight_decay, mean_of_halves=False, adapt=None, gradients=None):
    """(losses, norms, rates, final weights) of fine-tuning over `batches` of sample numbers.

    `adapt` puts adapters into the model, which are then all that is trained. `gradients` gets those of the first step.
    """
    samples = read_samples(file, folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model = adapt(model) if adapt else model
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices = [p for p in trained.values() if p.ndim >= 2]
    vectors = [p for p in trained.values() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.999), eps=1e-8, foreach=False, fused=False)
    losses, norms, rates = [], [], []
    warm = math.ceil(warmup * len(batches))
    for step, batch in enumerate(batches, start=1):
        rate = (
            lr * step / warm
            if step <= warm
            else lr * 0.5 * (1 + math.cos(math.pi * (step - 1 - warm) / (len(batches) - warm)))
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        targets = {i: sum(int(samples[j][1][1:].sum()) for j in batch) for i in batch}
        if mean_of_halves:  # the mistake that duoka promises not to make
            for half in (batch[: len(batch) // 2], batch[len(batch) // 2 :]):
                targets.update(dict.fromkeys(half, 2 * sum(int(samples[j][1][1:].sum()) for j in half)))
        total = 0.0
        for i in batch:
            ids, mask = samples[i]
            logits = model(ids[None]).logits[0, :-1]
            loss = F.cross_entropy(logits[mask[1:]], ids[1:][mask[1:]], reduction="sum") / targets[i]
            loss.backward()
            total += loss.item()
        if gradients is not None and step == 1:
            gradients.update({name: p.grad.clone() for name, p in trained.items()})
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        rates.append(rate)
    return losses, norms, rates, {name: p.detach() for name, p in trained.items()}
