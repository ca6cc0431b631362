"""What processes of the tests of the verbs run: each function is called on every rank, and writes what it saw."""

import json
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset

NUM_SAMPLES, VOCABULARY = 22, 13


def write(folder, name, rank, value):
    (Path(folder) / f"{name}-{rank}.json").write_text(json.dumps(value))


class Words(torch.utils.data.Dataset):
    """Rows of 1 to 9 tokens, of which some are targets."""

    def __init__(self, count=NUM_SAMPLES):
        dice = torch.Generator().manual_seed(5)
        lengths = torch.randint(2, 10, (count,), generator=dice).tolist()
        self.rows = [torch.randint(0, VOCABULARY, (length,), generator=dice) for length in lengths]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def collate(rows):
    longest = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    labels = torch.full((len(rows), longest), -100)
    for at, row in enumerate(rows):
        ids[at, : len(row)] = row
        labels[at, : len(row)] = (row * 3 + 1) % VOCABULARY
    return {"ids": ids, "labels": labels}


class Small(torch.nn.Module):
    """A stack of blocks between an embedding and a head; sizes that two ranks cannot share evenly."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, 7)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(7, 7) for _ in range(2))
        self.dropout = torch.nn.Dropout(dropout)
        self.head = torch.nn.Linear(7, VOCABULARY)

    def forward(self, ids):
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = hidden + self.dropout(torch.tanh(block(hidden)))
        return self.head(hidden)


def build(seed=1, dropout=0.0, kind=torch.optim.AdamW):
    torch.manual_seed(seed)
    model = Small(dropout)
    return model, kind(model.parameters(), lr=0.03)


def whole_gradients(model):
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {name: (g.full_tensor() if hasattr(g, "full_tensor") else g).tolist() for name, g in grads.items()}


class Stream(IterableDataset):
    def __init__(self, items):
        self.items = list(items)

    def __iter__(self):
        return iter(self.items)


# ------------------------------------------------------------------------------------------------ losses


def count_over(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)


def train_counted(accelerator, form, batch_size, epochs=2):
    """The taught loop with counted losses: (losses, weights, gradients of the first step, norms)."""
    model, optimizer = build()
    loader = DataLoader(Words(), batch_size=batch_size, shuffle=True, collate_fn=collate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader, scheduler, optimizer, model = accelerator.prepare(loader, scheduler, optimizer, model)
    first, norms = None, []
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                logits = model(batch["ids"])
                loss, count = count_over(logits, batch["labels"]), (batch["labels"] != -100).sum()
                if form == "sum":
                    accelerator.backward(loss, sum_over=count)
                else:
                    accelerator.backward(loss / count, mean_over=int(count))
                if accelerator.sync_gradients:
                    first = first or whole_gradients(accelerator.unwrap_model(model))
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.7)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    state = {name: tensor.tolist() for name, tensor in accelerator.get_state_dict(model).items()}
    # Of sharded weights rank 0 alone holds them whole.
    assert bool(state) == (accelerator.is_main_process or accelerator.distributed_type.value != "FSDP")
    return {"first": first, "norms": norms, "state": state, "steps": accelerator.step, "lr": scheduler.get_last_lr()}


def train_plain(accelerator, batch_size):
    """The taught loop as guides have it: a mean per batch."""
    model, optimizer = build(kind=torch.optim.SGD)
    loader = DataLoader(Words(), batch_size=batch_size, shuffle=True, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    first = None
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                sums = model(batch["ids"])[:, 0].square().sum(1)  # one number for each sample
                accelerator.backward(sums.mean())
                if accelerator.sync_gradients:
                    first = first or whole_gradients(accelerator.unwrap_model(model))
                optimizer.step()
                optimizer.zero_grad()
    state = {name: tensor.tolist() for name, tensor in accelerator.get_state_dict(model).items()}
    return {"first": first, "state": state}


LOST = 2  # the step at which the scale is far too high


def train_with_scaler(strategy, precision):
    """Two optimizers of one loss, a scale that grows with every step, and once one that overflows."""
    from duoka import Accelerator
    from duoka.parallel.precision import Numerics

    accelerator = Accelerator(strategy=strategy, seed=3)
    # A CPU is told to compute in something else; the arithmetic is the GPU's.
    accelerator.layout = replace(accelerator.layout, precision=precision)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1, enabled=precision == "fp16")
    accelerator.numerics = Numerics(precision, scaler)
    torch.manual_seed(1)
    model = Small()
    inside = [*model.blocks.parameters()]
    around = [*model.embed.parameters(), *model.head.parameters()]
    optimizers = [torch.optim.SGD(part, lr=0.5) for part in (inside, around)]  # an Adam's steps know no scale
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 1, 0.9)
    loader = DataLoader(Words(), batch_size=4, shuffle=True, collate_fn=collate)
    model, *optimizers, scheduler, loader = accelerator.prepare(model, *optimizers, scheduler, loader)
    seen = {"norms": [], "skipped": [], "unchanged": []}
    for _ in range(2):
        for batch in loader:
            at = len(seen["norms"])
            if at == LOST and scaler.is_enabled():
                accelerator.scaler._scale.fill_(1e38)
            loss, count = count_over(model(batch["ids"]), batch["labels"]), (batch["labels"] != -100).sum()
            accelerator.backward(loss, sum_over=count)
            seen["norms"].append(float(accelerator.clip_grad_norm_(model.parameters(), 0.8)))
            before = {name: tensor.clone() for name, tensor in accelerator.get_state_dict(model).items()}
            for optimizer in optimizers if at != LOST or scaler.is_enabled() else ():
                optimizer.step()
            after = accelerator.get_state_dict(model)
            seen["unchanged"].append(all(torch.equal(before[name], after[name]) for name in before))
            seen["skipped"].append(
                bool(accelerator.optimizer_step_was_skipped) or (not scaler.is_enabled() and at == LOST)
            )
            if not seen["skipped"][-1]:
                scheduler.step()
            elif scaler.is_enabled():
                scheduler.step()  # knows by itself
                accelerator.scaler._scale.fill_(256.0)
            for optimizer in optimizers:
                optimizer.zero_grad()
    state = {name: tensor.tolist() for name, tensor in accelerator.get_state_dict(model).items()}
    scale = accelerator.scaler.get_scale()
    accelerator.free_memory()
    return {**seen, "state": state, "lr": scheduler.get_last_lr(), "scale": scale}


def train_cases(cases, folder):
    from duoka import Accelerator

    for name, (strategy, steps, form, batch_size, precision) in cases.items():
        accelerator = Accelerator(steps, precision, strategy=strategy, seed=3)
        seen = train_plain(accelerator, batch_size) if form == "plain" else train_counted(accelerator, form, batch_size)
        write(folder, name, accelerator.process_index, seen)
        accelerator.free_memory()
    if accelerator.num_processes == 2:
        for strategy in ("ddp", "zero1", "fsdp"):
            for precision in ("fp16", "fp32"):
                found = train_with_scaler(strategy, precision)
                write(folder, f"{strategy} scaled {precision}", accelerator.process_index, found)


# --------------------------------------------------------------------------------------------- evaluation


def loaders_over(accelerator, count, batch_size):
    """Every kind of loader over samples 0..count-1, by name."""
    from duoka import Accelerator

    numbers = torch.arange(count)
    own = numbers[accelerator.process_index :: accelerator.num_processes].tolist()
    dispatching = Accelerator(dispatch_batches=True)
    yield "map", accelerator, accelerator.prepare(DataLoader(numbers, batch_size=batch_size))
    yield "iterable", accelerator, accelerator.prepare(DataLoader(Stream(numbers.tolist()), batch_size=batch_size))
    yield "dispatched", dispatching, dispatching.prepare(DataLoader(Stream(numbers.tolist()), batch_size=batch_size))
    sharded = DataLoader(Stream(own), batch_size=batch_size)
    yield "sharded", accelerator, accelerator.prepare_data_loader(sharded, own_items=True)
    batches = [list(range(at, min(at + batch_size - 1, count))) for at in range(0, count, batch_size - 1)]
    yield "batches", accelerator, accelerator.prepare(DataLoader(numbers, batch_sampler=batches))


def evaluate_all(counts, folder):
    """What gather_for_metrics gives over every loader, for each number of samples: nested, with objects, in order."""
    from duoka import Accelerator

    accelerator = Accelerator()
    wrong = []
    for count in counts:
        for name, verbs, loader in loaders_over(accelerator, count, batch_size=3 if count < 20 else 16):
            numbers, words, squares = [], [], []
            for batch in loader:
                nested = {"n": batch, "more": (batch.float() ** 2, [f"sample {int(i)}" for i in batch])}
                got = verbs.gather_for_metrics(nested)
                numbers += got["n"].tolist()
                squares += got["more"][0].tolist()
                words += got["more"][1]
            in_order = name not in ("sharded",)
            expected = list(range(count))
            seen = numbers if in_order else sorted(numbers)
            if seen != expected or words != [f"sample {i}" for i in numbers] or squares != [i * i for i in numbers]:
                wrong.append([name, count, numbers])
    write(folder, "evaluate", accelerator.process_index, {"wrong": wrong, "size": accelerator.num_processes})


# ------------------------------------------------------------------------------------------------- resume


class Counter:
    """Somebody's own object: it is saved without a pickle."""

    def __init__(self):
        self.seen = {"numbers": [], 3: torch.zeros(2)}

    def state_dict(self):
        return self.seen

    def load_state_dict(self, state):
        self.seen = state


