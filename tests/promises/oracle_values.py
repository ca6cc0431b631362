"""PPO with a value head as a plain float64 loop that shares no code with duoka: one answer at a time, autograd.

GAE is the sum that the paper defines it by (1506.02438, equation 16), not the recursion.
"""

import math

import torch
from oracle_rollouts import read_step
from transformers import AutoModelForCausalLM


def look(model, head, answer, temperature):
    """Of each token that was drawn: its log-probability, and the value of what stands before it."""
    ids, start = torch.tensor([*answer["prompt_ids"], *answer["ids"]]), len(answer["prompt_ids"])
    out = model(input_ids=ids[None], output_hidden_states=True)
    rows = out.hidden_states[-1][0, start - 1 : -1]
    logps = (out.logits[0, start - 1 : -1] / temperature).log_softmax(-1)
    drawn = torch.tensor(answer.get("own", [True] * len(answer["ids"])))
    return logps.gather(1, ids[start:, None]).squeeze(1)[drawn], (rows @ head[0] + head[1])[drawn]


def gae(values, reward, gamma, lam):
    n, v = len(values), [*values, 0.0]
    delta = [(reward if t == n - 1 else 0.0) + gamma * v[t + 1] - v[t] for t in range(n)]
    return [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)]


def train(folder, replay, num_steps, *, lr, warmup, clip, weight_decay, updates, gamma=1.0, lam=0.95, weight=0.1,
          value_clip=0.2, whiten=True, temperature=1.0, mask=False, adapt=None):  # fmt: skip
    """Losses, norms, final weights with the head's, and each step's mean loss of the values."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model = (adapt(model) if adapt else model).double()
    head = [torch.zeros(model.config.hidden_size, dtype=torch.double), torch.zeros((), dtype=torch.double)]
    head = [one.requires_grad_() for one in head]
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    big = [p for p in trained.values() if p.ndim >= 2] + head[:1]
    small = [p for p in trained.values() if p.ndim < 2] + head[1:]
    optimizer = torch.optim.AdamW(
        [{"params": big, "weight_decay": weight_decay}, {"params": small, "weight_decay": 0.0}],
        lr=lr, betas=(0.9, 0.999), eps=1e-4, foreach=False, fused=False,
    )  # fmt: skip
    warm, losses, norms, missed_by = math.ceil(warmup * num_steps), [], [], []
    for step in range(1, num_steps + 1):
        answers = [a for a in read_step(replay, (step - 1) // updates) if a["reward"] is not None]
        answers = [a for a in answers if a["ended"] or not mask]
        if (step - 1) % updates == 0:
            with torch.no_grad():
                old = [look(model, head, a, temperature) for a in answers]
            worth = [gae(v.tolist(), a["reward"], gamma, lam) for a, (_, v) in zip(answers, old, strict=True)]
            returns = [torch.tensor(g, dtype=torch.double) + v for g, (_, v) in zip(worth, old, strict=True)]
            every = torch.tensor([g for gains in worth for g in gains], dtype=torch.double)
            mean, spread = (every.mean(), every.std() + 1e-4) if whiten else (0.0, 1.0)
        tokens = sum(len(a["drawn"]) for a in answers)
        cosine = 0.5 * (1 + math.cos(math.pi * (step - 1 - warm) / (num_steps - warm)))
        for group in optimizer.param_groups:
            group["lr"] = lr * (step / warm if step <= warm else cosine)
        total, missed_total = 0.0, 0.0
        for a, (old_logps, old_values), gains, target in zip(answers, old, worth, returns, strict=True):
            logps, values = look(model, head, a, temperature)
            advantage = (torch.tensor(gains, dtype=torch.double) - mean) / spread
            ratio = (logps - old_logps).exp()
            gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum() / tokens
            missed = (values - target) ** 2
            if value_clip:
                near = torch.min(torch.max(values, old_values - value_clip), old_values + value_clip)
                missed = torch.max(missed, (near - target) ** 2)
            missed = missed.sum() / 2 / tokens
            loss = weight * missed - gain
            loss.backward()
            total, missed_total = total + loss.item(), missed_total + missed.item()
        norms.append(float(torch.nn.utils.clip_grad_norm_([*trained.values(), *head], clip)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        missed_by.append(missed_total)
    weights = {name: p.detach().float() for name, p in trained.items()}
    for name, tensor in zip(("weight", "bias"), head, strict=True):
        weights[f"v_head.summary.{name}"] = tensor.detach().float()[None]
    return losses, norms, weights, missed_by
