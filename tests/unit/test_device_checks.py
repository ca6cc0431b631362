"""Cards, links and the GPUs' state by what the tools say.

Texts of nvidia-smi and the kernel are FIXTURES in the form of several generations of GPUs and drivers: no GPU was
looked at here.
"""

from __future__ import annotations

from typing import Any

import pytest

from duoka.cluster.compare_devices import DEVICE_COMPARISONS, read_links, read_xid
from duoka.cluster.findings import NodeFinding, Survey
from duoka.cluster.node_probe import GPU_STATE, devices

# H100 and H200 by NVLink on all pairs, with cards behind the GPUs' columns.
TOPO_NVLINK = """\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tNV18\tNV18\tPIX\tSYS\t0-51\t0\t\tN/A
GPU1\tNV18\t X \tNV18\tNV18\tNODE\tSYS\t0-51\t0\t\tN/A
GPU2\tNV18\tNV18\t X \tNV18\tSYS\tPIX\t52-103\t1\t\tN/A
GPU3\tNV18\tNV18\tNV18\t X \tSYS\tNODE\t52-103\t1\t\tN/A
NIC0\tPIX\tNODE\tSYS\tSYS\t X \tSYS
NIC1\tSYS\tSYS\tPIX\tNODE\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
"""
# Four GPUs of a workstation without NVLink, on two sockets; an older driver.
TOPO_PCIE = """        GPU0    GPU1    GPU2    GPU3    CPU Affinity    NUMA Affinity
GPU0     X      PHB     SYS     SYS     0-15    0
GPU1    PHB      X      SYS     SYS     0-15    0
GPU2    SYS     SYS      X      PIX     16-31   1
GPU3    SYS     SYS     PIX      X      16-31   1
"""
GOOD = "0, Disabled, Default, 0, 0x0000000000000001, 16, 16, 700.00, 700.00, 1980, 1980, 1980\n"
CONSUMER = "0, [N/A], Default, [N/A], 0x0000000000000000, 16, 16, 450.00, 450.00, [N/A], [N/A], 3105\n"
XID_79 = "[ 1234.5] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
XID_31 = "[Sun Nov 22 10:00:00 2026] NVRM: Xid (PCI:0000:86:00): 31, pid=4711, name=python, Ch 00000008, MMU Fault"
XID_63 = "[ 99.1] NVRM: Xid (PCI:0000:86:00): 63, Row Remapper: New row (0x1) marked for remapping"
CARD = {"operstate": "up", "mtu": "1500", "speed": "10000"}
FACTS: dict[str, Any] = {
    "nics": {"lo": {"operstate": "unknown", "mtu": "65536"}, "eth0": CARD, "docker0": {**CARD, "mtu": "1"}},
    "ipv6": True, "infiniband": {}, "memlock": 65536, "governor": "", "gpu_state": "", "gpu_apps": "", "topology": "",
    "xid": [], "env": {},
}  # fmt: skip
IB = {"mlx5_0:1": {"state": "4: ACTIVE", "rate": "400 Gb/sec (4X NDR)"}}


def find(others: dict[str, Any] | None = None, **changes: Any) -> list[NodeFinding]:
    """What is said of three machines, of which c differs; `others` is what a and b have."""
    facts = {name: {**FACTS, **(others or {})} for name in "abc"}
    facts["c"] = {**facts["c"], **changes}
    survey = Survey(facts, "/w", 0.0, 0.0, {name: f"ssh {name}" for name in "abc"})
    return [one for comparison in DEVICE_COMPARISONS for one in comparison(survey)]


def bad(others: dict[str, Any] | None = None, **changes: Any) -> list[tuple[str, str, str]]:
    return [
        (one.severity, one.check, one.nodes.get("c", ""))
        for one in find(others, **changes)
        if one.severity in ("warn", "fail")
    ]


def test_machines_alike_have_no_finding() -> None:
    gpus = {"gpu_state": GOOD * 8, "topology": TOPO_NVLINK, "infiniband": IB, "memlock": -1, "xid": [XID_31]}
    assert not bad() and not bad(gpus) and not bad({"gpu_state": CONSUMER})
    said = {one.check: one.nodes["all"] for one in find(gpus)}
    assert (
        said["GPU links"] == "NV18"
        and said["gpu state"].startswith("24 GPUs")
        and "up to 1980 MHz" in said["gpu state"]
    )


