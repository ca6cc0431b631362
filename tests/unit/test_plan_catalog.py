"""Devices, networks and layouts by name: as people, clouds and nvidia-smi spell them."""

import csv
import json
from dataclasses import replace
from importlib.resources import files

import pytest

from duoka.config.schema import LoraConfig
from duoka.errors import ConfigError
from duoka.plan import catalog
from duoka.plan.catalog import cluster_of, devices, find_device, hardware_key, match_gpu, networks, parse_cluster
from duoka.plan.hardware import Gpu, Machine
from duoka.plan.layout import Layout, parse_layout
from duoka.plan.memory import estimate_memory
from duoka.plan.packed_base import BYTES
from duoka.plan.recipe import Work, shares, static_memory
from duoka.plan.shape import demo_shape, shape_from_config

GIB = 2**30
LAPTOP = Machine(4, 16 * GIB, 12 * GIB, cpu_name="A CPU")


def test_the_catalog_is_whole_and_every_row_says_where_it_comes_from():
    assert len(devices()) >= 30
    for device in devices().values():
        assert device.source and device.link in networks() and device.network in networks(), device.name
        assert device.half_flops >= device.fp32_flops > 1e12 and device.memory_bytes >= 8 * GIB, device.name
    for network in networks().values():
        assert network.source and network.bytes_per_s > 1e8 and 0 < network.latency_s < 1e-3
    text = (files("duoka.plan") / "tables" / "devices.csv").read_text(encoding="utf-8")
    assert {len(row) for row in csv.reader(text.splitlines())} == {14}


@pytest.mark.parametrize(
    ("text", "nodes", "per_node", "device", "network"),
    [
        ("H100", 1, 1, "H100-80G", "nvlink4"),
        ("8xA100-80G", 1, 8, "A100-80G", "nvlink3"),
        ("2x8xH100-80G", 2, 8, "H100-80G", "NDR"),
        ("48x8xA100-80G@4xHDR", 48, 8, "A100-80G", "HDR"),
        ("2 x 4 x rtx 4090 @ 10GbE", 2, 4, "RTX4090", "10GbE"),
        ("4xRTX3090@pcie3", 1, 4, "RTX3090", "pcie3"),
    ],
)
def test_machines_are_named_in_one_word(text, nodes, per_node, device, network):
    cluster = parse_cluster(text)
    assert (cluster.num_nodes, cluster.per_node, cluster.device.name) == (nodes, per_node, device)
    assert (cluster.network if nodes > 1 else cluster.link).name == network
    assert cluster.machine().device == "cuda"


@pytest.mark.parametrize(
    ("text", "word"), [("8xH10O", "did you mean"), ("0xH100", "no description"), ("H100@warp", "no network")]
)
def test_a_machine_that_is_not_known_is_refused_with_the_nearest(text, word):
    with pytest.raises(ConfigError, match=word):
        parse_cluster(text)


@pytest.mark.parametrize(
    ("name", "mib", "row"),
    [
        ("NVIDIA H100 80GB HBM3", 81559, "H100-80G"),
        ("NVIDIA A100-SXM4-40GB", 40960, "A100-40G"),
        ("NVIDIA A100 80GB PCIe", 81920, "A100-PCIE-80G"),
        ("NVIDIA GeForce RTX 4090", 24564, "RTX4090"),
        ("Tesla T4", 15360, "T4"),
        ("NVIDIA H200", 143771, "H200-141G"),
        ("NVIDIA RTX 6000 Ada Generation", 49140, "RTX6000Ada"),
        ("NVIDIA GeForce RTX 4060 Ti", 16380, "RTX4060Ti-16G"),
    ],
)
def test_a_card_that_nvidia_smi_reports_is_found(name, mib, row):
    found = match_gpu(Gpu(name, mib << 20, mib << 20, 8.0))
    assert found is not None and found.name == row


def test_an_unknown_card_is_planned_for_with_a_word_of_warning():
    gpu = Gpu("NVIDIA Weird 9", 40 << 30, 40 << 30, 9.0)
    cluster = cluster_of(Machine(8, 64 * GIB, 60 * GIB, gpus=(gpu,)), 1, 1)
    assert "not in the plan's table" in cluster.notes[0]
    assert find_device("h100").name == "H100-80G"


def test_what_was_measured_here_overrides_and_elsewhere_does_not(tmp_path):
    own = {"device": hardware_key(LAPTOP), "fp32_flops": 1.5e11, "link_bytes_per_s": 2e9, "link_latency_s": 1e-4}
    path = tmp_path / "hardware.json"
    path.write_text(json.dumps(own), encoding="utf-8")
    cluster = cluster_of(LAPTOP, 1, 2, catalog.read_hardware(path))
    assert (cluster.device.fp32_flops, cluster.link.bytes_per_s, cluster.is_measured) == (1.5e11, 2e9, True)
    shares = [
        cluster_of(
            replace(LAPTOP, num_cores=16),
            1,
            ranks,
            own | {"device": f"{LAPTOP.cpu_name}, 16 cores", "threads_share": 0.5},
        )
        for ranks in (1, 4, 16)
    ]
    assert [round(one.device.threads_share, 3) for one in shares] == [0.5, 0.707, 1.0], "half is lost in four doublings"
    other = cluster_of(LAPTOP, 1, 2, own | {"device": "another"})
    assert not other.is_measured and "guess" in other.notes[0]
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"hardware\.json"):
        catalog.read_hardware(path)


