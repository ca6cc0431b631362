"""DeepSpeed's ZeRO-Infinity on the work of offload.py: one run, one line of JSON. Called by offload.py.

    python benchmarks/offload_peer.py MODEL FOLDER STEPS optimizer|params LENGTH

Stage 3, fp32, its own compiled Adam and async I/O; rows of one length, as many tokens as in duoka's micro-batches.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROWS, ACCUMULATION = 2, 4


def main() -> None:
    model_folder, folder, steps, what, length = (
        sys.argv[1],
        sys.argv[2],
        int(sys.argv[3]),
        sys.argv[4],
        int(sys.argv[5]),
    )
    Path(folder).mkdir(exist_ok=True)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.setdefault("MASTER_PORT", "29577")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    deepspeed.init_distributed("gloo", verbose=False)
    disk = {"device": "nvme", "nvme_path": folder, "pin_memory": False}
    largest = max(p.numel() for p in AutoModelForCausalLM.from_pretrained(model_folder).parameters())
    zero: dict[str, Any] = {"stage": 3, "offload_optimizer": dict(disk, buffer_count=4)}
    if what == "params":
        zero["offload_param"] = dict(disk, buffer_count=8, buffer_size=2 * largest)
    settings = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-5}},
        "zero_optimization": zero,
        "aio": {"block_size": 1 << 20, "queue_depth": 8, "single_submit": False, "overlap_events": True},
    }
    kept = HfDeepSpeedConfig(settings)  # else the whole model is built in memory first
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="sdpa")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    engine, *_ = deepspeed.initialize(model=model, config=settings, model_parameters=model.parameters())
    del kept
    generator = torch.Generator().manual_seed(0)
    seconds = []
    for _ in range(steps):
        begun = time.perf_counter()
        for _ in range(ACCUMULATION):
            ids = torch.randint(3, model.config.vocab_size, (ROWS, length), generator=generator)
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
        seconds.append(time.perf_counter() - begun)
    tokens = ROWS * ACCUMULATION * length
    print("RESULT " + json.dumps({"seconds": seconds, "tokens": tokens, "version": deepspeed.__version__}), flush=True)
    os._exit(0)  # a thread of gloo's that wants Python's lock while the interpreter ends would abort it now and then


if __name__ == "__main__":
    main()
