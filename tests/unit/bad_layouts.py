"""Configs whose axes, or tasks, do not go with their other keys, by the rule that refuses them; see bad_configs.py."""

HEAD = "model: demo\ndata: {train: [identity]}\n"
LAYOUT_CONTRADICTIONS = {
    "eval-tasks-of-scores": "model: demo\ndata: {train: [a]}\ntrain: {eval_tasks: [sort]}\nstage: reward\n",
    "eval-tasks-with-axes": "model: demo\ndata: {train: [a], eval: 0.1}\n"
    "train: {eval_tasks: [sort]}\nparallel: {tensor: 2}\n",
    "best-by-no-task": "model: demo\ndata: {train: [a], eval: 0.1}\ncheckpoint: {best_by: sort, keep_best: true}\n",
    "best-by-without-best": "model: demo\ndata: {train: [a], eval: 0.1}\ncheckpoint: {best_by: sort}\n"
    "train: {eval_tasks: [sort]}\n",
    "layout-against-its-keys": HEAD + "parallel: {layout: fsdp2.tp2, tensor: 4}\n",
    "tensor-with-one-process": HEAD + "parallel: {tensor: 2, strategy: single}\n",
    "tensor-with-ddp": HEAD + "parallel: {tensor: 2, strategy: ddp}\n",
    "tensor-with-ddp-settings": HEAD + "parallel: {tensor: 2, bucket_mb: 5.0}\n",
    "tensor-with-optimizer-of-whole-matrices": HEAD + "optim: {name: adafactor}\nparallel: {tensor: 2}\n",
    "tensor-with-packed-weights": "data: {train: [identity]}\n\n"
    "model: {name: demo, quantization: nf4}\nlora: {rank: 2}\nparallel: {tensor: 2}\n",
    "tensor-with-compile": HEAD + "train: {compile: true}\nparallel: {tensor: 2}\n",
    "expert-with-one-process": HEAD + "parallel: {expert: 2, strategy: single}\n",
    "expert-with-ddp": HEAD + "parallel: {expert: 2, strategy: ddp}\n",
    "expert-with-ddp-settings": HEAD + "parallel: {expert: 2, bucket_mb: 5.0}\n",
    "expert-with-other-axes": HEAD + "parallel: {expert: 2, tensor: 2}\n",
    "expert-with-compress": HEAD + "parallel: {expert: 2, strategy: fsdp, compress: bf16}\n",
    "expert-with-optimizer": HEAD + "optim: {name: adafactor}\nparallel: {expert: 2}\n",
    "expert-with-adapted-experts": HEAD + "parallel: {expert: 2}\nlora: {rank: 2}\n",
    "expert-with-packed-weights": "data: {train: [identity]}\n\n"
    "model: {name: demo, quantization: nf4}\nlora: {rank: 2, targets: [q_proj]}\nparallel: {expert: 2}\n",
    "expert-with-compile": HEAD + "train: {compile: true}\nparallel: {expert: 2}\n",
    "expert-with-offload": HEAD + "parallel: {expert: 2, offload: params, strategy: fsdp}\n",
    "tensor-with-offloaded-params": HEAD + "parallel: {tensor: 2, offload: params, strategy: fsdp}\n",
}
