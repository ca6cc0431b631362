"""What `prepare` makes of models, optimizers and schedulers: the same objects to work with, in step with the window."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from duoka.accelerator.graph import mark_call
from duoka.accelerator.nested import map_tensors, tensors_in
from duoka.accelerator.readings import Readings
from duoka.accelerator.window import scale_all
from duoka.comm.world import World
from duoka.config.schema import ParallelConfig
from duoka.errors import ConfigError
from duoka.model.build import named_part
from duoka.optim.muon import MuonAdamW
from duoka.parallel.apply import parallelize
from duoka.parallel.engine import Engine
from duoka.parallel.mesh import Mesh
from duoka.parallel.precision import Numerics, compute_in
from duoka.plan.layout import Layout
from duoka.torch_private import PLAIN_CALL, plain_call, set_call


@dataclass(eq=False)
class PreparedModel:
    """One model and what its gradients went through since the last step."""

    engine: Engine
    layout: Layout
    parameters: dict[str, torch.nn.Parameter]
    readings: Readings
    was_called: bool = False  # a forward pass with gradients since the last backward that reached it
    is_opaque: bool = False  # its last answer held no tensor to be marked: any loss may have come from it
    will_exchange: bool = True  # False where the last forward pass was inside of the wrapper's own `no_sync`
    is_nothing: bool = False  # gradients of this backward pass count for nothing
    exchanged: bool = False
    correction: float = 1.0  # what exchanged gradients were multiplied with (see Window.correction)
    kept: dict[str, torch.Tensor | None] = field(default_factory=dict)
    # What sharding put in place of which parameter. The old ones are held (empty), so that their ids stay theirs.
    replaced: dict[int, torch.nn.Parameter] = field(default_factory=dict)
    originals: list[torch.nn.Parameter] = field(default_factory=list)

    @property
    def bare(self) -> torch.nn.Module:
        return self.engine.bare

    def grads(self) -> list[torch.Tensor]:
        return [p.grad for p in self.parameters.values() if p.grad is not None]

    def note_call(self, inputs: Any) -> None:
        """A forward pass with gradients begins."""
        self.was_called = True
        # DDP decides in the forward pass whether the backward pass exchanges.
        self.will_exchange = getattr(self.engine.model, "require_backward_grad_sync", True)
        self.readings.note_call(tensors_in(inputs))

    def before_gradients(self, grads: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...] | None:
        """Zeros for what counts for nothing: a loss that was divided by no targets sends 0/0."""
        if not self.is_nothing:
            return None
        return tuple(None if grad is None else torch.zeros_like(grad) for grad in grads)

    def before_backward(self, is_nothing: bool) -> None:
        """Where an exchange sends whole gradients (DDP), those exchanged before must not be summed once more."""
        self.is_nothing = is_nothing
        if self.correction != 1.0:
            scale_all(self.grads(), 1.0 / self.correction)
            self.correction = 1.0
        if self.exchanged and self.engine.exchanges_whole_gradients and not self.kept:
            self.kept = {n: None if p.grad is None else p.grad.clone() for n, p in self.parameters.items()}
            for parameter in self.parameters.values():
                parameter.grad = None

    def after_backward(self, synced: bool, correction: float) -> None:
        self.was_called = self.is_nothing = False
        if not (synced and self.will_exchange):
            return
        self.engine.check_all_used('write:   Accelerator(parallel={"find_unused_parameters": True}), or freeze it')
        self.merge()
        self.exchanged = True
        if correction != 1.0:
            scale_all(self.grads(), correction)
            self.correction = correction

    def merge(self) -> None:
        for name, grad in self.kept.items():
            parameter = self.parameters[name]
            if grad is not None:
                parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
        self.kept = {}

    def forget(self) -> None:
        self.exchanged, self.correction, self.kept = False, 1.0, {}


class CallIn:
    """How a prepared model is called: in its precision, answers in fp32. Set by `set_call`.

    A copy of the model computes in the same way. A pickle of it holds the plain model, which needs no duoka.
    """

    def __init__(
        self, model: torch.nn.Module, precision: str, device: torch.device, is_sharded: bool, prepared: Any = None
    ) -> None:
        self.model = model
        self.precision = precision
        self.device = device
        self.is_sharded = is_sharded
        self.prepared: PreparedModel | None = prepared

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        watched = self.prepared if torch.is_grad_enabled() else None
        if watched is not None:
            watched.note_call((args, kwargs))
        plain = contextlib.nullcontext()
        # Weights gathered in inference mode would be of no use to a later backward pass: torch.no_grad does as well.
        leave = torch.inference_mode(False) if self.is_sharded and torch.is_inference_mode_enabled() else plain
        with leave, torch.no_grad() if leave is not plain else plain, compute_in(self.precision, self.device):
            answer = plain_call(self.model, *args, **kwargs)
        answer = answer if self.precision == "fp32" else map_tensors(answer, _in_fp32)
        if watched is not None:
            mark_call(watched, (args, kwargs), answer)
        return answer

    def __deepcopy__(self, memo: dict[int, Any]) -> CallIn:
        return CallIn(copy.deepcopy(self.model, memo), self.precision, self.device, self.is_sharded)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (PLAIN_CALL, self.model)


def _in_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def prepare_model(
    model: torch.nn.Module, layout: Layout, parallel: ParallelConfig, mesh: Mesh, readings: Readings
) -> PreparedModel:
    """Rank 0's weights on every rank, spread as the layout says."""
    device = mesh.everyone.device
    before = dict(named_part(model).named_parameters())
    if parallel.compression.weights != "none" and not all(one.requires_grad for one in before.values()):
        raise ConfigError(
            f"parallel.compress has weights: {parallel.compression.weights}, and this model has frozen ones: the "
            "trained ones beside them would share their scales, which round them away",
            fix="delete weights from compress",
        )
    if layout.is_sharded and mesh.loss.size > 1:
        model.to(device)
        _share_first_weights(model, mesh.loss)
    engine = parallelize(model, layout, parallel, mesh, drives_passes=False)
    prepared = PreparedModel(engine, layout, engine.named_trainable(), readings)
    if layout.is_sharded:
        _refuse_copies(engine.bare)
    # On the instance: FSDP gathers weights inside of this call, DDP around it.
    set_call(engine.bare, CallIn(engine.bare, layout.precision, device, layout.is_sharded, prepared))
    now = dict(named_part(model).named_parameters())
    prepared.originals = [old for name, old in before.items() if now[name] is not old]
    prepared.replaced = {id(old): now[name] for name, old in before.items() if now[name] is not old}
    for old in prepared.originals:
        old.data = torch.empty(0)
    return prepared


