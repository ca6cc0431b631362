"""Verbs as functions, for code that has no Accelerator at hand: they speak of the newest one's world."""

from __future__ import annotations

import functools
import inspect
import logging
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from duoka.accelerator.collect import Collector
from duoka.accelerator.loaders import PreparedLoader, SkippedLoader
from duoka.accelerator.names.newest import current_world, newest_accelerator
from duoka.accelerator.nested import map_tensors, send
from duoka.accelerator.profiling import empty_caches
from duoka.errors import ConfigError
from duoka.parallel.out_of_memory import is_out_of_memory
from duoka.store.state import read_random_state, seed_everything, set_random_state


def _collect() -> Collector:
    return Collector(current_world())


def gather(tensor: Any) -> Any:
    """Every rank's tensors end to end."""
    return _collect().gather(tensor)


def gather_object(object: Any) -> list[Any]:
    return _collect().gather_objects(list(object))


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Mean (unless told otherwise), sum or max over ranks, as copies."""
    return _collect().reduce(tensor, reduction, scale)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    return _collect().broadcast(tensor, from_process)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    return _collect().broadcast_objects(object_list, from_process)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    return _collect().pad(tensor, dim, pad_index, pad_first)


def send_to_device(tensor: Any, device: Any, non_blocking: bool = False, skip_keys: Any = None) -> Any:
    """The same structure with its tensors on `device`."""
    if isinstance(tensor, Mapping) and skip_keys:
        keep = {skip_keys} if isinstance(skip_keys, str) else set(skip_keys)
        return {k: v if k in keep else send_to_device(v, device, non_blocking) for k, v in tensor.items()}
    return send(tensor, device, non_blocking)


def convert_to_fp32(tensor: Any) -> Any:
    return map_tensors(tensor, lambda one: one.float() if one.dtype in (torch.float16, torch.bfloat16) else one)


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Python's, NumPy's and torch's generators; `device_specific`: each rank its own."""
    seed_everything(seed + current_world().rank if device_specific else seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def synchronize_rng_states(rng_types: Any = None, generator: torch.Generator | None = None) -> None:
    """Rank 0's generators on all ranks."""
    world = current_world()
    if generator is not None:
        generator.set_state(world.agree(generator.get_state()))
    kinds = {str(getattr(kind, "value", kind)) for kind in rng_types or ("torch",)} - {"generator"}
    if unknown := kinds - {"torch", "cuda", "numpy", "python"}:
        raise ConfigError(f"synchronize_rng_states knows torch, cuda, numpy and python, not {', '.join(unknown)}")
    mine = (random.getstate(), np.random.get_state())
    if kinds:
        set_random_state(world.agree(read_random_state(world.device)), world.device)
    if "python" not in kinds:
        random.setstate(mine[0])
    if "numpy" not in kinds:
        np.random.set_state(mine[1])


def synchronize_rng_state(rng_type: Any = None, generator: torch.Generator | None = None) -> None:
    synchronize_rng_states([rng_type], generator)


def wait_for_everyone() -> None:
    current_world().barrier()


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> SkippedLoader:
    """The epoch of a prepared loader without its first batches."""
    if not isinstance(dataloader, PreparedLoader):
        fix = "write:   loader = accelerator.prepare(loader)"
        raise ConfigError("skip_first_batches needs a prepared loader", fix=fix)
    return SkippedLoader(dataloader, num_batches, print if current_world().is_main else lambda text: None)


def extract_model_from_parallel(model: torch.nn.Module, keep_fp32_wrapper: bool = True, **options: Any) -> Any:
    owner = newest_accelerator()
    return getattr(model, "module", model) if owner is None else owner.unwrap_model(model, keep_fp32_wrapper, **options)


def clean_state_dict_for_safetensors(state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone().contiguous() for name, tensor in state_dict.items()}


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = True) -> None:
    from duoka.accelerator import files

    if save_on_each_node:
        raise ConfigError("save(save_on_each_node=True) has no counterpart here: files are written once")
    if current_world().is_main:
        from pathlib import Path

        files.write_object(obj, Path(f))


