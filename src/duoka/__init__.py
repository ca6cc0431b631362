"""duoka (多卡): train and fine-tune language models on one CPU, one GPU or many nodes, from one YAML file.

For people's own loops: `from duoka import Accelerator`, and beside it print0, get_dist_info, compute_init and spawn.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from duoka.accelerator import Accelerator as Accelerator
    from duoka.accelerator.spawning import spawn as spawn
    from duoka.comm.world import compute_init as compute_init
    from duoka.process.environ import get_dist_info as get_dist_info
    from duoka.process.environ import print0 as print0

__version__ = "0.1.0"
__all__ = ["Accelerator", "__version__", "compute_init", "get_dist_info", "print0", "spawn"]

# Found when they are asked for: importing duoka alone stays cheap.
_WHERE = {
    "Accelerator": "duoka.accelerator",
    "compute_init": "duoka.comm.world",
    "get_dist_info": "duoka.process.environ",
    "print0": "duoka.process.environ",
    "spawn": "duoka.accelerator.spawning",
    # The names that loops import beside the Accelerator; more of them are in duoka.accelerator.utils.
    **dict.fromkeys(
        (
            "AutocastKwargs", "DDPCommunicationHookType", "DataLoaderConfiguration", "DeepSpeedPlugin",
            "DistributedDataParallelKwargs", "DistributedType", "FullyShardedDataParallelPlugin", "GradScalerKwargs",
            "InitProcessGroupKwargs", "ParallelismConfig", "PartialState", "ProfileKwargs", "cpu_offload",
            "cpu_offload_with_hook", "debug_launcher", "disk_offload", "dispatch_model", "find_executable_batch_size",
            "infer_auto_device_map", "init_empty_weights", "init_on_device", "load_checkpoint_and_dispatch",
            "load_checkpoint_in_model", "notebook_launcher", "prepare_pippy", "skip_first_batches",
            "synchronize_rng_states",
        ),
        "duoka.accelerator",
    ),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'duoka' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_WHERE[name]), name)
