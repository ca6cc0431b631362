"""How many GPUs the tests may use: none, unless `make gpu-check` asks for them."""


def num_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