def release_memory(*objects: Any) -> list[None]:
    """A None for each, to assign to its name, after which nothing of it is cached."""
    empty_caches()
    return [None for _ in objects]


clear_device_cache = empty_caches


def should_reduce_batch_size(exception: Exception) -> bool:
    return isinstance(exception, RuntimeError) and is_out_of_memory(exception)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None, starting_batch_size: int = 128, reduce_batch_size_fn: Any = None
) -> Any:
    """A decorator: `function(batch_size, ...)` is called again with nine tenths of the size when memory runs out.

    Each process looks for itself: where several train together, all of them have to run out of memory alike.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size, starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )  # fmt: skip
    first = next(iter(inspect.signature(function).parameters), "")
    if not first:
        raise ConfigError(f"find_executable_batch_size: {function.__name__} must take the batch size first")
    smaller = reduce_batch_size_fn

    @functools.wraps(function)
    def search(*args: Any, **kwargs: Any) -> Any:
        size = starting_batch_size
        while size > 0:
            empty_caches()
            try:
                return function(size, *args, **kwargs)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            size = smaller() if smaller is not None else int(size * 0.9)
        raise RuntimeError("No executable batch size found, reached zero.")

    return search


class RankLogger(logging.LoggerAdapter):  # type: ignore[type-arg]
    """A logger that speaks once: `main_process_only=False` for all ranks, `in_order=True` for one after the other."""

    def log(self, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
        once, in_turn = kwargs.pop("main_process_only", True), kwargs.pop("in_order", False)
        world = current_world()
        kwargs.setdefault("stacklevel", 2)
        if not self.isEnabledFor(level):
            return
        if in_turn and not once:
            for rank in range(world.size):
                if rank == world.rank:
                    super().log(level, msg, *args, **kwargs)
                world.barrier()
        elif not once or world.is_main:
            super().log(level, msg, *args, **kwargs)

    def warning_once(self, msg: str, *args: Any, **kwargs: Any) -> None:
        _warn_once(self, msg, args, tuple(kwargs.items()))


@functools.lru_cache(None)
def _warn_once(logger: RankLogger, msg: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> None:
    logger.warning(msg, *args, **dict(kwargs))


def get_logger(name: str, log_level: str | None = None) -> RankLogger:
    logger = logging.getLogger(name)
    if log_level is not None:
        logger.setLevel(log_level.upper())
    return RankLogger(logger, {})


def tqdm(*args: Any, main_process_only: bool = True, **options: Any) -> Any:
    """A progress bar on one process of each machine."""
    from tqdm.auto import tqdm as bar  # type: ignore[import-untyped]

    if main_process_only:
        options["disable"] = options.get("disable", False) or current_world().local_rank != 0
    return bar(*args, **options)


def debug_launcher(function: Callable[..., Any], args: tuple[Any, ...] = (), num_processes: int = 2) -> None:
    """`function(*args)` in so many processes on this machine's CPU."""
    notebook_launcher(function, args, num_processes)


def notebook_launcher(
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    num_processes: int | None = None,
    mixed_precision: str | None = None,
    use_port: Any = None,
    **options: Any,
) -> None:
    """`function(*args)` in so many processes, from a notebook's cell; without a number, one for each GPU."""
    if wanted := {name: value for name, value in options.items() if value not in (None, 0, 1)}:
        raise ConfigError(f"notebook_launcher: {', '.join(wanted)}: one machine it is here", fix="use duoka launch")
    if mixed_precision not in (None, "no"):
        raise ConfigError("notebook_launcher(mixed_precision=...)", fix="write Accelerator(mixed_precision=...)")
    count = num_processes if num_processes is not None else max(1, torch.cuda.device_count())
    if count == 1:
        function(*args)
        return
    if torch.cuda.is_initialized() or torch.distributed.is_initialized():
        raise ConfigError(
            "CUDA or a process group is there already: processes cannot be made from this one",
            fix="restart the notebook, and make models and the Accelerator inside of the function",
        )
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Functions of a notebook cannot be sent to a fresh process: it has to be a fork.
    plan = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=count, run_id="duoka", rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.1, start_method="fork",
    )  # fmt: skip
    elastic_launch(plan, function)(*args)
