"""DeepSpeed alone, as other people's scripts use it: checkpoints of its own, and what they hold."""

import os
from pathlib import Path

import torch
from worlds import free_port


def save_checkpoints(model, folder, stages):
    """In a world: two steps at each stage in bf16, a checkpoint, and beside it the fp32 weights and moments.

    Stage 0 is in fp32; "narrow" is stage 0 in bf16, with weights that decay and others in two groups.
    """
    import deepspeed
    import torch.distributed as dist
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    os.environ["DS_ACCELERATOR"] = "cpu"
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    dist.init_process_group("gloo")
    for stage in stages:
        torch.manual_seed(0)
        lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        is_narrow = stage == "narrow"
        settings = {
            "train_batch_size": 2, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 0 if is_narrow else stage, "stage3_param_persistence_threshold": 100},
            "bf16": {"enabled": stage != 0}, "data_types": {"grad_accum_dtype": "bf16" if is_narrow else "fp32"},
        }  # fmt: skip
        flat = [one for one in lm.parameters() if is_narrow and one.ndim < 2]
        others = [one for one in lm.parameters() if not (is_narrow and one.ndim < 2)]
        groups = [{"params": others}, *([{"params": flat, "weight_decay": 0.0}] if flat else [])]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        engine, *_ = deepspeed.initialize(model=lm, optimizer=optimizer, config=settings)
        for seed in range(2):
            ids = torch.randint(0, 50, (1, 12), generator=torch.Generator().manual_seed(seed + 10 * dist.get_rank()))
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
        place = Path(folder) / f"stage{stage}"
        engine.save_checkpoint(str(place), tag="global_step2")
        known, wide = {}, {}
        if is_narrow:
            pairs = zip(engine.optimizer.fp16_groups, engine.optimizer.fp32_groups, strict=True)
            wide = {id(ours): one for group in pairs for ours, one in zip(*group, strict=True)}
        for name, parameter in engine.module.named_parameters():
            if is_narrow:
                known[name] = wide[id(parameter)].detach().clone()
            elif stage:
                known[name] = safe_get_full_fp32_param(parameter).clone()
                known[f"exp_avg.{name}"] = safe_get_full_optimizer_state(parameter, "exp_avg").clone()
            else:
                known[name] = parameter.detach().clone()
        if dist.get_rank() == 0:
            save_file({name: value.contiguous() for name, value in known.items()}, place / "known.safetensors")
        dist.barrier()
    dist.destroy_process_group()


def go_on(model, exported, folder, stages, rank_rows, is_split):
    """In a world: at each stage DeepSpeed loads what was exported, and steps twice more; weights and moments of it all.

    `rank_rows`: of each step, of each rank, the tokens it learns from. `is_split`: weights that decay and others in two
    groups, as most scripts have it.
    """
    import deepspeed
    import torch.distributed as dist
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    os.environ["DS_ACCELERATOR"] = "cpu"
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if "RANK" not in os.environ:  # alone
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        os.environ.update({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", **place})
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    for stage in stages:
        lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        settings = {
            "train_batch_size": size, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100},
            "checkpoint": {"load_universal": True},
        }  # fmt: skip
        split = {flat: [one for one in lm.parameters() if (one.ndim < 2) == flat] for flat in (False, True)}
        groups = [{"params": split[False]}, {"params": split[True], "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups if is_split else lm.parameters(), lr=1e-2, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        engine, *_ = deepspeed.initialize(model=lm, optimizer=optimizer, lr_scheduler=schedule, config=settings)
        _, client = engine.load_checkpoint(str(exported))
        known = {"step": torch.tensor([engine.global_steps, client["duoka"]["step"]])}
        for number, rows in enumerate([None, *rank_rows]):
            if rows is not None:
                ids = torch.tensor([rows[rank]])
                engine.backward(engine(input_ids=ids, labels=ids).loss)
                engine.step()
            for name, parameter in engine.module.named_parameters():
                known[f"{number}.{name}"] = safe_get_full_fp32_param(parameter).clone()
                for kind in ("exp_avg", "exp_avg_sq"):
                    known[f"{number}.{kind}.{name}"] = safe_get_full_optimizer_state(parameter, kind).clone()
        if rank == 0:
            save_file(
                {name: value.contiguous() for name, value in known.items()},
                Path(folder) / f"{size}-{stage}-{is_split}.known",
            )
        dist.barrier()
    dist.destroy_process_group()
