"""Configs whose axes do not go with their other keys, by the rule that refuses them; see bad_configs.py."""

HEAD = "model: demo\ndata: {train: [identity]}\n"
LAYOUT_CONTRADICTIONS = {
    "tensor-with-one-process": HEAD + "parallel: {tensor: 2, strategy: single}\n",
    "tensor-with-ddp": HEAD + "parallel: {tensor: 2, strategy: ddp}\n",
    "tensor-with-ddp-settings": HEAD + "parallel: {tensor: 2, bucket_mb: 5.0}\n",
    "tensor-with-optimizer-of-whole-matrices": HEAD + "optim: {name: adafactor}\nparallel: {tensor: 2}\n",
    "tensor-with-packed-weights": "data: {train: [identity]}\n\n"
    "model: {name: demo, quantization: nf4}\nlora: {rank: 2}\nparallel: {tensor: 2}\n",
    "tensor-with-compile": HEAD + "train: {compile: true}\nparallel: {tensor: 2}\n",
    "tensor-with-offloaded-params": HEAD + "parallel: {tensor: 2, offload: params, strategy: fsdp}\n",
}
