"""The names of number types: ours (plan, config), and those of safetensors files."""

import torch

# fp8: the layers' products alone are in 8 bits (fp8.py), and what they read and give is bf16 as all else.
BY_PRECISION = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
SAFETENSORS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
