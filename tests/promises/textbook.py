"""Optimizers by the formulas of their papers, one parameter at a time; they share no code with duoka."""

import math

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM


def newton_schulz(g):
    """Jordan et al. 2024, one matrix at a time."""
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / (torch.linalg.matrix_norm(x) + 1e-7)
    for _ in range(5):
        s = x @ x.T
        x = 3.4445 * x + (-4.7750 * s + 2.0315 * s @ s) @ x
    return x.T if g.shape[0] > g.shape[1] else x


class Plain:
    """One parameter's optimizer by the formulas of the papers; `kind` and `lr` are its own."""

    def __init__(self, kind, lr, decay):
        self.kind, self.lr, self.decay, self.t = kind, lr, decay, 0
        self.m = self.v = None

    def step(self, w, g, factor):
        self.t += 1
        lr = self.lr * factor
        if self.m is None:
            self.m, self.v = torch.zeros_like(w), torch.zeros_like(w)
        if self.kind == "muon":
            self.m = 0.95 * self.m + 0.05 * g
            move = newton_schulz(0.05 * g + 0.95 * self.m)
            return w - lr * self.decay * w - lr * math.sqrt(max(1.0, w.shape[0] / w.shape[1])) * move
        if self.kind == "lars":
            trust = 0.001 * w.norm() / (g.norm() + self.decay * w.norm()) if w.ndim >= 2 else 1.0
            self.m = 0.9 * self.m + lr * trust * (g + self.decay * w)
            return w - self.m
        self.m = 0.9 * self.m + 0.1 * g
        self.v = 0.999 * self.v + 0.001 * g * g
        move = (self.m / (1 - 0.9**self.t)) / ((self.v / (1 - 0.999**self.t)).sqrt() + 1e-8) + self.decay * w
        trust = w.norm() / move.norm() if self.kind == "lamb" and w.ndim >= 2 else 1.0
        return w - lr * trust * move


def textbook(model, name, micro_batches, rate, *, steps, lr, rest, decay, clip):
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    named = dict(lm.named_parameters())
    if name == "adafactor":
        groups = [
            {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": decay},
            {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
        ]
        library = torch.optim.Adafactor(groups, lr=lr)
    plain = {}
    for key, p in named.items():
        own = decay if p.ndim >= 2 else 0.0
        inner = ".layers." in key and p.ndim == 2
        if name == "muon":
            other = 0.01 if "embed" in key else rest
            plain[key] = Plain("muon", lr, own) if inner else Plain("adamw", other, own)
        else:
            plain[key] = Plain(name, {"lars": 2.0, "adamw": rest}.get(name, lr), own)
    for step in range(1, steps + 1):
        for rows in micro_batches(step):
            logits = lm(rows[:, :-1]).logits
            (F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum") / (2 * 12 * 16)).backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), clip)
        with torch.no_grad():
            if name == "adafactor":
                for group in library.param_groups:
                    group["lr"] = lr * rate(step)
                library.step()
            else:
                for key, p in named.items():
                    p.copy_(plain[key].step(p, p.grad, rate(step)))
        lm.zero_grad()
    return {key: p.detach() for key, p in named.items()}


def textbook_of_adapters(
    model, start, micro_batches, rate, *, steps, lr, decay, clip, b_ratio, scale=12 / 4, smoothing=0.1
):
    """Muon on both matrices of each adapter, added to the weight they belong to; `start` by PEFT's names."""
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    base = {name: p.detach() for name, p in lm.named_parameters()}
    trained = {name: value.clone().requires_grad_() for name, value in start.items()}
    plain = {name: Plain("muon", lr * (b_ratio if ".lora_B." in name else 1), decay) for name in trained}
    downs = [name for name in trained if ".lora_A." in name]
    for step in range(1, steps + 1):
        for rows in micro_batches(step):
            merged = dict(base)
            for name in downs:
                key = name.removeprefix("base_model.model.").replace(".lora_A.default", "")
                merged[key] = base[key] + scale * trained[name.replace("lora_A", "lora_B")] @ trained[name]
            logits = torch.func.functional_call(lm, merged, (rows[:, :-1],)).logits.flatten(0, 1)
            targets = rows[:, 1:].flatten()
            loss = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
            (loss / (2 * 12 * 16)).backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), clip)
        with torch.no_grad():
            for name, p in trained.items():
                p.copy_(plain[name].step(p, p.grad, rate(step)))
                p.grad = None
    return {name: p.detach() for name, p in trained.items()}
