"""What a node is like, told by the standard library alone: survey.py sends this file's text over ssh's stdin.

It works where duoka, torch or the environment are missing or broken, and with Pythons older than duoka's. Each line of
JSON that comes in is a question, each line behind ANSWER is its answer. It changes nothing but for two files that it
removes again, and ends when its stdin does.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import platform
import re
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

ANSWER = "duoka-answer "
SAMPLE_BYTES, NUM_SAMPLES = 1 << 16, 10
MOST_FILES = 2000  # of a folder
ENV = re.compile(r"NCCL_|GLOO_|CUDA_|OMP_|TORCH_|PYTORCH_|PYTHONPATH$|LD_LIBRARY_PATH$|HF_HOME$|HF_HUB_OFFLINE$")
SECRET = re.compile(r"TOKEN|SECRET|PASSW|KEY|CREDENTIAL|AUTH")
GPU_FIELDS = "driver_version,name,memory.total,memory.used,persistence_mode"
GPU_STATE = (
    "index,mig.mode.current,compute_mode,ecc.errors.uncorrected.volatile.total,clocks_throttle_reasons.active,"
    "pcie.link.width.current,pcie.link.width.max,power.limit,power.default_limit,clocks.applications.graphics,"
    "clocks.default_applications.graphics,clocks.max.graphics"
)
RATE_S = 0.4
REFUSED, FILTERED, UNROUTABLE, UNRESOLVED = "refused", "filtered", "unroutable", "unresolved"
HOW = {errno.ECONNREFUSED: REFUSED, errno.EHOSTUNREACH: UNROUTABLE, errno.ENETUNREACH: UNROUTABLE}


def look(paths: list[str], folder: str, output: str, python: str) -> dict[str, Any]:
    """All facts of this node at once."""
    return {
        "host": socket.gethostname(), "python": platform.python_version(),
        "executable": sys.executable, "has_python": os.access(python, os.X_OK), "system": platform.platform(),
        "address": [*os.environ.get("SSH_CONNECTION", "").split(), "", "", ""][2],
        "resolves_to": resolve(socket.gethostname()), "packages": packages(), "code": code(),
        "torch_cuda": torch_cuda(),
        "files": {path: fingerprint(os.path.join(folder, os.path.expanduser(path))) for path in paths},
        "folder": os.path.isdir(folder), "memory": memory(), "disk": disk(os.path.join(folder, output)),
        "shm": free("/dev/shm"), "cores": cores(), "nofile": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        "gpus": gpus(), **devices(),
        "env": {name: masked(name, value) for name, value in os.environ.items() if ENV.match(name)},
    }  # fmt: skip


def masked(name: str, value: str) -> str:
    return "***" if SECRET.search(name) else value


def resolve(name: str) -> list[str]:
    try:
        return sorted({str(one[4][0]) for one in socket.getaddrinfo(name, None)})
    except OSError:
        return []


def packages() -> dict[str, str]:
    """Versions by name, from the names of folders: nothing is opened."""
    found: dict[str, str] = {}
    for place in sys.path:
        try:
            names = os.listdir(place or ".")
        except OSError:
            continue
        for name in names:
            if name.endswith((".dist-info", ".egg-info")):
                word, _, version = name.rsplit(".", 1)[0].partition("-")
                found.setdefault(word.lower().replace("_", "-"), version)
    return found


def place_of(module: str) -> str:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return ""
    return os.path.dirname(spec.origin) if spec and spec.origin else ""


def code() -> str:
    root = place_of("duoka")
    if not root:
        return ""
    digest = hashlib.sha256()
    for folder, folders, names in os.walk(root):
        folders.sort()
        for name in sorted(names):
            if name.endswith(".py"):
                digest.update(os.path.relpath(os.path.join(folder, name), root).encode())
                with open(os.path.join(folder, name), "rb") as file:
                    digest.update(file.read())
    return digest.hexdigest()


def torch_cuda() -> str:
    try:
        with open(os.path.join(place_of("torch"), "version.py")) as file:
            found = re.search(r"^cuda\b[^=]*=\s*'([\d.]+)'", file.read(), re.MULTILINE)
    except OSError:
        return ""
    return found.group(1) if found else ""


def fingerprint(path: str) -> dict[str, Any]:
    """Size and a digest: of all of a small file, of samples of a large one; of a folder, of its files'."""
    try:
        if os.path.isdir(path):
            digest = hashlib.sha256()
            names: list[str] = []
            for folder, folders, found in os.walk(path):
                folders.sort()
                names += [os.path.join(folder, name) for name in sorted(found)]
                if len(names) > MOST_FILES:
                    break
            for name in names[:MOST_FILES]:
                digest.update(os.path.relpath(name, path).encode() + sample(name).encode())
            return {"kind": "folder", "size": len(names), "digest": digest.hexdigest()}
        return {"kind": "file", "size": os.path.getsize(path), "digest": sample(path)}
    except OSError as error:
        return {"kind": "missing", "size": 0, "digest": "", "why": error.strerror or str(error)}