@pytest.mark.parametrize(
    ("others", "changes", "expected"),
    [
        ({}, {"env": {"NCCL_SOCKET_IFNAME": "ens5"}},
         ("fail", "network card", "NCCL_SOCKET_IFNAME=ens5: there are lo, eth0, docker0")),
        ({}, {"env": {"GLOO_SOCKET_IFNAME": "eth0"}, "nics": {"eth0": {**CARD, "operstate": "down"}}},
         ("fail", "network card", "GLOO_SOCKET_IFNAME=eth0: it is down")),
        ({}, {"env": {"NCCL_SOCKET_IFNAME": "^docker0,eth"}},
         ("fail", "network card", "NCCL_SOCKET_IFNAME=^docker0,eth: it leaves no card")),
        ({}, {"nics": {"eth0": {**CARD, "mtu": "9000"}}}, ("warn", "mtu", "9000")),
        ({}, {"ipv6": False}, ("warn", "ipv6", "IPv4 alone")),
        ({"governor": "performance"}, {"governor": "powersave"}, ("warn", "cpu governor", "powersave")),
        ({"infiniband": IB, "memlock": -1}, {"infiniband": {}}, ("fail", "infiniband", "none")),
        ({"infiniband": IB, "memlock": -1},
         {"infiniband": {"mlx5_0:1": {"state": "1: DOWN", "rate": "400 Gb/sec (4X NDR)"}}},
         ("warn", "infiniband", "mlx5_0:1 1: DOWN")),
        ({"infiniband": IB, "memlock": -1}, {"memlock": 65536}, ("fail", "locked memory", "64 KiB")),
        ({"gpu_state": GOOD}, {"gpu_state": GOOD.replace("Disabled", "Enabled")}, ("warn", "MIG", "gpu 0: on")),
        ({"gpu_state": GOOD}, {"gpu_state": GOOD.replace("Default", "Prohibited")},
         ("fail", "compute mode", "gpu 0: Prohibited")),
        ({"gpu_state": GOOD}, {"gpu_state": GOOD + GOOD.replace("0, Disabled, Default, 0", "1, Disabled, Default, 3")},
         ("fail", "GPU memory", "gpu 1: 3 uncorrected errors")),
        ({"gpu_state": GOOD}, {"gpu_state": GOOD.replace("0x0000000000000001", "0x0000000000000048")},
         ("warn", "throttling", "gpu 0: hardware slowdown, heat (hardware)")),
        ({"gpu_state": GOOD}, {"gpu_state": GOOD.replace("16, 16", "8, 16")}, ("warn", "PCIe lanes", "gpu 0: 8 of 16")),
        ({"gpu_state": GOOD}, {"gpu_state": GOOD.replace("700.00, 700.00", "350.00, 700.00")},
         ("warn", "power limit", "gpu 0: 350 W of 700 W")),
        ({"gpu_state": GOOD}, {"gpu_state": GOOD.replace("1980, 1980, 1980", "1500, 1755, 1980")},
         ("warn", "clocks", "gpu 0: 1500 MHz where 1755 is usual and 1980 the most")),
        ({"gpu_state": GOOD}, {"gpu_state": GOOD.replace("0x0000000000000001", "0x0000000000000002")},
         ("warn", "clocks", "gpu 0: a setting holds it below 1980 MHz")),
        ({}, {"gpu_apps": "4711, /env/bin/python, 30000 MiB\n"},
         ("warn", "GPUs in use", "pid 4711 (/env/bin/python, 30000 MiB)")),
        ({"topology": TOPO_PCIE}, {}, ("warn", "GPU links", "0-1 PHB, 0-2 SYS, 0-3 SYS, 1-2 SYS, 1-3 SYS")),
        ({}, {"xid": [XID_31, XID_79, XID_79]},
         ("fail", "GPU errors", "0000:3b:00: Xid 79, it has fallen off the bus")),
        ({}, {"xid": [XID_63]}, ("warn", "GPU errors", "0000:86:00: Xid 63, a memory row was replaced")),
    ],
)  # fmt: skip
def test_each_fault_is_found_and_no_other(
    others: dict[str, Any], changes: dict[str, Any], expected: tuple[str, str, str]
) -> None:
    assert bad(others, **changes) == [expected]
    (found,) = [one for one in find(others, **changes) if one.severity in ("warn", "fail")]
    assert found.cause and found.fix


def test_gpus_linked_otherwise_on_one_machine_are_named() -> None:
    found = bad({"topology": TOPO_NVLINK}, topology=TOPO_PCIE)
    assert [one[:2] for one in found] == [("warn", "GPU links")] * 2 and "SYS" in found[0][2]


def test_links_are_read_without_cards_and_legend() -> None:
    assert read_links(TOPO_NVLINK) == {(one, other): "NV18" for one in range(4) for other in range(one + 1, 4)}
    assert read_links(TOPO_PCIE)[2, 3] == "PIX" and len(read_links(TOPO_PCIE)) == 6
    assert read_links("") == {} and read_links("Failed to initialize NVML: Unknown Error\n") == {}
    assert read_xid("nothing") == ("", 0)


def test_an_older_nvidia_smi_that_does_not_know_a_field_is_no_finding() -> None:
    assert not bad(gpu_state='Field "clocks_throttle_reasons.active" is not a valid field to query.\n')
    assert len(GPU_STATE.split(",")) == 12


def test_this_machine_can_be_asked() -> None:
    """With what there is: a container has no InfiniBand, and may have no card but lo."""
    facts = devices()
    assert set(facts) | {"env"} == set(FACTS) and "lo" in facts["nics"]
