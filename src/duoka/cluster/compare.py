"""Are these machines fit, and alike? A table of comparisons of what node_probe.py has told, each a function.

Called by survey.py. A `fail` would break a run or make it wrong; a `warn` costs speed or comfort, or will hurt later.
Every finding has the values of the nodes that differ, the cause, and what to type.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from duoka.cluster.compare_devices import DEVICE_COMPARISONS
from duoka.cluster.doctor import OLDEST_DRIVER
from duoka.cluster.findings import MOST_SHOWN, Comparison, NodeFinding, Severity, Survey, both, odd_ones
from duoka.cluster.node_probe import FILTERED, REFUSED, UNRESOLVED, UNROUTABLE
from duoka.units import format_bytes

_GIB = 1 << 30
# What a run's numbers and its checkpoints depend on; duoka itself is compared by its code.
CRITICAL = ("torch", "transformers", "tokenizers", "safetensors", "peft", "numpy", "pyarrow", "pydantic")
CLOCK_WARN_S, CLOCK_FAIL_S = 1.0, 10.0


def compare_python(survey: Survey) -> Iterator[NodeFinding]:
    missing = {name: "not there" for name, has in survey.values("has_python").items() if not has}
    if missing:
        cause = "this environment's Python is not at the same path"
        yield NodeFinding("fail", "python path", missing, cause, "install the same environment at the same place")
    values = survey.values("python")
    usual, odd = odd_ones(values)
    if not odd:
        yield NodeFinding("ok", "python", {"all": str(usual)})
        return
    is_far = any(str(value).split(".")[:2] != str(usual).split(".")[:2] for value in odd.values())
    fix = f"install Python {usual} on {', '.join(odd)}, and the environment anew"
    yield NodeFinding("fail" if is_far else "warn", "python", both(values, odd), "different Pythons", fix)


def compare_packages(survey: Survey) -> Iterator[NodeFinding]:
    packages = survey.values("packages")
    names = sorted({name for found in packages.values() for name in found} - {"duoka"})
    minor: dict[str, dict[str, str]] = {}
    num_alike = 0
    for name in names:
        values = {node: found.get(name, "") for node, found in packages.items()}
        usual, odd = odd_ones(values)
        if not odd:
            num_alike += 1
        elif name in CRITICAL or name.startswith("nvidia-nccl"):
            node = next(iter(odd))
            verb = f"install '{name}=={usual}'" if usual else f"uninstall {name}"
            fix = f"{survey.ssh[node]} {survey.facts[node]['executable']} -m pip {verb}"
            yield NodeFinding("fail", name, both(values, odd), "versions differ: results and files may too", fix)
        else:
            minor[name] = both(values, odd)
    if minor:
        shown = list(minor)[:MOST_SHOWN]
        more = f" and {len(minor) - MOST_SHOWN} more" if len(minor) > MOST_SHOWN else ""
        nodes: dict[str, list[str]] = {}
        for name in shown:
            for node, version in minor[name].items():
                nodes.setdefault(node, []).append(f"{name} {version}")
        cause = f"{', '.join(shown)}{more} differ; training does not depend on them"
        fix = "make the environments alike: pip freeze on one, pip install -r on the others"
        yield NodeFinding("warn", "other packages", {node: ", ".join(one) for node, one in nodes.items()}, cause, fix)
    else:
        yield NodeFinding("ok", "packages", {"all": f"{num_alike} alike"})


def compare_code(survey: Survey) -> Iterator[NodeFinding]:
    values = {name: digest[:12] or "not installed" for name, digest in survey.values("code").items()}
    usual, odd = odd_ones(values)
    if not odd and usual != "not installed":
        yield NodeFinding("ok", "duoka", {"all": f"the same code ({usual})"})
        return
    shown = both(values, odd)
    yield NodeFinding("fail", "duoka", shown, "other code, or none", "install the same version on all machines")


def compare_files(survey: Survey) -> Iterator[NodeFinding]:
    """The config, the data and the model, by size and content."""
    absent = {name: "not there" for name, there in survey.values("folder").items() if not there}
    if absent:
        cause = f"the working folder {survey.folder} is not on all machines"
        yield NodeFinding("fail", "folder", absent, cause, "use a shared disk, or copy it with rsync")
    for path in next(iter(survey.values("files").values()), {}):
        files = survey.values("files", path)
        values = {name: _file_words(one) for name, one in files.items()}
        _, odd = odd_ones({name: f"{one['kind']} {one['size']} {one['digest']}" for name, one in files.items()})
        gone = [name for name, one in files.items() if one["kind"] == "missing"]
        if not odd and not gone:
            yield NodeFinding("ok", path, {"all": next(iter(values.values()))})
            continue
        node = next(iter(odd or gone))
        good = next((name for name in files if name not in odd and name not in gone), "")
        full = os.path.join(survey.folder, os.path.expanduser(path))
        fix = "put it there, on all machines"
        if good:
            fix = _copying(full, survey.ssh[node], files[good]["kind"] == "folder")
        cause = "not there" if gone else "another content"
        shown = both(values, {name: values[name] for name in odd or gone})
        yield NodeFinding("fail", path, shown, cause, fix)


def _copying(path: str, way: str, is_folder: bool) -> str:
    """`way`: what a person types in front of a command to run it on the node."""
    if way.startswith("kubectl"):
        return f"kubectl cp {path} {way.split()[2]}:{path}"
    return f"rsync -a {path}{'/' if is_folder else ''} {way.split()[-1].removeprefix('--nodelist=')}:{path}"


def _file_words(one: Mapping[str, Any]) -> str:
    if one["kind"] == "missing":
        return f"not there ({one['why']})"
    size = f"{one['size']} files" if one["kind"] == "folder" else format_bytes(one["size"])
    return f"{size}, {one['digest'][:8]}"


def compare_clocks(survey: Survey) -> Iterator[NodeFinding]:
    """Against the leader's: a node answered between the question and the last answer."""
    off = {}
    for name, at in survey.values("time").items():
        early, late = at - survey.answered_at, at - survey.asked_at
        if early > 0 or late < 0:  # the least that it can be off
            off[name] = early if early > 0 else late
    bad = {name: f"{seconds:+.1f} s" for name, seconds in off.items() if abs(seconds) > CLOCK_WARN_S}
    if not bad:
        yield NodeFinding("ok", "clocks", {"all": f"within {CLOCK_WARN_S:g} s and the time of asking"})
        return
    severity: Severity = "fail" if max(abs(off[name]) for name in bad) > CLOCK_FAIL_S else "warn"
    fix = f"{survey.ssh[next(iter(bad))]} sudo timedatectl set-ntp true"
    yield NodeFinding(severity, "clocks", bad, "another time than here: logs and ages of files mislead", fix)


