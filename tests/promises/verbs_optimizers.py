"""Optimizers as people write them, and what a process does with one: steps, saves, goes on beside a fresh copy."""

import torch
from verbs import Words, build, collate, count_over, write


class OwnOptimizer(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.step_of(p, group["lr"])


class MeanOfThree(OwnOptimizer):
    """Steps by the mean of the last three gradients, kept in a list."""

    def step_of(self, p, lr):
        last = self.state[p].setdefault("last", [])
        last.append(p.grad.clone())
        del last[:-3]
        p.sub_(sum(last) / len(last) * lr)


class ByShards(OwnOptimizer):
    """Momentum of each rank's own part of a weight, as kernels that know no DTensor have it; some of it in a list."""

    def step_of(self, p, lr):
        weight, grad = (one.to_local() if hasattr(one, "to_local") else one for one in (p, p.grad))
        state = self.state[p]
        fast = state.setdefault("fast", torch.zeros_like(weight))
        (slow,) = state.setdefault("slow", [torch.zeros_like(weight)])
        fast.mul_(0.8).add_(grad)
        slow.mul_(0.95).add_(grad)
        weight.sub_((fast + slow) * lr)


class OfRows(OwnOptimizer):
    """A sum of squares per row, as the DTensor that torch makes of it."""

    def step_of(self, p, lr):
        squares = (p.grad * p.grad).flatten(1).sum(1) if p.ndim > 1 else p.grad * p.grad
        state = self.state[p]
        state["rows"] = squares if "rows" not in state else state["rows"] + squares
        scale = state["rows"].sqrt() + 1.0
        p.sub_(p.grad / (scale[:, None] if p.ndim > 1 else scale) * lr)


class Drifting(ByShards):
    """Keeps a norm of each rank's own part: nobody can say what that is on another rank."""

    def step_of(self, p, lr):
        super().step_of(p, lr)
        self.state[p]["norms"] = self.state[p]["fast"].norm().repeat(2)


KINDS = {"list": MeanOfThree, "shards": ByShards, "rows": OfRows, "drifting": Drifting}


def steps(accelerator, model, optimizer, numbers):
    words, losses = Words(), []
    for number in numbers:
        batch = collate([words[2 * number], words[2 * number + 1]])
        loss = count_over(model(batch["ids"]), batch["labels"])
        accelerator.backward(loss, sum_over=(batch["labels"] != -100).sum())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "sum")))
    return losses


def go_on_with(pairs, folder):
    """(optimizer, strategy to save under, strategy to go on under) in turn: the losses of both, or what refused."""
    from duoka import Accelerator
    from duoka.errors import ConfigError

    for kind, before, after in pairs:
        said = {"whole": None, "again": None, "refused": None}
        try:
            for what, strategy in (("whole", before), ("again", after)):
                accelerator = Accelerator(strategy=strategy)
                model, optimizer = accelerator.prepare(*build(kind=KINDS[kind]))
                if what == "whole":
                    steps(accelerator, model, optimizer, range(4))
                    accelerator.save_state(f"{folder}/{kind}-{before}-{after}")
                else:
                    accelerator.load_state(f"{folder}/{kind}-{before}-{after}")
                said[what] = steps(accelerator, model, optimizer, range(4, 8))
                accelerator.free_memory()
        except ConfigError as error:
            said["refused"] = str(error)
        except Exception as error:  # noqa: BLE001  told by the test, beside the other pairs
            said["broken"] = f"{type(error).__name__}: {error}"
        write(folder, f"{kind}-{before}-{after}", accelerator.process_index, said)
        accelerator.free_memory()
