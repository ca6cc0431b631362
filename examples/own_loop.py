"""A loop of your own on duoka's engine: exact over any number of processes, saved, resumed, measured.

    python examples/own_loop.py --model demo                      # one process
    duoka launch --nproc 2 examples/own_loop.py --model demo      # two; add --strategy zero3 to share the model

Stop it and start it again: it goes on where it was. Prints the loss of each step, the same on any number of processes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from duoka import Accelerator
from duoka.config.schema import ModelConfig
from duoka.hub.models import model_folder

TEXTS = [f"{n} times {m} is {n * m}." + " That is easy." * (n % 4) for n in range(1, 9) for m in range(1, 9)]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--model", default="demo", help="a folder, a Hub id, or demo")
    options.add_argument("--strategy", default=None)
    options.add_argument("--epochs", type=int, default=1)
    options.add_argument("--batch", type=int, default=8, help="samples of one step, over all processes")
    options.add_argument("--output", default="runs/own-loop")
    args = options.parse_args()

    # The batch size is that of all processes together, so that results don't depend on their number.
    accelerator = Accelerator(
        2, log_with="tensorboard", project_dir=args.output, strategy=args.strategy, split_batches=True
    )
    accelerator.init_trackers("loop", vars(args))
    train, held_out, model = build(args.model, args.batch // accelerator.gradient_accumulation_steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    model, optimizer, train, held_out = accelerator.prepare(model, optimizer, train, held_out)
    if (Path(args.output) / "checkpoints").is_dir():
        accelerator.load_state()

    for epoch in range(train.epoch, args.epochs):
        model.train()
        total = torch.zeros(2, device=accelerator.device)  # loss, targets
        for batch in train:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                num_targets = (batch["labels"][:, 1:] != -100).sum()
                # `loss` is the mean over so many tokens: said, the step is exact whatever the lengths are.
                accelerator.backward(loss, mean_over=num_targets)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            # Gathered for metrics, not reduced: what fills up an epoch's last batch is left out.
            total += accelerator.gather_for_metrics(torch.stack([loss.detach() * num_targets, num_targets])[None]).sum(
                0
            )
            if accelerator.sync_gradients:
                loss_sum, targets = total.tolist()
                accelerator.print(f"epoch {epoch}  step {accelerator.step:4d}  loss {loss_sum / targets:.5f}")
                accelerator.log({"loss": loss_sum / targets}, accelerator.step)
                total.zero_()
        accelerator.save_state()
        accelerator.print(f"epoch {epoch}  held out: loss {measure(accelerator, model, held_out):.5f}")
    accelerator.save_model(model, Path(args.output) / "model")
    accelerator.end_training()


@torch.no_grad()
def measure(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader) -> float:
    """Each held-out text once, on any number of processes."""
    model.eval()
    losses = []
    for batch in loader:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        token_losses = torch.nn.functional.cross_entropy(
            logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:], reduction="none"
        )
        counts = (batch["labels"][:, 1:] != -100).sum(1)
        losses.append(accelerator.gather_for_metrics(torch.stack([token_losses.sum(1), counts], dim=1)))
    loss_sum, targets = torch.cat(losses).sum(0).tolist()
    return loss_sum / targets


def build(name: str, batch_size: int) -> tuple[DataLoader, DataLoader, torch.nn.Module]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = model_folder(ModelConfig(name=name), Path())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def collate(texts: list[str]) -> dict[str, torch.Tensor]:
        rows = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        labels = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, -100)
        return {"input_ids": rows["input_ids"], "attention_mask": rows["attention_mask"], "labels": labels}

    train = DataLoader(TEXTS[4:], batch_size=batch_size, shuffle=True, collate_fn=collate)
    return train, DataLoader(TEXTS[:4], batch_size=batch_size, collate_fn=collate), model


if __name__ == "__main__":
    main()
