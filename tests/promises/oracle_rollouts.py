"""Policy gradients as a plain float64 loop that shares no code with duoka: one answer at a time, unpadded, autograd.

It reads recorded answers as given, and writes them too. Formulas are written out of the papers, one line each.
"""

import copy
import json
import math
import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

STOP = 2  # <|im_end|> of the tiny tokenizer


def write_steps(folder, num_steps, *, groups=3, samples=4, seed=0):
    """Hand-made answers: of one token (the stop mark alone), cut ones, one without a reward, a group of equal ones,
    some in which a tool spoke."""
    dice = random.Random(seed)
    Path(folder).mkdir(parents=True)
    for number in range(num_steps):
        lines = []
        for group in range(groups):
            prompt = [dice.randrange(3, 250) for _ in range(dice.randint(2, 9))]
            for sample in range(samples):
                ended = dice.random() < 0.7
                ids = [dice.randrange(3, 250) for _ in range(dice.randint(0 if ended else 3, 11))] + [STOP] * ended
                if (group, sample) == (0, 1):
                    ids, ended = [STOP], True
                reward = round(dice.random(), 2)
                if (number, group) == (1, 2):
                    reward = 0.5
                if (group, sample) == (1, 2):
                    reward = None
                own = [not (sample == 3 and 1 <= at < len(ids) - 2) for at in range(len(ids))]
                more = {} if all(own) else {"own": own}
                lines.append({
                    **more,
                    "prompt": 10 * number + group, "sample": sample, "question": f"q{group}", "prompt_ids": prompt,
                    "ids": ids, "ended": ended, "text": "", "rewards": [reward],
                    "drawn": [dice.uniform(-7, -4) for _ in range(sum(own))],
                    "reward": reward, "faults": [],
                })  # fmt: skip
        head = {"version": 1, "step": number, "fingerprint": "by hand", "answers": len(lines)}
        text = "".join(json.dumps(line) + "\n" for line in [head, *lines])
        (Path(folder) / f"step-{number:08d}.jsonl").write_text(text)


