"""A rank computes with as many threads as it was told, and none of them sleeps because others were there once.

OpenMP counts all threads that ever worked for it. Where one beside the steps (that of saves) had a team of its own,
there were more than cores, and from then on each operator of a step began with waking its threads.
"""

import os
import threading

import pytest
import torch
from test_any_split import YAML
from tiny import write_conversations
from worlds import run_world, train_jobs

from duoka.torch_private import side_thread


def threads_brought_by(work):
    """How many that Python did not start are there when it is done, and were not before."""
    before = set(os.listdir("/proc/self/task"))
    work()
    known = {str(thread.native_id) for thread in threading.enumerate()}
    return len(set(os.listdir("/proc/self/task")) - before - known)


@pytest.mark.parametrize(("device", "brought"), [("cpu", 0), ("cuda", 1)])
def test_a_thread_beside_steps_on_a_cpu_computes_alone(device, brought):
    run_world(1, work_aside, device, brought)


def work_aside(device, brought):
    torch.set_num_threads(2)
    thread, memory = side_thread("aside", torch.device(device)), torch.empty(2**22, dtype=torch.uint8)
    assert thread.submit(threads_brought_by, memory.zero_).result() == brought
    assert torch.get_num_threads() == 2
    assert threads_brought_by(memory.zero_) == 1, "the caller keeps its own"
    thread.shutdown()


def train_counted(jobs):
    from duoka.store.snapshot import HostBuffer

    torch.set_num_threads(2)
    torch.zeros(2**22).add_(1)  # the steps' own team is there before: they may begin it while the buffer is touched
    brought, touch = [], HostBuffer.touch
    HostBuffer.touch = lambda buffer, **how: brought.append(threads_brought_by(lambda: touch(buffer, **how)))
    train_jobs(jobs)
    assert brought == [0]


def test_what_saves_brings_no_threads_of_its_own(tiny_model, tmp_path):
    data = write_conversations(tmp_path / "chats.jsonl", 24, seed=3)
    yaml = tmp_path / "run.yaml"
    yaml.write_text(YAML.format(model=tiny_model, data=data, output=tmp_path / "out"), encoding="utf-8")
    run_world(1, train_counted, [(str(yaml), ["checkpoint={every: 1, async: true}"], str(tmp_path / "run"))])
