"""Preference training as a plain float64 loop that shares no code with duoka: one answer at a time, unpadded, autograd.

It takes the order of pairs as given. Formulas are written out of the papers, one line each.
"""

import copy
import json
import math
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def read_pairs(file, folder):
    """((ids, first answer token) of the better and of the worse answer) of every record, by writing ChatML by hand."""
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def tokens(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    pairs = []
    for line in Path(file).read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        head = tokens(f"<|im_start|>user\n{record['prompt']}<|im_end|>\n<|im_start|>assistant\n")
        sides = [head + tokens(record[side] + "<|im_end|>") + tokens("\n") for side in ("chosen", "rejected")]
        pairs.append([(torch.tensor(ids), len(head)) for ids in sides])
    return pairs


def answer_logps(model, ids, start):
    """log p of each token of the answer and its end mark; the line's end behind it is not learned."""
    logps = model(input_ids=ids[None]).logits[0].log_softmax(-1)
    return torch.stack([logps[at - 1, ids[at]] for at in range(start, len(ids) - 1)])


def sigma(x):
    return 1 / (1 + torch.exp(-x))


def loss_of(kind, w, l, w0, l0, *, beta=0.1, epsilon=0.0, gamma=0.5, alpha=1.0):  # noqa: E741
    """One pair's loss from log-probabilities of tokens: of both answers, and of both under the reference."""
    m = min(len(w), len(l))
    s_w, s_l, s0_w, s0_l = (one[:m].sum() + alpha * one[m:].sum() for one in (w, l, w0, l0))
    r_w, r_l = s_w - s0_w, s_l - s0_l
    a_w, a_l = w.mean(), l.mean()
    delta = r_w - r_l
    formulas = {
        "sigmoid": lambda: -(1 - epsilon) * sigma(beta * delta).log() - epsilon * sigma(-beta * delta).log(),
        "robust": lambda: (
            (-(1 - epsilon) * sigma(beta * delta).log() + epsilon * sigma(-beta * delta).log()) / (1 - 2 * epsilon)
        ),
        "hinge": lambda: (1 - beta * delta).clamp(min=0),
        "ipo": lambda: ((a_w - w0.mean()) - (a_l - l0.mean()) - 1 / (2 * beta)) ** 2,
        "apo_zero": lambda: 1 - sigma(beta * r_w) + sigma(beta * r_l),
        "apo_down": lambda: sigma(beta * r_w) + 1 - sigma(beta * (r_w - r_l)),
        "simpo": lambda: -sigma(beta * (a_w - a_l) - gamma).log(),
        "cpo": lambda: -sigma(beta * (w.sum() - l.sum())).log(),
        "orpo": lambda: -beta * sigma((a_w - a_l) - ((1 - a_w.exp()).log() - (1 - a_l.exp()).log())).log(),
    }
    return formulas[kind]()


def train(
    file, folder, batches, kind, *, lr, warmup, clip, weight_decay, adapt=None, sft=0.0, over="sequences", **more
):
    """Losses, norms, margins, final weights. `sft`: how much -log p of the better answer counts, `over` what."""
    pairs = read_pairs(file, folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model = (adapt(model) if adapt else model).double()
    start = copy.deepcopy(model)
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
        tokens = sum(len(pairs[i][0][0]) - 1 - pairs[i][0][1] for i in batch)
        total = margin = 0.0
        for i in batch:
            w, l = (answer_logps(model, *side) for side in pairs[i])  # noqa: E741
            with torch.no_grad():
                w0, l0 = (answer_logps(start, *side) for side in pairs[i])
            nll = -w.mean() / len(batch) if over == "sequences" else -w.sum() / tokens
            loss = loss_of(kind, w, l, w0, l0, **more) / len(batch) + sft * nll
            loss.backward()
            total += loss.item()
            margin += float((w.sum() - w0.sum() - l.sum() + l0.sum()).detach()) / len(batch)
        norms.append(float(torch.nn.utils.clip_grad_norm_(list(trained.values()), clip)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        margins.append(margin)
    return losses, norms, margins, {name: p.detach().float() for name, p in trained.items()}