def read_step(folder, number):
    text = (Path(folder) / f"step-{number:08d}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()[1:]]


def answer_logps(model, answer, temperature):
    """Of each of its tokens that the model drew, and the entropy there."""
    ids = torch.tensor([*answer["prompt_ids"], *answer["ids"]])
    logps = (model(input_ids=ids[None]).logits[0] / temperature).log_softmax(-1)
    start = len(answer["prompt_ids"])
    drawn = [start + at for at, own in enumerate(answer.get("own", [True] * len(answer["ids"]))) if own]
    entropy = sum(float(-(logps[at - 1].exp() * logps[at - 1]).sum().detach()) for at in drawn)
    return torch.stack([logps[at - 1, ids[at]] for at in drawn]), entropy


def advantages_of(answers, kind):
    """By place; an answer without a reward has none."""
    found = {}
    rewards = [a["reward"] for a in answers if a["reward"] is not None]
    for prompt in {a["prompt"] for a in answers}:
        group = [place for place, a in enumerate(answers) if a["prompt"] == prompt and a["reward"] is not None]
        r = torch.tensor([answers[place]["reward"] for place in group], dtype=torch.float64)
        if kind == "leave_one_out":
            values = [r[i] - (r.sum() - r[i]) / (len(r) - 1) for i in range(len(r))]
        elif kind == "group_std":
            values = (r - r.mean()) / (r.std() + 1e-4)
        else:
            values = r - r.mean()
        for place, value in zip(group, values, strict=True):
            found[place] = float(value)
    assert kind != "batch_std" or rewards
    if kind == "batch_std":
        spread = torch.tensor(list(found.values()), dtype=torch.float64).std()
        found = {place: value / float(spread + 1e-4) for place, value in found.items()}
    return found


# algorithm -> (advantage, what sums are divided by, form, (low, high))
ALGORITHMS = {
    "reinforce": ("center", "tokens", "plain", None),
    "rloo": ("leave_one_out", "sequences", "plain", None),
    "grpo": ("group_std", "answers", "clip", (0.2, 0.2)),
    "dr_grpo": ("center", "length", "clip", (0.2, 0.2)),
    "dapo": ("group_std", "tokens", "clip", (0.2, 0.28)),
    "gspo": ("group_std", "answers", "sequence", (3e-4, 4e-4)),
    "cispo": ("group_std", "tokens", "weight", (1.0, 0.28)),
}


def token_gains(form, clip, logps, old, advantage):
    """What each token of an answer adds to what is maximized."""
    ratio = (logps - old).exp()
    if form == "plain":
        return advantage * logps
    low, high = 1 - clip[0], 1 + clip[1]
    if form == "weight":
        return ratio.detach().clamp(low, high) * advantage * logps
    if form == "sequence":
        ratio = (logps - old).mean().exp().expand(len(logps))
    return torch.min(ratio * advantage, ratio.clamp(low, high) * advantage)


def note_ratios(seen, far, form, bounds, value, tokens):
    """`far`: by how much each token's log-probability has moved."""
    far = [sum(far) / len(far)] * len(far) if form == "sequence" else far
    seen["ratio"] += sum(map(math.exp, far)) / tokens
    seen["clip_low"] += sum(math.exp(one) < 1 - bounds[0] and value < 0 for one in far) / tokens
    seen["clip_high"] += sum(math.exp(one) > 1 + bounds[1] and value > 0 for one in far) / tokens


def weigh(seen, old, drawn, most, tokens):
    """Of each token, how much likelier it was to who trains than to who drew it."""
    weights = [min(math.exp(one - other), most) for one, other in zip(old.tolist(), drawn, strict=True)]
    seen["importance"] = seen.get("importance", 0.0) + sum(weights) / tokens
    return torch.tensor(weights, dtype=torch.float64)


def train(
    folder, replay, num_steps, algorithm, *, lr, warmup, clip, weight_decay, max_new_tokens, updates=1, kl=0.0,
    temperature=1.0, mask=False, advantage=None, normalize=None, ratio_clip=None, adapt=None, importance=None,
):  # fmt: skip
    """Losses, norms, final weights, and of each step the means over its tokens that are logged."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model = (adapt(model) if adapt else model).double()
    start = copy.deepcopy(model)
    kind, over, form, bounds = ALGORITHMS[algorithm]
    kind, over, bounds = advantage or kind, normalize or over, ratio_clip or bounds
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices, vectors = ([p for p in trained.values() if (p.ndim >= 2) is big] for big in (True, False))
    parts = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        [part for part in parts if part["params"]], lr=lr, betas=(0.9, 0.999), eps=1e-4, foreach=False, fused=False
    )
    warm, losses, norms, old, logged = math.ceil(warmup * num_steps), [], [], {}, []
    for step in range(1, num_steps + 1):
        answers = read_step(replay, (step - 1) // updates)
        values = advantages_of(answers, kind)
        if algorithm == "dapo":
            by_prompt = {}
            for place in values:
                by_prompt.setdefault(answers[place]["prompt"], set()).add(answers[place]["reward"])
            values = {at: v for at, v in values.items() if len(by_prompt[answers[at]["prompt"]]) > 1}
        if mask:
            values = {at: v for at, v in values.items() if answers[at]["ended"]}
        tokens, count = sum(len(answers[at]["drawn"]) for at in values), len(values)
        cosine = 0.5 * (1 + math.cos(math.pi * (step - 1 - warm) / (num_steps - warm)))
        for group in optimizer.param_groups:
            group["lr"] = lr * (step / warm if step <= warm else cosine)
        total, seen = 0.0, dict.fromkeys(("entropy", "ratio", "clip_low", "clip_high", "kl"), 0.0)
        for at, value in values.items():
            logps, entropy = answer_logps(model, answers[at], temperature)
            seen["entropy"] += entropy / tokens
            if (step - 1) % updates == 0:
                old[at] = logps.detach()
            gains = token_gains(form, bounds, logps, old[at], value)
            if importance:
                gains = gains * weigh(seen, old[at], answers[at]["drawn"], importance, tokens)
            if bounds:
                note_ratios(seen, (logps.detach() - old[at]).tolist(), form, bounds, value, tokens)
            if kl:
                with torch.no_grad():
                    apart, _ = answer_logps(start, answers[at], temperature)
                apart = apart - logps
                gains = gains - kl * (apart.exp() - apart - 1)
                seen["kl"] += float((apart.exp() - apart - 1).detach().sum()) / tokens
            divisor = {
                "tokens": tokens, "answers": count * len(logps), "sequences": count, "length": count * max_new_tokens
            }[over]  # fmt: skip
            loss = -gains.sum() / divisor
            loss.backward()
            total += loss.item()
        norms.append(float(torch.nn.utils.clip_grad_norm_(list(trained.values()), clip)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        logged.append(seen)
    return losses, norms, {name: p.detach().float() for name, p in trained.items()}, logged
