"""Network cards, InfiniBand and the GPUs' state, of one machine or several: part of compare.py's table.

Called by compare.py, and by doctor.py for one machine. What nvidia-smi and the kernel say is read as text; it was tried
on recorded outputs, not on GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from duoka.cluster.findings import MOST_SHOWN, Comparison, NodeFinding, Survey, both, odd_ones

# Bits of clocks_throttle_reasons.active that slow a GPU down against its will.
THROTTLES = {
    0x4: "power cap", 0x8: "hardware slowdown", 0x20: "heat (software)", 0x40: "heat (hardware)", 0x80: "power brake",
}  # fmt: skip
# Xids that come from the hardware; of others (13, 31, 43, 45, ...) a program is the cause.
XIDS = {
    48: "a memory error that could not be corrected", 62: "its power controller halted",
    63: "a memory row was replaced", 64: "a memory row could not be replaced", 74: "an NVLink error",
    79: "it has fallen off the bus",
    92: "many memory errors were corrected", 94: "a contained memory error", 95: "an uncontained memory error",
    119: "its firmware (GSP) does not answer", 120: "an error of its firmware (GSP)", 140: "an ECC error",
}  # fmt: skip
_HEALED = (63, 92, 94)
_NO_NETWORK = ("lo", "docker0")
_IFNAMES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def compare_network_cards(survey: Survey) -> Iterator[NodeFinding]:
    """What *_SOCKET_IFNAME names must be there and up; frames of two sizes hang large messages."""
    bad: dict[str, str] = {}
    for node, facts in survey.facts.items():
        for variable in _IFNAMES:
            if text := str(facts["env"].get(variable, "")):
                why = _why_no_card(text, facts["nics"])
                if why:
                    bad[node] = f"{variable}={text}: {why}"
    if bad:
        fix = "write a card that is up and leads to the other machines (ip -br link), or unset the variable"
        yield NodeFinding("fail", "network card", bad, "exchange would go nowhere, or over the wrong card", fix)
    sizes = {
        node: ", ".join(sorted({card["mtu"] for name, card in nics.items() if _is_real(name) and card["mtu"]}))
        for node, nics in survey.values("nics").items()
    }
    _, odd = odd_ones(sizes)
    if odd:
        fix = "the same MTU on all, and on the switch:   ip link set dev CARD mtu 9000"
        yield NodeFinding("warn", "mtu", both(sizes, odd), "frames of two sizes: large messages may hang", fix)
    if not bad and not odd:
        yield NodeFinding("ok", "network cards", {"all": f"MTU {next(iter(sizes.values()), '') or 'not known'}"})
    ipv6 = {node: "IPv6" if has else "IPv4 alone" for node, has in survey.values("ipv6").items()}
    _, odd = odd_ones(ipv6)
    if odd:
        cause = "a name with both addresses is tried by IPv6 first: connections stall for up to a minute"
        yield NodeFinding("warn", "ipv6", both(ipv6, odd), cause, "use addresses, or switch IPv6 on or off on all")


def _is_real(name: str) -> bool:
    return name not in _NO_NETWORK and not name.startswith(("veth", "br-", "virbr", "tailscale"))


def _why_no_card(text: str, nics: Mapping[str, Mapping[str, str]]) -> str:
    """NCCL's form: names or beginnings of names; `^` excludes, `=` is the whole name."""
    if text.startswith("^"):
        excluded = text[1:].split(",")
        left = [name for name in nics if not any(name.startswith(one) for one in excluded) and name != "lo"]
        return "" if left else "it leaves no card"
    words = [word.split(":")[0] for word in text.removeprefix("=").split(",")]
    chosen = [name for name in nics if any(name == word or name.startswith(word) for word in words)]
    if not chosen:
        return f"there are {', '.join(nics) or 'none'}"
    return "it is down" if all(nics[name]["operstate"] == "down" for name in chosen) else ""


def compare_infiniband(survey: Survey) -> Iterator[NodeFinding]:
    ports = survey.values("infiniband")
    if not any(ports.values()):
        return
    down = {
        node: ", ".join(f"{name} {port['state']}" for name, port in found.items() if "ACTIVE" not in port["state"])
        for node, found in ports.items()
    }
    down = {node: words for node, words in down.items() if words}
    if down:
        fix = "see cable and switch (ibstat), or leave the card out with NCCL_IB_HCA"
        yield NodeFinding("warn", "infiniband", down, "not active: exchange falls back to TCP, without a word", fix)
    kinds = {
        node: ", ".join(sorted(f"{port['rate']}" for port in found.values())) or "none" for node, found in ports.items()
    }
    usual, odd = odd_ones(kinds)
    if odd:
        cause = "the machine without it makes all others wait, or they do not connect at all"
        yield NodeFinding("fail", "infiniband", both(kinds, odd), cause, "use machines alike, or NCCL_IB_DISABLE=1")
    elif not down:
        yield NodeFinding("ok", "infiniband", {"all": str(usual)})
    locked = {
        node: f"{one >> 10} KiB" for node, one in survey.values("memlock").items() if ports[node] and 0 <= one < 1 << 33
    }
    if locked:
        fix = "unlimited memlock in /etc/security/limits.conf, or docker run --ulimit memlock=-1"
        yield NodeFinding("fail", "locked memory", locked, "InfiniBand locks its buffers in memory", fix)


