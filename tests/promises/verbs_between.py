"""What processes of test_verbs_numbers.py run of verbs between ranks: local steps, late exchanges, functions."""

import copy

import pytest
import torch


def weights_of(accelerator, model):
    return {name: tensor.tolist() for name, tensor in accelerator.get_state_dict(model).items()}


def close(ours, theirs, tolerance=1e-5):
    for name, wanted in theirs.items():
        got = torch.as_tensor(ours[name], dtype=torch.float64)
        assert float((got - wanted.double()).norm()) <= tolerance * float(wanted.double().norm().clamp(min=1e-3)), name


def step_alone(accelerator):
    """Local SGD: each rank steps by its own gradients, and every second step the ranks take the mean."""
    from duoka.accelerator.local_sgd import LocalSGD

    size, rank = accelerator.num_processes, accelerator.process_index
    inputs = torch.randn(4, size, 3, 2, generator=torch.Generator().manual_seed(4))
    torch.manual_seed(0)
    plain = torch.nn.Linear(2, 1)
    alone = [copy.deepcopy(plain).double() for _ in range(size)]
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.3))
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=True) as local:
        for step in inputs:
            accelerator.backward(model(step[rank]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            local.step()
    theirs = [torch.optim.SGD(one.parameters(), lr=0.3) for one in alone]
    for number, step in enumerate(inputs):
        for own, one, other in zip(step, alone, theirs, strict=True):
            one(own.double()).square().mean().backward()
            other.step()
            other.zero_grad()
        if number % 2:
            mean = [torch.stack(each).mean(0) for each in zip(*(list(m.parameters()) for m in alone), strict=True)]
            for one in alone:
                for parameter, value in zip(one.parameters(), mean, strict=True):
                    parameter.data.copy_(value)
    close(weights_of(accelerator, model), alone[0].state_dict())
    accelerator.free_memory()


def exchange_late(accelerator):
    """The backward pass exchanges, though the forward pass was inside of no_sync."""
    rank = accelerator.process_index
    torch.manual_seed(0)
    model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
    with accelerator.no_sync(model):
        loss = model(torch.full((1, 1), float(rank + 1))).mean()
    accelerator.trigger_sync_in_backward(model)
    accelerator.backward(loss)
    assert accelerator.unwrap_model(model).weight.grad.item() == pytest.approx(1.5)
    accelerator.free_memory()


def speak_without_it(accelerator):
    from duoka.accelerator import utils

    size, rank = accelerator.num_processes, accelerator.process_index
    state = utils.PartialState()
    assert (state.num_processes, state.process_index, str(state.distributed_type)) == (size, rank, "MULTI_CPU")
    with state.split_between_processes(list(range(4))) as mine:
        assert utils.gather_object(mine) == list(range(4))
    own = torch.tensor([float(rank)])
    assert utils.gather(own).tolist() == [0, 1] and utils.reduce(own).tolist() == [0.5]
    assert accelerator.reduce(own).tolist() == [1] and utils.broadcast(own).tolist() == [0]
    torch.manual_seed(rank)
    utils.synchronize_rng_states(["torch"])
    assert len(set(utils.gather(torch.rand(1)).tolist())) == 1
    utils.set_seed(1, device_specific=True)
    assert len(set(utils.gather(torch.rand(1)).tolist())) == size
