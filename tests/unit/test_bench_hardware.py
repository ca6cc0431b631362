"""`duoka bench hardware` writes what `duoka plan` reads."""

import json

import pytest
from click.testing import CliRunner

from duoka.bench import hardware
from duoka.cli.bench import command
from duoka.plan import catalog
from duoka.plan.catalog import hardware_key
from duoka.plan.hardware import read_machine


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    monkeypatch.setattr(hardware, "SIZES", (64, 128))
    monkeypatch.setattr(hardware, "TOUCHED_BYTES", 2**20)
    monkeypatch.setattr(hardware, "WRITTEN_BYTES", 2**20)
    monkeypatch.setattr(hardware, "PASSES_FOR_S", 0.0)
    monkeypatch.setattr(hardware, "DOCUMENTS", (5, 17))
    monkeypatch.setattr(hardware, "ROWS", 24)
    monkeypatch.chdir(tmp_path)


def test_what_is_measured_is_what_the_plan_takes(tmp_path, monkeypatch):
    path = tmp_path / "own" / "hardware.json"
    monkeypatch.setenv("DUOKA_HARDWARE", str(path))
    result = CliRunner().invoke(command, ["hardware", "--nproc", "1"], standalone_mode=False)
    assert result.return_value == 0, result.exception
    facts = json.loads(path.read_text(encoding="utf-8"))
    assert facts["fp32_flops"] == max(one["flops"] for one in facts["products"] if one["precision"] == "fp32")
    machine = read_machine(env={})
    cluster = catalog.local_cluster(machine, 1, 1)
    assert cluster.is_measured and cluster.device.fp32_flops == facts["fp32_flops"]
    assert cluster.device.memory_bytes_per_s == facts["memory_bytes_per_s"]
    if machine.num_cores > 1:
        assert 0 < cluster.device.threads_share == facts["threads_share"] <= 1
    assert cluster.device.fp32_attention == facts["fp32_attention"] > 0
    assert cluster.device.half_attention == facts["half_attention"] > 0
    assert cluster.device.half_trained == facts["half_trained"] > 0
    assert cluster.device.half_frozen == facts["half_frozen"] > 0
    assert cluster.disk_bytes_per_s == facts["disk_bytes_per_s"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["own"], "the disk's trial file is left behind"
    assert "guess" not in " ".join(cluster.notes)


def test_what_was_written_of_the_network_by_hand_is_measured_around(tmp_path):
    out, device = tmp_path / "hardware.json", hardware_key(read_machine(env={}))
    words = ["hardware", "--nproc", "1", "--json", "--output", str(out)]
    kept = {}
    for before in ({"device": device, "network_bytes_per_s": 1e8, "fp32_flops": 1.0}, {"device": "another",
                   "network_bytes_per_s": 1e8}, None):  # fmt: skip
        out.write_text(json.dumps(before) if before else "{", encoding="utf-8")
        assert CliRunner().invoke(command, words, standalone_mode=False).return_value == 0
        facts = json.loads(out.read_text(encoding="utf-8"))
        assert facts["fp32_flops"] > 1
        kept[str(before and before["device"])] = facts.get("network_bytes_per_s")
    assert kept == {device: 1e8, "another": None, "None": None}


def test_the_disk_that_is_asked_for_is_measured(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(hardware, "measure_disk", lambda folder: seen.append(folder) or 2e9)
    monkeypatch.setattr(hardware, "measure_offload", lambda folder: seen.append(folder) or 3e9)
    (tmp_path / "fast").mkdir()
    words = ["hardware", "--nproc", "1", "--output", str(tmp_path / "hardware.json"), "--disk", "fast"]
    result = CliRunner().invoke(command, words, standalone_mode=False)
    assert seen == [tmp_path / "fast"] * 2 and f"2 GB/s written in {tmp_path / 'fast'}" in result.output
    assert json.loads((tmp_path / "hardware.json").read_text())["offload_bytes_per_s"] == 3e9


def test_json_is_one_object(tmp_path):
    out = tmp_path / "hardware.json"
    words = ["hardware", "--nproc", "1", "--json", "--output", str(out)]
    result = CliRunner().invoke(command, words, standalone_mode=False)
    assert json.loads(result.output) == json.loads(out.read_text(encoding="utf-8"))
