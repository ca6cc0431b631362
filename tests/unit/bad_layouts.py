"""Configs whose axes, or tasks, do not go with their other keys, by the rule that refuses them; see bad_configs.py."""

HEAD = "model: demo\ndata: {train: [identity]}\n"
GRAPHS = "model: demo\ndata: {train: [identity], fixed_rows: true}\ntrain: {compile: reduce-overhead}\n"
LAYOUT_CONTRADICTIONS = {
    "narrow-weights-in-wide-passes": HEAD + "train: {weights: bf16, precision: fp32}\n",
    "narrow-weights-of-adapters": HEAD + "train: {weights: bf16}\nlora: {rank: 8}\n",
    "narrow-weights-by-another-optimizer": HEAD + "train: {weights: bf16}\noptim: {name: lamb}\n",
    "narrow-weights-elsewhere": HEAD + "train: {weights: bf16}\nparallel: {offload: optimizer}\n",
    "narrow-weights-in-pieces": HEAD + "train: {weights: bf16}\nparallel: {tensor: 2}\n",
    "narrow-weights-compressed": HEAD + "train: {weights: bf16}\nparallel: {compress: powersgd, strategy: ddp}\n",
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
    "expert-with-late-gradients": HEAD + "parallel: {expert: 2, pipeline: 2, schedule: zbv}\n",
    "expert-with-compress": HEAD + "parallel: {expert: 2, strategy: fsdp, compress: bf16}\n",
    "expert-with-optimizer": HEAD + "optim: {name: adafactor}\nparallel: {expert: 2}\n",
    "expert-with-adapted-experts": HEAD + "parallel: {expert: 2}\nlora: {rank: 2}\n",
    "expert-with-packed-weights": "data: {train: [identity]}\n\n"
    "model: {name: demo, quantization: nf4}\nlora: {rank: 2, targets: [q_proj]}\nparallel: {expert: 2}\n",
    "expert-with-compile": HEAD + "train: {compile: true}\nparallel: {expert: 2}\n",
    "expert-with-offload": HEAD + "parallel: {expert: 2, offload: params, strategy: fsdp}\n",
    "offload-params-to-disk-of-whole-models": HEAD + "parallel: {strategy: zero1, offload: {params: disk}}\n",
    "settings-of-ddp-and-of-sharing": HEAD + "parallel: {bucket_mb: 50, offload: params}\n",
    "offload-params-deeper-than-optimizer": HEAD
    + "parallel: {strategy: zero3, offload: {params: disk, optimizer: host}}\n",
    "offload-params-to-disk-unresharded": HEAD
    + "parallel: {strategy: zero3, reshard: false, offload: {params: disk}}\n",
    "offload-share-of-nothing-or-of-weights": HEAD
    + "parallel: {strategy: zero3, offload: {params: host, share: 0.5}}\n",
    "offload-activations-of-selective": HEAD
    + "parallel: {offload: {activations: disk}}\ntrain: {recompute: selective}\n",
    "offload-activations-of-compiled-layers": HEAD
    + "parallel: {offload: {activations: disk}}\ntrain: {compile: true}\n",
    "graphs-of-rows-of-one-length": HEAD + "train: {compile: reduce-overhead}\n",
    "graphs-of-whole-models": GRAPHS + "parallel: {strategy: zero3}\n",
    "graphs-keep-what-they-compute": GRAPHS.replace("overhead", "overhead, recompute: full"),
    "graphs-of-likelihoods": GRAPHS + "stage: dpo\n",
    "offload-activations-of-stages-or-dp": HEAD + "parallel: {pipeline: 2, offload: {activations: disk}}\n",
    "offload-folder-without-disk": HEAD + "parallel: {offload: {optimizer: host, folder: /fast}}\n",
    "packed-exchange-of-shards-only": HEAD + "parallel: {strategy: ddp, compress: {gradients: int8}}\n",
    "packed-exchange-with-tensor": HEAD + "parallel: {strategy: zero1, tensor: 2, compress: {gradients: int8}}\n",
    "packed-exchange-with-muon": HEAD
    + "parallel: {strategy: zero3, compress: {gradients: int8}}\noptim: {name: muon, adamw_lr: 3e-4}\n",
    "packed-exchange-of-frozen-weights": HEAD + "parallel: {strategy: zero3, compress: {weights: int8}}\nlora: {}\n",
    "tensor-with-offloaded-params": HEAD + "parallel: {tensor: 2, offload: params, strategy: fsdp}\n",
    "deepspeed-switches-without-it": HEAD + "parallel: {deepspeed: {overlap_comm: true}}\n",
    "deepspeed-with-strategy": HEAD + "parallel: {engine: deepspeed, strategy: hsdp}\n",
    "deepspeed-with-axes": HEAD + "parallel: {engine: deepspeed, strategy: zero2, sequence: 2}\n",
    "autotp-with-adapters": HEAD + "parallel: {engine: deepspeed, strategy: zero2, tensor: 2}\nlora: {rank: 2}\n",
    "autotp-with-disk": HEAD
    + "parallel: {engine: deepspeed, strategy: zero3, tensor: 2, offload: {optimizer: disk}}\n",
    "autotp-with-copies-in-a-node": HEAD + "parallel: {engine: deepspeed, strategy: zero3, tensor: 2, reshard: node}\n",
    "deepspeed-packing-below-stage-3": HEAD
    + "parallel: {engine: deepspeed, strategy: zero2, compress: {weights: int8}}\n",
    "deepspeed-packing-adapters": HEAD
    + "parallel: {engine: deepspeed, strategy: zero3, compress: {gradients: int4}}\nlora: {rank: 8}\n",
    "deepspeed-packing-what-is-offloaded": HEAD
    + "parallel: {engine: deepspeed, strategy: zero3, compress: {weights: int8}, offload: optimizer}\n",
    "deepspeed-with-optimizer": HEAD + "optim: {name: lamb}\nparallel: {engine: deepspeed}\n",
    "deepspeed-in-fp16": HEAD + "train: {precision: fp16}\nparallel: {engine: deepspeed}\n",
    "fp8-with-adapters": HEAD + "train: {precision: fp8}\nlora: {rank: 2}\n",
    "fp8-with-tensor": HEAD + "train: {precision: fp8}\nparallel: {tensor: 2}\n",
    "fp8-with-expert": HEAD + "train: {precision: fp8}\nparallel: {expert: 2}\n",
    "fp8-with-split-passes": HEAD + "train: {precision: fp8}\nparallel: {pipeline: 2, schedule: zbv}\n",
    "fp8-with-deepspeed": HEAD + "train: {precision: fp8}\nparallel: {engine: deepspeed}\n",
    "fp8-with-rollouts": "model: demo\nstage: rl\ntrain: {precision: fp8}\ndata: {train: [task:sort]}\n",
    "deepspeed-with-ddp-settings": HEAD + "parallel: {engine: deepspeed, strategy: ddp, bucket_mb: 5.0}\n",
    "deepspeed-with-compress": HEAD + "parallel: {engine: deepspeed, strategy: ddp, compress: powersgd}\n",
    "deepspeed-compressing-fp32": HEAD + "parallel: {engine: deepspeed, compress: bf16}\ntrain: {precision: fp32}\n",
    "deepspeed-with-reshard": HEAD + "parallel: {engine: deepspeed, strategy: zero3, reshard: false}\n",
    "deepspeed-with-disk": HEAD + "parallel: {engine: deepspeed, strategy: zero2, offload: {optimizer: disk}}\n",
    "deepspeed-with-part-of-the-state": HEAD
    + "parallel: {engine: deepspeed, strategy: zero3, offload: {optimizer: host, share: 0.5}}\n",
    "deepspeed-keeping-weights-of-a-disk": HEAD
    + "parallel: {engine: deepspeed, strategy: zero3, offload: {params: disk}, "
    "deepspeed: {stage3_max_live_parameters: 1000}}\n",
    "deepspeed-offload-of-whole-models": HEAD + "parallel: {engine: deepspeed, strategy: ddp, offload: optimizer}\n",
    "deepspeed-with-compile": HEAD + "train: {compile: true}\nparallel: {engine: deepspeed}\n",
    "deepspeed-with-packed-weights": "data: {train: [identity]}\n\n"
    "model: {name: demo, quantization: nf4}\nlora: {rank: 2}\nparallel: {engine: deepspeed}\n",
    "deepspeed-with-rl": "model: demo\nstage: rl\nparallel: {engine: deepspeed}\ndata: {train: [task:sort]}\n",
}