def compare_governors(survey: Survey) -> Iterator[NodeFinding]:
    slow = {node: one for node, one in survey.values("governor").items() if one == "powersave"}
    if slow and len(slow) < len(survey.facts):  # intel_pstate calls its normal mode so: a difference counts
        fix = "the same on all machines:   cpupower frequency-set -g performance"
        yield NodeFinding("warn", "cpu governor", slow, "others run faster: the slowest sets the pace", fix)


def compare_gpu_states(survey: Survey) -> Iterator[NodeFinding]:
    """MIG, compute mode, memory errors, throttling, lanes, power and clocks of each GPU."""
    found: dict[str, dict[str, str]] = {}
    seen = 0
    for node, text in survey.values("gpu_state").items():
        for row in _rows(text, 12):
            seen += 1
            for what, words in _faults_of(row):
                place = found.setdefault(what, {})
                place[node] = "; ".join(part for part in (place.get(node, ""), f"gpu {row[0]}: {words}") if part)
    for what, nodes in found.items():
        severity, cause, fix = _STATES[what]
        yield NodeFinding("fail" if severity == "fail" else "warn", what, nodes, cause, fix)
    if seen and not found:
        tops = {
            row[-1] for text in survey.values("gpu_state").values() for row in _rows(text, 12) if _is_number(row[-1])
        }
        clocks = f", clocks up to {'/'.join(sorted(tops))} MHz" if tops else ""
        yield NodeFinding("ok", "gpu state", {"all": f"{seen} GPUs: no errors, no throttling, all lanes{clocks}"})


_STATES = {
    "MIG": ("warn", "a process gets a slice of the GPU", "sudo nvidia-smi -mig 0, or name slices by their UUIDs"),
    "compute mode": ("fail", "no program may compute there", "sudo nvidia-smi -c DEFAULT"),
    "GPU memory": ("fail", "uncorrected errors: values may be wrong", "reset or replace it; leave it out until then"),
    "throttling": ("warn", "it runs slower than it could, and all wait for it", "see its cooling and power supply"),
    "PCIe lanes": ("warn", "copies and exchange are slower", "seat it anew; see the slot and the riser"),
    "power limit": (
        "warn",
        "below its default: it computes slower",
        "sudo nvidia-smi -pl WATTS, if it is not meant so",
    ),
    "clocks": (
        "warn",
        "capped by a setting: cards that boost higher lose that much speed",
        "sudo nvidia-smi -rgc (locked clocks), sudo nvidia-smi -rac (application clocks)",
    ),
}
_CLOCKS_SET = 0x2  # of the reasons: a setting of clocks limits it


def _rows(text: str, size: int) -> list[list[str]]:
    rows = [[word.strip() for word in line.split(",")] for line in text.splitlines()]
    return [row for row in rows if len(row) == size]


def _faults_of(row: Sequence[str]) -> Iterator[tuple[str, str]]:
    _, mig, mode, errors, reasons, lanes, most_lanes, watts, usual_watts, clock, usual_clock, top_clock = row
    if mig == "Enabled":
        yield "MIG", "on"
    if mode == "Prohibited":
        yield "compute mode", mode
    if errors.isdecimal() and int(errors):
        yield "GPU memory", f"{errors} uncorrected errors"
    bits = int(reasons, 16) if re.fullmatch(r"0x[0-9a-fA-F]+", reasons) else 0
    if why := [words for bit, words in THROTTLES.items() if bits & bit]:
        yield "throttling", ", ".join(why)
    if lanes.isdecimal() and most_lanes.isdecimal() and int(lanes) < int(most_lanes):
        yield "PCIe lanes", f"{lanes} of {most_lanes}"
    if _is_number(watts) and _is_number(usual_watts) and float(watts) < 0.99 * float(usual_watts):
        yield "power limit", f"{float(watts):.0f} W of {float(usual_watts):.0f} W"
    if _is_number(clock) and _is_number(usual_clock) and float(clock) < float(usual_clock):
        yield "clocks", f"{clock} MHz where {usual_clock} is usual and {top_clock} the most"
    elif bits & _CLOCKS_SET:
        yield "clocks", f"a setting holds it below {top_clock} MHz"