def compare_memory(survey: Survey) -> Iterator[NodeFinding]:
    values = survey.values("memory", "available")
    low = {name: format_bytes(one) for name, one in values.items() if one < 2 * _GIB}
    if low:
        fix = "end other programs there, or raise the container's limit"
        yield NodeFinding("warn", "memory", low, "less than 2 GiB available", fix)
    elif max(values.values()) > 2 * min(values.values()):
        least, most = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
        shown = {name: format_bytes(values[name]) for name in (least, most)}
        yield NodeFinding("warn", "memory", shown, "the least of all sets what fits", f"see who uses it on {least}")
    else:
        yield NodeFinding("ok", "memory", {"all": f"{format_bytes(min(values.values()))} or more available"})


def compare_disks(survey: Survey) -> Iterator[NodeFinding]:
    disks = survey.values("disk")
    closed = {name: one["path"] for name, one in disks.items() if not one["can_write"]}
    if closed:
        yield NodeFinding("fail", "disk", closed, "may not be written to", "set output: to another folder, or chown it")
    low = {name: f"{format_bytes(one['free'])} free" for name, one in disks.items() if one["free"] < 5 * _GIB}
    if low:
        yield NodeFinding("warn", "disk", low, "less than 5 GiB for checkpoints", "free some space")
    elif few := {name: f"{one['files']} more files" for name, one in disks.items() if 0 <= one["files"] < 10_000}:
        fix = "remove many small files there (df -i shows which disk is full of them)"
        yield NodeFinding("warn", "disk", few, "room for bytes, and for few more files", fix)
    elif not closed:
        yield NodeFinding("ok", "disk", {"all": f"{format_bytes(min(one['free'] for one in disks.values()))} or more"})
    small = {name: format_bytes(one) for name, one in survey.values("shm", "free").items() if one < _GIB}
    if small:
        fix = "in a container: docker run --shm-size=8g"
        yield NodeFinding("warn", "/dev/shm", small, "less than 1 GiB for processes to share", fix)
    few = {name: str(one) for name, one in survey.values("nofile").items() if 0 <= one < 1024}
    if few:
        yield NodeFinding("fail", "open files", few, "fewer than 1024", "ulimit -n 65536")


