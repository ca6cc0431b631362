"""Where each name is: ours, one of Accelerate's own that serves as it is, or refused with what to write instead."""

from __future__ import annotations

import functools
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from duoka.accelerator.names.enums import FP8_ELSEWHERE
from duoka.errors import ConfigError

_HERE = "duoka.accelerator.names"
OURS = {
    f"{_HERE}.enums": "DistributedType LoggerType PrecisionType DDPCommunicationHookType",
    f"{_HERE}.states": "PartialState AcceleratorState GradientState",
    f"{_HERE}.local_sgd": "LocalSGD",
    f"{_HERE}.plugins": "DataLoaderConfiguration GradientAccumulationPlugin ProjectConfiguration KwargsHandler "
    "DistributedDataParallelKwargs GradScalerKwargs InitProcessGroupKwargs AutocastKwargs ProfileKwargs "
    "FullyShardedDataParallelPlugin DeepSpeedPlugin ParallelismConfig TorchTensorParallelPlugin TorchDynamoPlugin",
    f"{_HERE}.functions": "gather gather_object reduce broadcast broadcast_object_list pad_across_processes "
    "send_to_device convert_to_fp32 set_seed synchronize_rng_states synchronize_rng_state wait_for_everyone "
    "skip_first_batches extract_model_from_parallel clean_state_dict_for_safetensors save release_memory "
    "clear_device_cache should_reduce_batch_size find_executable_batch_size get_logger tqdm debug_launcher "
    "notebook_launcher",
    "duoka.accelerator.trackers": "GeneralTracker on_main_process",
    "duoka.accelerator.core": "Accelerator",
}
# Of models that are too large for one device, in inference: Accelerate's own functions, which touch no training.
THEIRS = {
    "accelerate": "init_empty_weights init_on_device load_checkpoint_and_dispatch load_checkpoint_in_model "
    "dispatch_model cpu_offload cpu_offload_with_hook disk_offload infer_auto_device_map",
    "accelerate.utils": "get_balanced_memory get_max_memory compute_module_sizes find_tied_parameters "
    "set_module_tensor_to_device named_module_tensors retie_parameters offload_state_dict offload_weight "
    "load_offloaded_weight extract_submodules_state_dict is_torch_version compare_versions patch_environment "
    "str_to_bool get_gpu_info concatenate find_batch_size find_device honor_type recursively_apply listify "
    "convert_outputs_to_fp32 slice_tensors is_namedtuple is_torch_tensor write_basic_config",
}
REFUSED = {
    "prepare_pippy": 'duoka does not split a model into stages yet; shard it:   Accelerator(strategy="zero3")',
    "MegatronLMPlugin": 'duoka does not split layers yet; shard the model:   Accelerator(strategy="zero3")',
    "HfDeepSpeedConfig": 'write:   Accelerator(strategy="zero3")',
    "DeepSpeedSequenceParallelConfig": "duoka does not split sequences yet; shorter rows need less memory",
    "TorchContextParallelConfig": "duoka does not split sequences yet; shorter rows need less memory",
    "TorchTensorParallelConfig": 'duoka does not split layers yet; shard the model:   Accelerator(strategy="zero3")',
    "PrepareForLaunch": "start with duoka launch",
    "AORecipeKwargs": FP8_ELSEWHERE,
    "TERecipeKwargs": FP8_ELSEWHERE,
    "MSAMPRecipeKwargs": FP8_ELSEWHERE,
    "FP8RecipeKwargs": FP8_ELSEWHERE,
    "BnbQuantizationConfig": "load the model with transformers' BitsAndBytesConfig",
    "load_and_quantize_model": "load the model with transformers' BitsAndBytesConfig",
    "merge_fsdp_weights": "save_model writes whole weights: there is nothing to merge",
    "save_fsdp_model": "write:   accelerator.save_model(model, folder)",
    "load_fsdp_model": "write:   accelerator.load_state(folder)",
    "save_fsdp_optimizer": "write:   accelerator.save_state(folder)",
    "load_fsdp_optimizer": "write:   accelerator.load_state(folder)",
    "GPTTrainStep": "the loop is yours: no train step of Megatron",
    "AbstractTrainStep": "the loop is yours: no train step of Megatron",
    "avg_losses_across_data_parallel_group": "write:   accelerator.reduce(loss, 'mean')",
    "register_tracker_class": "give log_with the tracker itself",
}
# Scripts import these for a case that they decide later: they are refused where one is made.
REFUSED_WHEN_MADE = {
    "MegatronLMDummyScheduler": "give `prepare` a scheduler of torch",
    "MegatronLMDummyDataLoader": "give `prepare` a DataLoader",
    "DummyOptim": "give `prepare` an optimizer of torch: ZeRO stages are duoka's own",
    "DummyScheduler": "give `prepare` a scheduler of torch: ZeRO stages are duoka's own",
}
_WHERE = {name: module for table in (OURS, THEIRS) for module, names in table.items() for name in names.split()}


class NotOffered(ConfigError, ImportError):
    """A name of Accelerate's that is not here."""


def find(name: str, module: str) -> Any:
    """What `module` answers when it is asked for `name`."""
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    if name.startswith("is_") and name.endswith("_available"):
        return _availability(name.removeprefix("is_").removesuffix("_available"))
    if name in REFUSED_WHEN_MADE:
        return _refused_when_made(name)
    if name in REFUSED:
        raise NotOffered(f"{name} is not in duoka", fix=REFUSED[name])
    if not name.startswith("__") and _is_theirs(name):
        raise NotOffered(f"{name} is a name of Accelerate that duoka has nothing for", fix="see docs/accelerator.md")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


@functools.cache
def _refused_when_made(name: str) -> type:
    def refuse(self: Any, *values: Any, **options: Any) -> None:
        raise NotOffered(f"{name} is not in duoka", fix=REFUSED_WHEN_MADE[name])

    return type(name, (), {"__init__": refuse, "__doc__": f"Refused: {REFUSED_WHEN_MADE[name]}."})


def _is_theirs(name: str) -> bool:
    if find_spec("accelerate") is None:
        return False
    found = (getattr(import_module(module), name, None) for module in ("accelerate", "accelerate.utils"))
    return any(one is not None and not isinstance(one, ModuleType) for one in found)


def _availability(what: str) -> Any:
    import torch

    devices = {"cuda": torch.cuda.is_available, "xpu": torch.xpu.is_available, "mps": torch.backends.mps.is_available,
               "npu": lambda: False, "mlu": lambda: False, "torch_xla": lambda: False, "hpu": lambda: False,
               "deepspeed": lambda: False, "megatron_lm": lambda: False, "fp8": lambda: False,
               "bf16": lambda ignore_tpu=False: True,
               "tensorboard": lambda: find_spec("tensorboard") is not None}  # fmt: skip
    return devices.get(what, lambda: find_spec(what) is not None)
