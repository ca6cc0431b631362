"""AdamW with its moments in a file: torch's numbers, checksums, faults, and what a plan says of it."""

import errno
import os
from pathlib import Path

import pytest
import torch

import duoka.optim.disk
from duoka.config.load import load_config
from duoka.config.schema import OptimConfig, RunConfig
from duoka.errors import StorageError
from duoka.optim.build import build_optimizer, optimizer_tensors
from duoka.optim.disk_file import DiskFile, Slot, checksum, find_on_disk
from duoka.plan.hardware import Machine
from duoka.plan.report import make_plan
from duoka.plan.shape import demo_shape
from duoka.plan.task import load_of
from duoka.units import format_bytes

SHAPES = [(300, 211), (7,), (0, 5), (1000, 333), (64,), (5,)]
GIB = 2**30


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    monkeypatch.setattr(duoka.optim.disk, "SLICE_BYTES", 64 * 1024)


def made(**where):
    torch.manual_seed(0)
    named = {f"p{place}": torch.nn.Parameter(torch.randn(shape)) for place, shape in enumerate(SHAPES)}
    return named, build_optimizer(named, OptimConfig(weight_decay=0.1), **where)


def learn(named, optimizer, step):
    torch.manual_seed(step)
    for place, parameter in enumerate(named.values()):
        grad = torch.randn(parameter.shape)
        parameter.grad = grad if (place + step) % 4 else None  # some get none in some steps
    optimizer.step()


def test_moments_on_the_disk_give_torchs_bits(tmp_path: Path) -> None:
    ways = [made(), made(on_host=True), made(on_disk=tmp_path)]
    ways += [made(on_host=True, share=0.4), made(on_disk=tmp_path, share=0.4), made(on_disk=tmp_path, share=1e-9)]
    for step in range(5):
        for named, optimizer in ways:
            learn(named, optimizer, step)
        plain, *others = (optimizer_tensors(optimizer, named) | named for named, optimizer in ways)
        for other in others:
            assert plain.keys() == other.keys()
            assert [name for name in plain if not plain[name].equal(other[name])] == []
    assert list(tmp_path.iterdir()) == []


def test_a_share_of_it_lies_on_the_disk_and_the_rest_in_memory(tmp_path: Path) -> None:
    sizes = {share: made(on_disk=tmp_path, share=share)[1].file.size_bytes for share in (1.0, 0.2, 1e-9)}
    assert sizes[0.2] < 0.25 * sizes[1.0] and sizes[1e-9] <= 4096
    named, optimizer = made(on_disk=tmp_path, share=0.2)
    learn(named, optimizer, 1)
    moments = {name: one for name, one in optimizer_tensors(optimizer, named).items() if "exp_avg" in name}
    near = [one for one in moments.values() if one.numel() and find_on_disk(one) is None]
    assert 0.75 < sum(one.numel() for one in near) / sum(one.numel() for one in moments.values()) < 1


def test_memory_holds_a_few_slices_of_it(tmp_path: Path) -> None:
    _, optimizer = made(on_disk=tmp_path)
    assert optimizer.file.size_bytes > 20 * 2 * 64 * 1024
    assert optimizer.buffer_bytes == 4 * 2 * 64 * 1024


def test_what_is_loaded_is_what_the_next_step_reads(tmp_path: Path) -> None:
    (named, plain), (other, disk) = made(), made(on_disk=tmp_path)
    learn(named, plain, 0)
    with torch.no_grad():
        for name, tensor in optimizer_tensors(disk, other).items():
            tensor.copy_(optimizer_tensors(plain, named)[name])
        for name, parameter in other.items():
            parameter.copy_(named[name])
    learn(named, plain, 1)
    learn(other, disk, 1)
    assert [name for name in named if not named[name].equal(other[name])] == []


def test_reading_ahead_changes_no_bit_and_takes_no_more_room_than_it_is_given(tmp_path: Path, monkeypatch) -> None:
    (named, plain), (other, disk) = made(), made(on_disk=tmp_path)
    asked: list[int] = []
    will_need = DiskFile.will_need
    monkeypatch.setattr(DiskFile, "will_need", lambda *of: asked.append(of[2]) or will_need(*of))
    read, cached = DiskFile.read, []
    monkeypatch.setattr(DiskFile, "read", lambda *of, **how: cached.append(how["cached"]) or read(*of, **how))
    for step in range(6):
        asked.clear()
        cached.clear()
        disk.read_ahead(room := 2 * 64 * 1024 * (0, 3, 1000)[step % 3])
        if step == 5:  # another hand changes what was asked for
            for optimizer, parameters in (disk, other), (plain, named):
                for name, tensor in optimizer_tensors(optimizer, parameters).items():
                    if "exp_avg" in name:
                        tensor.mul_(0.5)
        for one in (named, plain), (other, disk):
            learn(*one, 4 * step)  # each time the same parts
        assert sum(asked) <= room and (sum(asked) > 0) == (room > 0 and step > 0)
        if step % 3 == 2:
            assert sum(cached) > len(cached) / 2
    assert [name for name in named if not named[name].equal(other[name])] == []