def compare_cores(survey: Survey) -> Iterator[NodeFinding]:
    values = survey.values("cores")
    usual, odd = odd_ones(values)
    if odd:
        yield NodeFinding("warn", "cores", both(values, odd), "the slowest machine sets the pace", "use machines alike")
    else:
        yield NodeFinding("ok", "cores", {"all": str(usual)})


def read_gpus(text: str) -> list[dict[str, str]]:
    """Lines of nvidia-smi --query-gpu with node_probe.GPU_FIELDS; a GPU that does not answer has [N/A] or an error."""
    names = ("driver", "name", "memory", "used", "persistence")
    found = []
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == len(names):
            found.append(dict(zip(names, words, strict=True)))
    return found


def compare_gpus(survey: Survey) -> Iterator[NodeFinding]:
    gpus = {name: read_gpus(text) for name, text in survey.values("gpus").items()}
    if not any(gpus.values()):
        yield NodeFinding("skip", "gpus", {"all": "no NVIDIA GPU, or no nvidia-smi"})
        return
    counts = {name: len(found) for name, found in gpus.items()}
    _, odd = odd_ones(counts)
    if odd:
        fix = f"--nproc {min(counts.values())} takes as many on each" if min(counts.values()) else "leave those out"
        yield NodeFinding("fail", "gpus", both(counts, odd), "each machine must start as many processes", fix)
    kinds = {
        name: ", ".join(sorted({f"{one['name']} {one['memory']} MiB" for one in found})) for name, found in gpus.items()
    }
    usual, odd = odd_ones(kinds)
    if odd:
        yield NodeFinding("warn", "gpu kinds", both(kinds, odd), "the slowest sets the pace", "use machines alike")
    else:
        yield NodeFinding("ok", "gpus", {"all": f"{max(counts.values())} x {usual}"})
    drivers = {name: ", ".join(sorted({one["driver"] for one in found})) for name, found in gpus.items()}
    _, odd = odd_ones(drivers)
    if odd:
        yield NodeFinding("warn", "driver", both(drivers, odd), "different drivers", "install the same driver")
    old = {}
    for name, cuda in survey.values("torch_cuda").items():
        oldest = OLDEST_DRIVER.get(cuda.split(".")[0])
        parts = [part for part in drivers[name].split(", ")[0].split(".")[:2] if part.isdecimal()]
        if oldest and len(parts) == 2 and (int(parts[0]), int(parts[1])) < oldest:
            old[name] = f"driver {drivers[name]}, torch for CUDA {cuda}"
    if old:
        yield NodeFinding("fail", "driver", old, "too old for torch's CUDA", "install a newer driver there")
    lazy = {name: "off" for name, found in gpus.items() if any(one["persistence"] == "Disabled" for one in found)}
    if lazy:
        fix = f"{survey.ssh[next(iter(lazy))]} sudo nvidia-smi -pm 1"
        yield NodeFinding("warn", "persistence mode", lazy, "each start wakes the driver anew: seconds", fix)


def compare_host_names(survey: Survey) -> Iterator[NodeFinding]:
    found = survey.values("resolves_to")
    hosts = survey.values("host")
    loop = {
        name: f"{hosts[name]} is {', '.join(one) or 'unknown'}"
        for name, one in found.items()
        if not one or all(address.startswith("127.") or address == "::1" for address in one)
    }
    if loop and len(found) > 1:
        node = next(iter(loop))
        address = survey.facts[node]["address"] or "ITS-ADDRESS"
        cause = "other programs' rendezvous hangs on such names (duoka uses addresses)"
        fix = f"in /etc/hosts of {node}:   {address} {hosts[node]}"
        yield NodeFinding("warn", "host names", loop, cause, fix)
    else:
        yield NodeFinding("ok", "host names", {"all": "resolve to addresses of a network"})