def _is_number(text: str) -> bool:
    return re.fullmatch(r"\d+(\.\d+)?", text) is not None


def compare_gpu_programs(survey: Survey) -> Iterator[NodeFinding]:
    busy = {}
    for node, text in survey.values("gpu_apps").items():
        rows = _rows(text, 3)
        if rows:
            more = f" and {len(rows) - MOST_SHOWN} more" if len(rows) > MOST_SHOWN else ""
            busy[node] = ", ".join(f"pid {pid} ({name}, {used})" for pid, name, used in rows[:MOST_SHOWN]) + more
    if busy:
        fix = "end them if they are yours (duoka ends nothing that it has not started), or choose other GPUs"
        yield NodeFinding("warn", "GPUs in use", busy, "programs hold memory of the GPUs", fix)


def compare_gpu_links(survey: Survey) -> Iterator[NodeFinding]:
    """How GPUs reach each other, by `nvidia-smi topo -m`."""
    links = {node: read_links(text) for node, text in survey.values("topology").items()}
    links = {node: found for node, found in links.items() if found}
    if not links:
        return
    kinds = {node: ", ".join(sorted(set(found.values()))) for node, found in links.items()}
    _, odd = odd_ones(kinds)
    if odd:
        cause = "GPUs are connected otherwise: the slowest way sets the pace"
        yield NodeFinding("warn", "GPU links", both(kinds, odd), cause, "use machines alike; see nvidia-smi topo -m")
    far = {}
    for node, found in links.items():
        pairs = [f"{one}-{other} {kind}" for (one, other), kind in found.items() if kind in ("SYS", "NODE", "PHB")]
        if pairs:
            more = f" and {len(pairs) - MOST_SHOWN} more" if len(pairs) > MOST_SHOWN else ""
            far[node] = ", ".join(pairs[:MOST_SHOWN]) + more
    if far:
        cause = "exchange between them goes through the CPU (SYS: from one CPU to the other)"
        fix = "plan with it: duoka plan; sharding over fewer GPUs (hsdp) exchanges less over this way"
        yield NodeFinding("warn", "GPU links", far, cause, fix)
    elif not odd:
        yield NodeFinding("ok", "GPU links", {"all": next(iter(kinds.values()))})


def read_links(text: str) -> dict[tuple[int, int], str]:
    """Of each pair of GPUs: NV18, PIX, PXB, PHB, NODE or SYS."""
    found = {}
    for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines():
        words = line.split()
        if words and re.fullmatch(r"GPU\d+", words[0]):
            one = int(words[0][3:])
            # The row has as many entries for GPUs as there are; cards and affinities follow.
            for other, kind in enumerate(words[1:]):
                if other > one and re.fullmatch(r"NV\d+|PIX|PXB|PHB|NODE|SYS", kind):
                    found[one, other] = kind
    count = len(re.findall(r"^GPU\d+\s", re.sub(r"\x1b\[[0-9;]*m", "", text), re.MULTILINE))
    return {pair: kind for pair, kind in found.items() if pair[1] < count}


def compare_gpu_errors(survey: Survey) -> Iterator[NodeFinding]:
    """Xids in the kernel's log that come from the hardware."""
    broken: dict[str, str] = {}
    healed: dict[str, str] = {}
    for node, lines in survey.values("xid").items():
        for card, number in dict.fromkeys(read_xid(line) for line in lines):
            if number in XIDS:
                place = healed if number in _HEALED else broken
                words = f"{card}: Xid {number}, {XIDS[number]}"
                place[node] = "; ".join(part for part in (place.get(node, ""), words) if part)
    if broken:
        fix = "reboot the machine; if it comes back, have the GPU replaced. Until then leave it out"
        yield NodeFinding("fail", "GPU errors", broken, "the kernel's log has errors of the hardware", fix)
    if healed:
        fix = "reset the GPU when nobody uses it (sudo nvidia-smi -r): rows are replaced then"
        yield NodeFinding("warn", "GPU errors", healed, "errors that were healed: more may follow", fix)


def read_xid(line: str) -> tuple[str, int]:
    """(PCI address, number); 0 where there is none."""
    found = re.search(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)", line)
    return (found.group(1), int(found.group(2))) if found else ("", 0)


DEVICE_COMPARISONS: Sequence[Comparison] = (
    compare_network_cards, compare_infiniband, compare_governors, compare_gpu_states, compare_gpu_programs,
    compare_gpu_links, compare_gpu_errors,
)  # fmt: skip