def test_gradients_are_shortened_as_they_are_used(tmp_path: Path) -> None:
    """The bits of clipping first, whatever lies where."""
    ways = [made(), made(on_disk=tmp_path), made(on_disk=tmp_path, share=0.4), made(on_host=True)]
    for step, factor in enumerate([None, torch.tensor(0.37), None, torch.tensor(0.011)]):
        for named, optimizer in ways:
            if optimizer is not ways[0][1]:
                optimizer.factor = factor
            torch.manual_seed(step)
            for parameter in named.values():
                parameter.grad = torch.randn(parameter.shape)
                if factor is not None and optimizer is ways[0][1]:
                    parameter.grad.mul_(factor)
            optimizer.step()
    for named, optimizer in ways[1:]:
        assert [name for name in named if not named[name].equal(ways[0][0][name])] == []
        optimizer.factor = torch.tensor(0.5)
        optimizer.zero_grad()  # a step that was discarded
        assert optimizer.factor is None


def test_a_slice_that_comes_back_changed_is_found(tmp_path: Path) -> None:
    named, optimizer = made(on_disk=tmp_path)
    learn(named, optimizer, 0)
    optimizer.settle()
    page = Slot(4096)
    optimizer.file.read(0, page.part(0, 4096))
    page.bytes[100] ^= 4
    optimizer.file.write(0, page.part(0, 4096))
    with pytest.raises(StorageError, match="other than it was written") as caught:
        learn(named, optimizer, 1)
    assert str(tmp_path) in str(caught.value) and caught.value.exit_code == 6


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_an_error_of_the_disk_is_a_storage_error(tmp_path: Path, monkeypatch, call: str) -> None:
    named, optimizer = made(on_disk=tmp_path)
    learn(named, optimizer, 0)

    def fails(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, call, fails)
    with pytest.raises(StorageError, match="Input/output error"):
        learn(named, optimizer, 1)
        optimizer.settle()


def test_a_full_disk_says_what_is_needed(tmp_path: Path, monkeypatch) -> None:
    def is_full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", is_full)
    with pytest.raises(StorageError) as caught:
        DiskFile(tmp_path, 5 * GIB, "the optimizer's state")
    assert "does not fit on the disk" in str(caught.value) and f"{format_bytes(5 * GIB)} needed" in str(caught.value)


def test_a_system_that_cannot_reserve_room_gives_the_size_where_the_disk_has_it(tmp_path: Path, monkeypatch) -> None:
    """macOS has no posix_fallocate: `duoka bench hardware` ended there in a traceback."""
    monkeypatch.delattr(os, "posix_fallocate")
    file, page = DiskFile(tmp_path, 3 * 4096, "the optimizer's state"), Slot(4096)
    file.read(2 * 4096, page.part(0, 4096))
    assert not page.bytes.any() and file.mapped().shape == (3 * 4096,)
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with pytest.raises(StorageError, match="does not fit on the disk"):
        DiskFile(tmp_path, 2 * free, "the optimizer's state")


def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "fast").write_text("")
    with pytest.raises(StorageError, match="cannot be kept"):
        DiskFile(tmp_path / "fast", 4096, "the optimizer's state")


def test_without_direct_io_and_unnamed_files_it_is_the_same(tmp_path: Path, monkeypatch) -> None:
    """As on file systems that know neither, such as some network ones."""
    real = os.open

    def open_named(path, flags, *more):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no unnamed files here")
        return real(path, flags, *more)

    monkeypatch.setattr(os, "open", open_named)
    monkeypatch.setattr(duoka.optim.disk_file, "_DIRECT", 0)
    (named, plain), (other, disk) = made(), made(on_disk=tmp_path)
    for step in range(2):
        learn(named, plain, step)
        learn(other, disk, step)
    assert not disk.file.is_direct and list(tmp_path.iterdir()) == []
    assert [name for name in named if not named[name].equal(other[name])] == []