def compare_environments(survey: Survey) -> Iterator[NodeFinding]:
    found = survey.values("env")
    differ = []
    for variable in sorted({name for one in found.values() for name in one}):
        values = {node: one.get(variable, "") for node, one in found.items()}
        if odd_ones(values)[1]:
            differ.append((variable, values))
    for variable, values in differ[:MOST_SHOWN]:
        shown = both({node: value or "not set" for node, value in values.items()}, odd_ones(values)[1])
        cause = "what a login there sets; variables of this terminal go to all nodes of a run"
        yield NodeFinding("warn", variable, shown, cause, "set it alike in ~/.bashrc, or nowhere")
    if not differ:
        yield NodeFinding("ok", "environment", {"all": "alike"})


_WORDS = {
    REFUSED: (
        "a firewall rejects it, or the address is another machine's",
        "let all ports pass between these machines",
    ),
    FILTERED: (
        "a firewall drops it silently",
        "let all ports pass between these machines (ufw, firewalld, security group)",
    ),
    UNROUTABLE: (
        "there is no way from the one to the other",
        "put them in one network, or mend its routes (ip route get)",
    ),
    UNRESOLVED: ("the name is not known there", "write the address, or add the name to /etc/hosts"),
}


def compare_links(reached: Mapping[str, Mapping[str, Any]], places: Mapping[str, str]) -> list[NodeFinding]:
    """Of all pairs, both ways; grouped by what is wrong."""
    groups: dict[str, dict[str, str]] = {}
    times = []
    for source, peers in reached.items():
        for peer, one in peers.items():
            if one["how"] == "ok":
                times.append(one["ms"])
            else:
                groups.setdefault(one["how"], {})[f"{source} -> {peer}"] = f"{places[peer]} {one['how']}"
    findings = []
    for how, pairs in groups.items():
        cause, fix = _WORDS.get(how, ("unexpected", "see what answers there"))
        more = f" ({len(pairs)} connections)" if len(pairs) > MOST_SHOWN else ""
        shown = dict(list(pairs.items())[:MOST_SHOWN])
        findings.append(NodeFinding("fail", "links", shown, f"{cause}{more}", fix))
    if not findings:
        words = f"{len(times)} connections, all pairs both ways, at most {max(times, default=0):.0f} ms"
        findings.append(NodeFinding("ok", "links", {"all": words}))
    return findings


SLOW_LINK, VERY_SLOW_LINK = 0.6, 0.3  # of what the others reach


def compare_rates(rates: Mapping[tuple[str, str], float]) -> list[NodeFinding]:
    """By pairs (who receives, who sends): the machine whose every pair is slow is the slow one, not its peers."""
    if not rates:
        return []
    of_node: dict[str, list[float]] = {}
    for pair, rate in rates.items():
        for name in pair:
            of_node.setdefault(name, []).append(rate)
    usual = statistics.median(statistics.median(one) for one in of_node.values())
    if len(of_node) == 2:  # one link: there is nothing to compare it with
        usual = max(rates.values())
    slow = {}
    for name, found in of_node.items():
        typical = statistics.median(found)
        if typical < SLOW_LINK * usual:
            slow[name] = typical
    if not slow and (odd := {pair: rate for pair, rate in rates.items() if rate < SLOW_LINK * usual}):
        shown = {f"{sender} -> {one}": _rate_words(rate) for (one, sender), rate in list(odd.items())[:MOST_SHOWN]}
        fix = "measure once more when the network is idle; then see the switch between them"
        return [NodeFinding("warn", "bandwidth", shown, f"other pairs reach {_rate_words(usual)}", fix)]
    if not slow:
        words = f"{_rate_words(min(rates.values()))} to {_rate_words(max(rates.values()))} between pairs, over TCP"
        return [NodeFinding("ok", "bandwidth", {"all": words})]
    cause = f"the others reach {_rate_words(usual)}: all wait for the slowest link at every exchange"
    fix = "see cable, port and speed of its card (ethtool CARD), and which card leads there (ip route get ADDRESS)"
    is_far = any(rate < VERY_SLOW_LINK * usual for rate in slow.values())
    shown = {name: _rate_words(rate) for name, rate in slow.items()}
    return [NodeFinding("fail" if is_far else "warn", "bandwidth", shown, cause, fix)]


def _rate_words(rate: float) -> str:
    return f"{8 * rate / 1e9:.3g} Gbit/s"


COMPARISONS: Sequence[Comparison] = (
    compare_python, compare_packages, compare_code, compare_files, compare_clocks, compare_memory, compare_disks,
    compare_cores, compare_gpus, compare_host_names, compare_environments, *DEVICE_COMPARISONS,
)  # fmt: skip