def make_loop(accelerator, kind="adamw", streams=False):
    import random

    import numpy as np

    random.seed(accelerator.process_index)
    np.random.seed(accelerator.process_index)
    model, optimizer = build(dropout=0.3, kind={"adamw": torch.optim.AdamW, "sgd": momentum}[kind])
    data = Stream([(i, row) for i, row in enumerate(Words())]) if streams else [*enumerate(Words())]
    loader = DataLoader(data, batch_size=2, shuffle=not streams, collate_fn=with_numbers)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=40)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    torch.manual_seed(100 + accelerator.process_index)  # each rank its own dropout
    return model, optimizer, loader, schedule, counter


def momentum(parameters, lr):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def with_numbers(items):
    return collate([row for _, row in items]) | {"numbers": torch.tensor([number for number, _ in items])}


def walk(accelerator, loop, batches, log, save_at=None, folder=None):
    """The taught loop's body over `batches`; saves after step `save_at` and tells so."""
    import random

    model, optimizer, _, schedule, counter = loop
    for batch in batches:
        with accelerator.accumulate(model):
            loss = count_over(model(batch["ids"]), batch["labels"])
            accelerator.backward(loss, sum_over=(batch["labels"] != -100).sum())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        numbers = accelerator.gather_for_metrics(batch["numbers"]).tolist()
        counter.seen["numbers"] = [*counter.seen["numbers"], *numbers]
        counter.seen[3] = counter.seen[3] + 1
        log.append([accelerator.step, float(accelerator.reduce(loss, "sum")), numbers, random.random()])
        if accelerator.sync_gradients and accelerator.step == save_at:
            accelerator.save_state(f"{folder}/step_{save_at}")
            accelerator.save_model(model, f"{folder}/step_{save_at}/model")
            return True
    return False


