"""A raw torch script as DDP guides have it, without duoka. Started by `duoka launch --nproc 2 ddp.py FOLDER`."""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, random_split
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo")


def print_rank_0(info):
    if int(os.environ["RANK"]) == 0:
        print(info)


def collate_func(batch):
    return {"input": torch.stack([x for x, _ in batch]), "labels": torch.stack([y for _, y in batch])}


dice = torch.Generator().manual_seed(0)
dataset = [(torch.randn(4, generator=dice), torch.tensor(i % 2)) for i in range(110)]
trainset, validset = random_split(dataset, lengths=[0.9, 0.1], generator=torch.Generator().manual_seed(42))
trainloader = DataLoader(trainset, batch_size=32, collate_fn=collate_func, sampler=DistributedSampler(trainset))
validloader = DataLoader(validset, batch_size=64, collate_fn=collate_func, sampler=DistributedSampler(validset))
model = torch.nn.Linear(4, 2)
if torch.cuda.is_available():
    model = model.to(int(os.environ["LOCAL_RANK"]))
model = DDP(model)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)

for ep in range(2):
    model.train()
    trainloader.sampler.set_epoch(ep)
    for batch in trainloader:
        if torch.cuda.is_available():
            batch = {k: v.to(int(os.environ["LOCAL_RANK"])) for k, v in batch.items()}
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(batch["input"]), batch["labels"])
        loss.backward()
        optimizer.step()
    shown = loss.detach().clone()
    dist.all_reduce(shown, op=dist.ReduceOp.AVG)
    print_rank_0(f"ep: {ep}, loss: {shown.item()}")
    model.eval()
    acc_num = torch.zeros(())
    with torch.inference_mode():
        for batch in validloader:
            pred = torch.argmax(model(batch["input"]), dim=-1)
            acc_num += (pred.long() == batch["labels"].long()).float().sum()
    dist.all_reduce(acc_num)
    print_rank_0(f"ep: {ep}, acc: {(acc_num / len(validset)).item()}")

with open(f"{sys.argv[1]}/ddp-{os.environ['RANK']}.json", "w") as file:
    json.dump([float(p.sum()) for p in model.parameters()], file)
dist.destroy_process_group()