def test_tensors_on_the_disk_are_known_by_their_place(tmp_path: Path) -> None:
    named, optimizer = made(on_disk=tmp_path)
    moment = optimizer.saved_state(named["p3"])["exp_avg"]
    found = find_on_disk(moment[2])
    assert found is not None and found[0] is optimizer.file
    values = torch.arange(333, dtype=torch.float32)
    found[0].write_tensor(found[1], values.view(torch.uint8))
    assert moment[2].equal(values)
    back = torch.empty(333 * 4, dtype=torch.uint8)
    found[0].read_tensor(found[1], back)
    assert back.view(torch.float32).equal(values)
    assert find_on_disk(torch.zeros(3)) is None


def test_a_checksum_sees_every_bit_and_every_shift() -> None:
    page = Slot(3 * 4096)
    page.bytes.copy_(torch.randint(0, 256, (3 * 4096,), dtype=torch.uint8))
    whole = checksum(page.part(0, 3 * 4096))
    for place in (0, 4095, 4096, 3 * 4096 - 1):
        page.bytes[place] ^= 128
        assert checksum(page.part(0, 3 * 4096)) != whole
        page.bytes[place] ^= 128
    assert checksum(page.part(0, 3 * 4096)) == whole
    page.bytes.copy_(page.bytes.roll(8))
    assert checksum(page.part(0, 3 * 4096)) != whole


# --- config and plan ---


def config(offload, **parallel):
    data = {"train": ["identity"], "max_length": 128}
    return RunConfig.model_validate({"model": "demo", "data": data, "parallel": {"offload": offload, **parallel}})


def test_a_block_that_says_no_more_than_a_word_is_the_word() -> None:
    assert config({"optimizer": "host"}).parallel == config("optimizer").parallel
    assert config({"params": "host"}, strategy="fsdp").parallel == config("params", strategy="fsdp").parallel
    assert config({}).parallel == config("none").parallel
    assert str(config({"optimizer": "disk"}).parallel.offload) == "optimizer: disk"


def test_a_block_is_resolved_and_read_again(tmp_path: Path) -> None:
    from duoka.config.load import resolved_yaml

    written = tmp_path / "a.yaml"
    written.write_text(
        "model: demo\ndata: {train: [identity]}\nparallel: {offload: {optimizer: disk, folder: /fast}}\n"
    )
    loaded = load_config(str(written))
    again = tmp_path / "b.yaml"
    again.write_text(resolved_yaml(loaded))
    assert load_config(str(again)).config.parallel == loaded.config.parallel


def test_the_plan_takes_the_state_out_of_memory_and_asks_the_disk_for_it() -> None:
    def plan(offload, free=None, ranks=1):
        machine = Machine(2, 64 * GIB, 60 * GIB, disk_free_bytes=free)
        return make_plan(config(offload), demo_shape(), machine, ranks)

    moments = 8 * demo_shape().num_parameters
    without, with_disk = plan("none"), plan({"optimizer": "disk"}, 100 * GIB)
    assert with_disk.disk.needed_bytes == moments and with_disk.verdict == "fits"
    saved = without.memory.moments["loss"] - with_disk.memory.moments["loss"]
    assert saved == moments - with_disk.memory.parts["disk buffers"]
    assert with_disk.speed.parts["disk"] > 0 and with_disk.speed.step_s > without.speed.step_s
    short = plan({"optimizer": "disk"}, moments // 2)
    refusal = short.refusal()
    assert refusal is not None and refusal.exit_code == 4
    assert f"needs {format_bytes(moments)}" in str(refusal) and format_bytes(moments // 2) in str(refusal)
    # Replicas have a copy each, on the disk that they share.
    assert plan({"optimizer": "disk"}, 100 * GIB, ranks=2).disk.needed_bytes == 2 * moments


def test_weights_and_gradients_cost_the_disk_nothing_where_memory_holds_their_files() -> None:
    def moved(memory_bytes):
        machine = Machine(2, memory_bytes, memory_bytes, disk_free_bytes=100 * GIB)
        plan = make_plan(config({"params": "disk"}, strategy="fsdp"), demo_shape(), machine, 1)
        return plan.disk_moved_bytes, load_of(plan.task, plan.layout).accumulation

    size = 4 * demo_shape().num_parameters
    roomy, _ = moved(64 * GIB)
    assert roomy == pytest.approx(2 * 2 * size, rel=1e-3)  # both moments, both ways
    short, passes = moved(3 * size)
    assert short == pytest.approx(roomy + 2 * size * (2 * passes + 2), rel=1e-3)


def test_a_state_of_torch_s_is_refused(tmp_path):
    """It would be used in place of the file's, and its groups (the learning rate) by nobody."""
    _, plain = made()
    _, optimizer = made(on_disk=tmp_path)
    with pytest.raises(TypeError, match="in place"):
        optimizer.load_state_dict(plain.state_dict())