def resume_by_itself(accelerator, folder, log, **options):
    loop = make_loop(accelerator, **options)
    accelerator.load_state(folder)
    loader = loop[2]
    for _ in range(loader.epoch, 2):
        walk(accelerator, loop, loader, log)
    return loop


def resume_as_guides_do(accelerator, folder, log):
    """The arithmetic of the guides, line by line."""
    import math

    loop = make_loop(accelerator)
    loader = loop[2]
    accelerator.load_state(folder)
    steps_per_epoch = math.ceil(len(loader) / accelerator.gradient_accumulation_steps)
    resume_step = int(folder.split("step_")[-1])
    resume_epoch = resume_step // steps_per_epoch
    resume_step -= resume_epoch * steps_per_epoch
    for epoch in range(resume_epoch, 2):
        if epoch == resume_epoch and resume_step != 0:
            active = accelerator.skip_first_batches(loader, resume_step * accelerator.gradient_accumulation_steps)
        else:
            active = loader
        walk(accelerator, loop, active, log)
    return loop


def unbroken(accelerator, folder, save_at, log, **options):
    loop = make_loop(accelerator, **options)
    for _ in range(2):
        if walk(accelerator, loop, loop[2], log, save_at, folder):
            break
    return loop


def outcome(accelerator, loop, log):
    state = {name: tensor.tolist() for name, tensor in accelerator.get_state_dict(loop[0]).items()}
    counter = {str(key): value if isinstance(value, list) else value.tolist() for key, value in loop[4].seen.items()}
    return {"log": log, "state": state, "counter": counter}


def resume_all(jobs, folder):
    """(name, what, strategy, step to save at or folder to go on from, options) in turn, each with its Accelerator."""
    from duoka import Accelerator

    for name, what, strategy, place, options in jobs:
        accelerator = Accelerator(2, strategy=strategy)
        log = []
        if what == "run":
            loop = unbroken(accelerator, folder, place, log, **options)
        elif what == "guides":
            loop = resume_as_guides_do(accelerator, f"{folder}/{place}", log)
        else:
            loop = resume_by_itself(accelerator, f"{folder}/{place}", log, **options)
        write(folder, name, accelerator.process_index, outcome(accelerator, loop, log))
        accelerator.free_memory()