def sample(path: str) -> str:
    size = os.path.getsize(path)
    digest = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        if size <= SAMPLE_BYTES * NUM_SAMPLES:
            digest.update(file.read())
        else:
            for number in range(NUM_SAMPLES):
                file.seek((size - SAMPLE_BYTES) * number // (NUM_SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def duokas_own(name: str) -> Any:
    """What duoka itself reads of this machine, where it is there: it knows the limits of groups (containers, jobs)."""
    try:
        return getattr(importlib.import_module("duoka.plan.hardware"), name)()
    # An environment may be broken, and that is another finding.
    except (ImportError, SyntaxError, AttributeError, OSError, ValueError, TypeError, RuntimeError):
        return None


def memory() -> dict[str, int]:
    found = duokas_own("read_memory")
    if found:
        return {"total": found[0], "available": found[1]}
    try:
        with open("/proc/meminfo") as file:
            words = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file}
        return {"total": words["MemTotal"], "available": words["MemAvailable"]}
    except (OSError, KeyError, ValueError, IndexError):
        return {"total": 0, "available": 0}


def existing(path: str) -> str:
    while not os.path.isdir(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return path


def disk(path: str) -> dict[str, Any]:
    there = existing(path)
    return {"path": there, "can_write": os.access(there, os.W_OK), **free(there)}


def free(path: str) -> dict[str, int]:
    """Bytes, and how many more files fit (-1: as many as bytes allow)."""
    try:
        found = os.statvfs(path)
    except OSError:
        return {"free": 0, "total": 0, "files": -1}
    size, files = found.f_frsize, found.f_favail if found.f_files else -1
    return {"free": found.f_bavail * size, "total": found.f_blocks * size, "files": files}


def cores() -> int:
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return duokas_own("count_usable_cores") or here


def gpus() -> str:
    """nvidia-smi's own words; the leader reads them."""
    return said("nvidia-smi", "--query-gpu=" + GPU_FIELDS, "--format=csv,noheader,nounits")


def devices() -> dict[str, Any]:
    """Network cards, InfiniBand, limits, and the GPUs' state; texts of tools as they are."""
    smi = "nvidia-smi"
    return {
        "nics": nics(), "ipv6": not only_ipv4(), "infiniband": infiniband(),
        "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "governor": text_of("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "gpu_state": said(smi, "--query-gpu=" + GPU_STATE, "--format=csv,noheader,nounits"),
        "gpu_apps": said(smi, "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader"),
        "topology": said(smi, "topo", "-m"), "xid": [line for line in kernel_log() if "NVRM: Xid" in line][-20:],
    }  # fmt: skip


def text_of(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def nics() -> dict[str, dict[str, str]]:
    root = "/sys/class/net"
    names = sorted(os.listdir(root)) if os.path.isdir(root) else []
    return {
        name: {key: text_of(os.path.join(root, name, key)) for key in ("operstate", "mtu", "speed")} for name in names
    }


def infiniband() -> dict[str, dict[str, str]]:
    """Ports of the cards: state and rate."""
    root = "/sys/class/infiniband"
    found = {}
    for card in sorted(os.listdir(root)) if os.path.isdir(root) else []:
        ports = os.path.join(root, card, "ports")
        for port in sorted(os.listdir(ports)) if os.path.isdir(ports) else []:
            place = os.path.join(ports, port)
            found[card + ":" + port] = {key: text_of(os.path.join(place, key)) for key in ("state", "rate")}
    return found


def said(*command: str) -> str:
    """Its stdout, whatever its exit code: one GPU that does not answer makes nvidia-smi fail for all."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="replace")


def kernel_log() -> list[str]:
    """Of machines with an NVIDIA driver; where it may be read."""
    if not os.path.isdir("/proc/driver/nvidia"):
        return []
    return (said("dmesg") or said("journalctl", "-k", "-q", "-n", "20000")).splitlines()


def listen() -> int:
    """A port of ours, so that a refusal can only come from something in between."""
    server = socket.socket(socket.AF_INET6 if socket.has_ipv6 and not only_ipv4() else socket.AF_INET)
    if server.family == socket.AF_INET6:
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    server.bind(("", 0))
    server.listen(256)

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
                threading.Thread(target=greet, args=(connection,), daemon=True).start()
            except OSError:
                return

    threading.Thread(target=serve, daemon=True).start()
    return int(server.getsockname()[1])


def greet(connection: socket.socket) -> None:
    """A word; and to who asks for it, as many bytes as they take within RATE_S."""
    with connection:
        try:
            connection.sendall(b"duoka")
            connection.settimeout(RATE_S)
            if connection.recv(1) == b"r":
                until, block = time.monotonic() + RATE_S, bytes(1 << 18)
                while time.monotonic() < until:
                    connection.send(block)
        except OSError:
            return


def rate(address: str, port: int) -> float:
    """Bytes per second from there to here; 0 where nothing comes."""
    count, start = 0, time.monotonic()
    try:
        with socket.create_connection((address, port), timeout=4) as connection:
            connection.sendall(b"r")
            start = time.monotonic()
            while data := connection.recv(1 << 18):
                count += len(data)
    except OSError:
        pass
    return count / max(time.monotonic() - start, 1e-3) if count > len(b"duoka") else 0.0


def only_ipv4() -> bool:
    return text_of("/proc/sys/net/ipv6/conf/all/disable_ipv6") != "0"


def connect(peers: list[tuple[str, str, int]], timeout: float) -> dict[str, dict[str, Any]]:
    """How each of `peers`, (name, address, port), is reached from here, all at once."""
    found: dict[str, dict[str, Any]] = {}
    threads = [threading.Thread(target=reach, args=(found, *peer, timeout), daemon=True) for peer in peers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout + 5)
    return {name: found.get(name, {"how": FILTERED, "ms": 0}) for name, _, _ in peers}


def reach(found: dict[str, dict[str, Any]], name: str, address: str, port: int, timeout: float) -> None:
    start = time.monotonic()
    try:
        with socket.create_connection((address, port), timeout=timeout) as connection:
            heard = connection.recv(5)
        how = "ok" if heard == b"duoka" else "answered by another program"
    except socket.gaierror:
        how = UNRESOLVED
    except socket.timeout:  # noqa: UP041 - its own class before Python 3.10
        how = FILTERED
    except OSError as error:
        how = HOW.get(error.errno or 0, error.strerror or str(error))
    found[name] = {"how": how, "ms": round(1000 * (time.monotonic() - start), 1)}


def mark(path: str, name: str, made: list[str]) -> str:
    try:
        there = os.path.join(existing(path), name)
        open(there, "x").close()
        made.append(there)
        return there
    except OSError:
        return ""


def is_seen(path: str, within_s: float) -> bool:
    until = time.monotonic() + within_s
    while not os.path.exists(path):
        if time.monotonic() > until:
            return False
        os.listdir(existing(os.path.dirname(path)))  # makes a network file system ask its server again
        time.sleep(0.2)
    return True


def write_rate(path: str, num_bytes: int) -> float:
    """Bytes per second that reach the disk, in a file without a name; 0 where none may be written."""
    block, start = os.urandom(1 << 22), time.monotonic()
    try:
        with tempfile.TemporaryFile(dir=existing(path)) as file:
            for _ in range(num_bytes // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            return num_bytes / max(time.monotonic() - start, 1e-3)
    except OSError:
        return 0.0


def main() -> None:
    made: list[str] = []
    does: dict[str, Callable[[Any], dict[str, Any]]] = {
        "look": lambda asked: look(**asked), "now": lambda asked: {"time": time.time()},
        "listen": lambda asked: {"port": listen()}, "connect": lambda asked: {"reached": connect(**asked)},
        "rate": lambda asked: {"rate": rate(*asked) if asked else 0.0},
        "write": lambda asked: {"rate": write_rate(**asked)},
        "mark": lambda asked: {"mark": mark(made=made, **asked)}, "seen": lambda asked: {"seen": is_seen(**asked)},
    }  # fmt: skip
    try:
        for line in sys.stdin.buffer:
            for name, asked in (json.loads(line) if line.strip() else {}).items():
                answer(does[name](asked))
    finally:
        for path in made:
            os.unlink(path)


def answer(facts: dict[str, Any]) -> None:
    sys.stdout.write(ANSWER + json.dumps(facts) + "\n")
    sys.stdout.flush()


if __name__ in ("__main__", "duoka_probe"):
    main()
