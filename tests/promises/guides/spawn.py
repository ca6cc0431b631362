"""A raw torch script that spawns its own workers, as guides have it: `duoka launch spawn.py PORT FOLDER`."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class MyLargeModel(nn.Module):
    def __init__(self, vocab_size, hidden_size, num_layers):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.Sequential(*[nn.Linear(hidden_size, hidden_size) for _ in range(num_layers)])
        self.head = nn.Linear(hidden_size, vocab_size)

    def forward(self, inputs, labels):
        logits = self.head(self.layers(self.embed(inputs)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def setup(rank, world_size, port):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = port
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo", rank=rank, world_size=world_size)
    if on_gpu:
        torch.cuda.set_device(rank)


def cleanup():
    dist.destroy_process_group()


def train_worker(rank, world_size, model_args, train_args):
    setup(rank, world_size, train_args["port"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    torch.manual_seed(0)
    model = MyLargeModel(**model_args).to(device)
    ddp_model = DDP(model, device_ids=[rank] if on_gpu else None)
    data = torch.randint(0, model_args["vocab_size"], (21, 6))
    dataset = TensorDataset(data, data.roll(-1, 1))
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
    dataloader = DataLoader(dataset, batch_size=train_args["micro_batch_size"], sampler=sampler, pin_memory=on_gpu)
    optimizer = torch.optim.AdamW(ddp_model.parameters(), lr=train_args["learning_rate"])
    ddp_model.train()
    for epoch in range(train_args["num_epochs"]):
        sampler.set_epoch(epoch)
        for inputs, labels in dataloader:
            optimizer.zero_grad()
            loss = ddp_model(inputs.to(device), labels=labels.to(device))
            loss.backward()
            optimizer.step()
            if rank == 0:
                print(f"Epoch: {epoch}, Loss: {loss.item()}")
    with open(f"{train_args['folder']}/spawn-{rank}.txt", "w") as file:
        file.write(repr([float(p.sum()) for p in ddp_model.parameters()]))
    cleanup()


if __name__ == "__main__":
    world_size = torch.cuda.device_count() or 2
    model_args = {"vocab_size": 17, "hidden_size": 8, "num_layers": 2}
    train_args = {
        "micro_batch_size": 4, "learning_rate": 1e-2, "num_epochs": 2, "port": sys.argv[1], "folder": sys.argv[2]
    }  # fmt: skip
    mp.spawn(train_worker, args=(world_size, model_args, train_args), nprocs=world_size, join=True)