def _refuse_copies(model: torch.nn.Module) -> None:
    """A shard in a pickle is of no use, and what torch says of it (classes that it cannot find) helps nobody."""

    def refuse(*_: Any) -> Any:
        raise ConfigError(
            "a sharded model cannot be pickled or copied: each rank has a part of it",
            fix="write on all ranks:   accelerator.save_model(model, folder)   or   accelerator.get_state_dict(model)",
        )

    for name in ("__reduce_ex__", "__deepcopy__"):
        object.__setattr__(model, name, refuse)


@torch.no_grad()
def _share_first_weights(model: torch.nn.Module, world: World) -> None:
    """Shards are cut from every rank's own weights: they must be one model's."""
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.data, group_src=0, group=world.group)


class PreparedOptimizer(torch.optim.Optimizer):
    """The same optimizer, which steps when a window is full and not before."""

    def __init__(self, inner: torch.optim.Optimizer, owner: Any) -> None:
        self.inner = inner
        self.owner = owner
        self.was_skipped = False
        self.is_unscaled = False

    def __getattr__(self, name: str) -> Any:
        return getattr(inner_of(self, name), name)

    def __deepcopy__(self, memo: dict[int, Any]) -> PreparedOptimizer:
        return PreparedOptimizer(copy.deepcopy(self.inner, memo), self.owner)

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickle of it holds the optimizer as it was given, and needs no duoka."""
        if any(isinstance(parameter, DTensor) for parameter in self.parameters()):
            raise ConfigError(
                "an optimizer of sharded weights cannot be pickled: each rank has a part of its state",
                fix="write on all ranks:   accelerator.save_state(folder)",
            )
        return copy.copy, (self.inner,)

    state = property(lambda self: self.inner.state)
    param_groups = property(lambda self: self.inner.param_groups)
    defaults = property(lambda self: self.inner.defaults)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)

    def add_param_group(self, group: dict[str, Any]) -> None:
        self.inner.add_param_group(group)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        return (p for group in self.inner.param_groups for p in group["params"])

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.inner

    @property
    def step_was_skipped(self) -> bool:
        """fp16's gradients overflowed at the last step, which changed nothing."""
        return self.was_skipped

    def train(self) -> None:
        self._say_mode("train")

    def eval(self) -> None:
        self._say_mode("eval")

    def _say_mode(self, mode: str) -> None:
        if hasattr(self.inner, mode):  # schedule-free optimizers have modes
            getattr(self.inner, mode)()

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.owner.sync_gradients:
            self.inner.zero_grad(set_to_none)
            self.owner.gradients_are_gone(self)

    def unscale(self, numerics: Numerics) -> None:
        if numerics.scaler.is_enabled() and not self.is_unscaled:
            numerics.scaler.unscale_(self.inner)
            self.is_unscaled = True

    def step(self, closure: Any = None) -> Any:
        if not self.owner.sync_gradients:
            return None
        answer = self.owner.step_now(self, closure)
        self.is_unscaled = False
        return answer

    def repoint(self, replaced: dict[int, torch.nn.Parameter]) -> None:
        """Take the parameters that sharding put in place of those that the optimizer was made with."""
        for group in self.inner.param_groups:
            moved = [p for p in group["params"] if replaced.get(id(p), p) is not p]
            if any(self.inner.state.get(p) for p in moved):
                raise ConfigError(
                    "the optimizer has stepped already, with weights that are whole; they are sharded now",
                    fix="prepare model and optimizer before the first step",
                )
            if moved and isinstance(self.inner, MuonAdamW):
                raise ConfigError(
                    "duoka's Muon steps on whole matrices, and the model is sharded",
                    fix="write   strategy='ddp'   or take another optimizer",
                )
            group["params"] = [replaced.get(id(p), p) for p in group["params"]]


