"""The loops that guides for Accelerate and for the nested YAML teach, call by call, with duoka's names imported.

Each function is one guide's script; `prepare_dataloader` and `prepare_model_and_optimizer` are our own small ones.
"""

import math

import torch
from torch.utils.data import DataLoader

from duoka import Accelerator


def prepare_dataloader(num_train=37, num_valid=19):
    dice = torch.Generator().manual_seed(0)

    def rows(count):
        lengths = torch.randint(3, 9, (count,), generator=dice).tolist()
        return [(torch.randint(5, 30, (length,), generator=dice), i % 2) for i, length in enumerate(lengths)]

    def collate_func(batch):
        ids = torch.nn.utils.rnn.pad_sequence([row for row, _ in batch], batch_first=True)
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor([y for _, y in batch])}

    trainloader = DataLoader(rows(num_train), batch_size=4, collate_fn=collate_func, shuffle=True)
    validloader = DataLoader(rows(num_valid), batch_size=8, collate_fn=collate_func, shuffle=False)
    return trainloader, validloader


def prepare_model_and_optimizer(seed=0, peft=False):
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    model = BertForSequenceClassification(BertConfig(vocab_size=31, max_position_embeddings=16, **sizes))
    if peft:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"]))
    return model, torch.optim.Adam(model.parameters(), lr=2e-3)


def evaluate(model, validloader, accelerator: Accelerator):
    model.eval()
    acc_num, seen = 0, 0
    with torch.inference_mode():
        for batch in validloader:
            output = model(**batch)
            pred = torch.argmax(output.logits, dim=-1)
            pred, refs = accelerator.gather_for_metrics((pred, batch["labels"]))
            seen += len(refs)
            acc_num += (pred.long() == refs.long()).float().sum()
    assert seen == len(validloader.dataset), f"{seen} samples of {len(validloader.dataset)}"
    return acc_num / len(validloader.dataset)


def train_basic(accelerator: Accelerator, epoch=2, log_step=3):
    """Guide section 1: four lines changed."""
    trainloader, validloader = prepare_dataloader()
    model, optimizer = prepare_model_and_optimizer()
    model, optimizer, trainloader, validloader = accelerator.prepare(model, optimizer, trainloader, validloader)
    global_step, accs = 0, []
    for ep in range(epoch):
        model.train()
        for batch in trainloader:
            optimizer.zero_grad()
            output = model(**batch)
            loss = output.loss
            accelerator.backward(loss)
            optimizer.step()
            if global_step % log_step == 0:
                loss = accelerator.reduce(loss, "mean")
                accelerator.print(f"ep: {ep}, global_step: {global_step}, loss: {loss.item()}")
            global_step += 1
        acc = evaluate(model, validloader, accelerator)
        accelerator.print(f"ep: {ep}, acc: {acc}")
        accs.append(float(acc))
    assert all(0 <= acc <= 1 for acc in accs)
    weights = accelerator.get_state_dict(model)
    return {"steps": global_step, "sum": {name: float(t.double().sum()) for name, t in weights.items()}}


def train_advanced(accelerator: Accelerator, resume=None, epoch=2, log_step=1, stop_at=None, peft=False):
    """Guide section 2: accumulation, trackers, saving both ways, and going on with skip_first_batches."""
    accelerator.init_trackers(project_name="runs")
    trainloader, validloader = prepare_dataloader()
    model, optimizer = prepare_model_and_optimizer(peft=peft)
    model, optimizer, trainloader, validloader = accelerator.prepare(model, optimizer, trainloader, validloader)
    global_step, resume_step, resume_epoch, losses = 0, 0, 0, []
    if resume is not None:
        accelerator.load_state(resume)
        steps_per_epoch = math.ceil(len(trainloader) / accelerator.gradient_accumulation_steps)
        resume_step = global_step = int(resume.split("step_")[-1])
        resume_epoch = resume_step // steps_per_epoch
        resume_step -= resume_epoch * steps_per_epoch
        accelerator.print(f"resume from checkpoint -> {resume}")
    for ep in range(resume_epoch, epoch):
        model.train()
        if resume and ep == resume_epoch and resume_step != 0:
            active_dataloader = accelerator.skip_first_batches(
                trainloader, resume_step * accelerator.gradient_accumulation_steps
            )
        else:
            active_dataloader = trainloader
        for batch in active_dataloader:
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                output = model(**batch)
                loss = output.loss
                accelerator.backward(loss)
                optimizer.step()
                if accelerator.sync_gradients:
                    global_step += 1
                    if global_step % log_step == 0:
                        loss = accelerator.reduce(loss, "mean")
                        accelerator.print(f"ep: {ep}, global_step: {global_step}, loss: {loss.item()}")
                        accelerator.log({"loss": loss.item()}, global_step)
                        losses.append(loss.item())
                    if global_step == stop_at:
                        save_both_ways(accelerator, model, global_step)
                        accelerator.end_training()
                        return {"losses": losses, "steps": global_step}
        evaluate(model, validloader, accelerator)
    accelerator.end_training()
    return {"losses": losses, "steps": global_step}


def save_both_ways(accelerator, model, global_step):
    accelerator.save_model(model, accelerator.project_dir + f"/step_{global_step}/way1")
    accelerator.unwrap_model(model).save_pretrained(
        save_directory=accelerator.project_dir + f"/step_{global_step}/model",
        is_main_process=accelerator.is_main_process,
        state_dict=accelerator.get_state_dict(model),
        save_func=accelerator.save,
    )
    accelerator.save_state(accelerator.project_dir + f"/step_{global_step}")


def train_nested(yaml, save_path):
    """The guide for the nested YAML, section 4, from environment to saved model."""
    from duoka.compat.config import Config
    from duoka.compat.data import load_dataset
    from duoka.compat.model import load_model, save_model
    from duoka.compat.trainer import load_optimizer, load_scheduler

    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="fp16")
    print(f"{accelerator.num_processes} {accelerator.process_index} {accelerator.is_main_process}")
    config = Config.from_yaml(yaml)
    train_dataset, _eval_dataset = load_dataset(config.data, accelerator=accelerator)
    ids = accelerator.gather_object(list(train_dataset.sample_ids))
    assert sorted(ids) == list(range(train_dataset.num_total)), "each sample on one rank"
    model = load_model(config.model, accelerator=accelerator)
    optimizer = load_optimizer(model, config.trainer)
    scheduler = load_scheduler(optimizer, config.trainer, len(train_dataset))
    model, optimizer, train_dataloader, scheduler = accelerator.prepare(
        model, optimizer, train_dataset.dataloader, scheduler
    )
    losses, rates = [], []
    for batch in train_dataloader:
        with accelerator.accumulate(model):
            outputs = model(**batch)
            loss = outputs.loss
            accelerator.backward(loss)
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    if accelerator.is_main_process:
        save_model(model=accelerator.unwrap_model(model), config=config, save_path=save_path)
    accelerator.wait_for_everyone()
    seen = {"losses": losses, "rates": rates, "steps": accelerator.step, "total": scheduler.total_steps}
    accelerator.free_memory()
    return seen