def test_the_network_between_machines_is_what_was_written_by_hand():
    """Of cards that were never measured nothing else changes: their peaks are the table's, not "measured"."""
    gpu = Gpu("NVIDIA GeForce RTX 3090", 24 << 30, 24 << 30, 8.6)
    machine = Machine(8, 64 * GIB, 60 * GIB, gpus=(gpu,) * 4)
    own = {"device": hardware_key(machine), "network_bytes_per_s": 1.25e8, "network_latency_s": 6e-5}
    plain, told = cluster_of(machine, 2, 4), cluster_of(machine, 2, 4, own)
    assert (told.network.bytes_per_s, told.network.latency_s, told.num_nics) == (1.25e8, 6e-5, 1)
    assert (told.device, told.link, told.is_measured) == (plain.device, plain.link, False)
    assert cluster_of(machine, 2, 4, own | {"half_flops": 6e13}).device.measured


@pytest.mark.parametrize("name", ["single", "ddp8", "fsdp8·tp2", "hsdp2x8", "zero1x8·tp4·pp12", "zero2x4·sp2"])
def test_a_layout_comes_back_from_its_name(name):
    layout = parse_layout(name)
    assert layout.name == name
    assert Layout.from_json(layout.to_json()) == layout


def test_blooms_384_gpus_are_8_data_ranks_of_48():
    layout = parse_layout("zero1x8.tp4.pp12")
    assert (layout.dp, layout.world_size) == (8, 384)
    assert layout.is_trainable


@pytest.mark.parametrize("text", ["fsdp", "magic8", "fsdp8·xp2", "hsdp16", "fsdp2x8", "fsdp8·tp2·tp2"])
def test_what_is_no_layout_is_refused(text):
    if text == "fsdp":
        assert parse_layout(text).dp == 1
        return
    with pytest.raises(ValueError):
        parse_layout(text)


def test_axes_divide_what_a_rank_holds():
    shape = demo_shape()
    work = Work(shape, None, "cuda")
    whole = static_memory(work, parse_layout("ddp2")).total_bytes
    assert static_memory(work, parse_layout("ddp2·tp3")).total_bytes == pytest.approx(whole / 3, rel=1e-3)
    first, last = shares(work, parse_layout("ddp2·pp3"), accumulation=8)
    # A head that is worth eight layers leaves its stage few of them.
    assert (first.num_layers, last.num_layers, first.in_flight, last.in_flight) == (12, 5, 3, 1)
    assert last.has_head and not first.has_head
    assert first.trainable == 12 * shape.num_per_layer + shape.num_embedding
    assert last.trainable == 5 * shape.num_per_layer + shape.num_embedding  # a tied head on the last stage is a copy
    tokens = 4096
    peaks = [estimate_memory(work, parse_layout(name), tokens).peak_bytes for name in ("ddp2", "ddp2·sp2", "ddp2·tp3")]
    assert peaks == sorted(peaks, reverse=True)


def test_optimizers_and_quantized_bases_have_their_bytes():
    llama = shape_from_config(
        {
            "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
            "num_attention_heads": 32, "vocab_size": 32000,
        }
    )  # fmt: skip

    def optimizer(name):
        row = static_memory(Work(llama, None, "cuda", optimizer=name), Layout(precision="bf16"))
        return row.optimizer_bytes / llama.num_parameters

    assert optimizer("adamw") == 8 and optimizer("adamw8bit") < 2.1
    assert 4 < optimizer("muon") < 4.3  # embedding and head keep two moments
    base = static_memory(Work(llama, LoraConfig(), "cuda", frozen_bits=4), Layout(precision="bf16")).weights_bytes
    ends = 2 * 32000 * 4096  # embedding and head are not packed
    assert base == pytest.approx(0.53 * (llama.num_parameters - ends) + 2 * ends, rel=0.03)


def test_a_packed_base_is_shared_out_but_for_its_scales():
    shape = demo_shape()
    work = Work(shape, LoraConfig(), "cuda", frozen_bits=4)
    whole, shared = (
        static_memory(work, Layout(strategy=name, precision="bf16", dp=4, shard=4)).weights_bytes
        for name in ("ddp", "fsdp")
    )
    packed = shape.num_block_linear
    beside = whole - BYTES[4] * packed
    assert shared == pytest.approx(beside / 4 + packed * (0.5 / 4 + BYTES[4] - 0.5), rel=1e-3)


@pytest.mark.parametrize(
    ("facts", "measured"),  # GFLOP/s of a core of virtual machines in products, fp32 and bf16
    [
        ({"cpu_bf16": ""}, (69, None)),
        ({"cpu_bf16": "avx512_bf16", "mkl_is_slow": True, "halves_avx512": True}, (95, 221)),  # Zen 4
        ({"cpu_bf16": "avx512_bf16", "mkl_is_slow": True}, (245, 480)),  # Zen 5
    ],
)
def test_a_cpus_guess_is_near_what_such_cpus_were_measured_at(facts, measured):
    machine = replace(LAPTOP, **facts)
    device = cluster_of(machine, 1, 1).device
    for guess, found in zip((device.fp32_flops, device.half_flops), measured, strict=True):
        assert found is None or 0.8 < guess / LAPTOP.num_cores / (found * 1e9) < 1.25
    hindered = cluster_of(replace(machine, bf16_hindrance="a setting"), 1, 1).device
    assert hindered.half_flops < hindered.fp32_flops