@dataclass(frozen=True)
class Counting:
    """How often schedulers step: `times` for each optimizer step, or whenever they are told."""

    times: int = 1
    with_optimizer: bool = True
    is_unsaid: bool = False  # nobody said that schedules are counted in optimizer steps, and it makes a difference


class PreparedScheduler(torch.optim.lr_scheduler.LRScheduler):
    """The same scheduler, which counts optimizer steps: one for each, on any number of ranks."""

    def __init__(self, inner: Any, owner: Any) -> None:
        self.inner = inner
        self.owner = owner

    def __getattr__(self, name: str) -> Any:
        return getattr(inner_of(self, name), name)

    def __deepcopy__(self, memo: dict[int, Any]) -> PreparedScheduler:
        return PreparedScheduler(copy.deepcopy(self.inner, memo), self.owner)

    def __reduce__(self) -> tuple[Any, ...]:
        return copy.copy, (self.inner,)

    @property
    def scheduler(self) -> Any:
        return self.inner

    # What its base class defines is the inner one's too.
    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.inner.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)

    def get_last_lr(self) -> Any:
        return self.inner.get_last_lr()

    def get_lr(self) -> Any:
        return self.inner.get_lr()

    def step(self, *args: Any, **kwargs: Any) -> None:
        counting: Counting = self.owner.counting
        if not counting.with_optimizer:
            self.inner.step(*args, **kwargs)
        elif self.owner.sync_gradients and not self.owner.optimizer_step_was_skipped:
            for number in range(counting.times):
                # One that knows its end refuses to go beyond it; times for all processes may lead there.
                at_end = getattr(self.inner, "last_epoch", 0) >= getattr(self.inner, "total_steps", math.inf)
                if not (number and at_end):
                    self.inner.step(*args, **kwargs)


def inner_of(wrapper: Any, name: str) -> Any:
    """What is wrapped; while a copy is being made there is nothing yet."""
    if "inner" not in wrapper.__dict__:
        raise AttributeError(name)
    return wrapper.__dict__["inner"]


def check_all_prepared(parameters: Iterable[torch.nn.Parameter], known: set[int], who: str) -> None:
    """Parameters of no prepared model get no gradients of other ranks: the ranks would drift apart in silence."""
    if not all(id(p) in known for p in parameters):
        raise ConfigError(
            f"{who} has parameters that belong to no prepared model",
            fix="prepare the model too, and take model.parameters() after it:   model, optimizer = "
            "accelerator.prepare(model, optimizer)",
        )
