"""Launch lines of guides as duoka's own: what `torchrun ...` and `accelerate launch ...` mean. Not a command itself.

Pure functions from words to an answer; the commands torchrun.py and accelerate.py say it and do it.
"""

from __future__ import annotations

import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from duoka.cli.accelerate_flags import SWITCHES as ACCELERATE_SWITCHES
from duoka.cli.accelerate_flags import VALUES as ACCELERATE_VALUES
from duoka.cli.accelerate_flags import asked_for, default_config, environment_of, starting_environment
from duoka.cli.guide_modules import LATER_MODULES, PYTHON_MODULES, STAGE_MODULES, THEIR_DEPTH
from duoka.config.dialects.all import dialects
from duoka.config.dialects.rows import is_false, is_true
from duoka.config.yaml_text import yaml_text
from duoka.errors import ConfigError
from duoka.registry import nearest


@dataclass
class Line:
    """A launch line, read: flags by name (with _), the program, and what follows it."""

    flags: dict[str, str] = field(default_factory=dict)
    program: str = ""
    is_module: bool = False
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Meaning:
    """duoka's command line for it, the environment it needs, and what is to be said."""

    words: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


# Flags that stand alone, and those with a value; both spelled with _.
TORCHRUN_SWITCHES = ("standalone", "no_python", "run_path", "virtual_local_rank", "use_env", "m", "module")
TORCHRUN_VALUES = (
    "nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port", "rdzv_id", "rdzv_backend", "rdzv_endpoint",
    "rdzv_conf", "max_restarts", "monitor_interval", "start_method", "role", "log_dir", "redirects", "tee",
    "local_addr", "event_log_handler", "logs_specs", "r", "t", "local_ranks_filter", "duplicate_stdout_filters",
    "duplicate_stderr_filters", "numa_binding", "signals_to_handle", "shutdown_timeout",
)  # fmt: skip
# Variables that count between the flags and the file, and the flag that each stands for.
_VARIABLES = {
    "ACCELERATE_MIXED_PRECISION": "mixed_precision", "ACCELERATE_USE_CPU": "cpu", "ACCELERATE_USE_FSDP": "use_fsdp",
    "ACCELERATE_USE_DEEPSPEED": "use_deepspeed", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "zero_stage",
    "ACCELERATE_DYNAMO_BACKEND": "dynamo_backend",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
}  # fmt: skip
_HOSTS = ("deepspeed_hostfile", "deepspeed_inclusion_filter", "deepspeed_exclusion_filter", "mpirun_hostfile")
_RDZV = ("rdzv_backend", "rdzv_id", "rdzv_conf")


def read_line(words: Sequence[str], switches: Sequence[str], values: Sequence[str], tool: str) -> Line:
    """Flags up to the program, with `_` or `-`, with `=` or a blank; everything after it is the program's."""
    line, place = Line(), 0
    known = {*switches, *values}
    while place < len(words) and words[place].startswith("-"):
        name, equals, value = words[place].lstrip("-").partition("=")
        name = name.replace("-", "_")
        place += 1
        if name not in known:
            guess = nearest(name, known)
            hint = f"did you mean --{guess}?" if guess else f"see   {tool} --help"
            raise ConfigError(f"{tool} has no option --{name}", fix=hint)
        if name in switches:
            line.flags[name] = value if equals else "true"
        elif equals:
            line.flags[name] = value
        elif place < len(words):
            line.flags[name] = words[place]
            place += 1
        else:
            raise ConfigError(f"--{name} needs a value", fix=f"write for example:   {tool} --{name}=2 ...")
    if place >= len(words):
        raise ConfigError(
            f"{tool} names no program to run", fix=f"write for example:   duoka {tool} ... train.py --config x.yaml"
        )
    line.program, line.arguments = words[place], tuple(words[place + 1 :])
    line.is_module = any(name in line.flags for name in ("m", "module"))
    return line


def meaning_of_torchrun(words: Sequence[str]) -> Meaning:
    line = read_line(words, TORCHRUN_SWITCHES, TORCHRUN_VALUES, "torchrun")
    flags, notes = line.flags, []
    nodes = flags.get("nnodes", "1")
    low, _, high = nodes.partition(":")
    address, port = flags.get("master_addr", ""), flags.get("master_port", "")
    if "rdzv_endpoint" in flags:
        host, _, at = flags["rdzv_endpoint"].rpartition(":")
        address, port = address or (host or at), port or (at if host else "29400")
    is_c10d = low != "1" and "c10d" in flags.get("rdzv_backend", "")
    # Nodes without fixed places: some may be missing, or none was given.
    is_elastic = low != (high or low) or (is_c10d and "node_rank" not in flags)
    if is_c10d and not is_elastic:
        notes.append("torchrun's c10d numbers nodes itself and passes over --node_rank; duoka goes by it")
    passed = [f"--{name}" for name in flags if name in _RDZV]
    if passed and is_elastic:
        notes.append(f"{', '.join(passed)}: duoka's nodes have a rendezvous of their own, at {address}:{port}")
    elif passed:
        notes.append(f"{', '.join(passed)}: each rank is fixed by --node_rank here, so no rendezvous is configured")
    count = flags.get("nproc_per_node", "1")
    return _meaning(
        line, count if count.isdecimal() else "", nodes if is_elastic else low, flags.get("node_rank", ""), address,
        port, flags.get("max_restarts", ""), [], notes, is_elastic=is_elastic,
    )  # fmt: skip


def meaning_of_accelerate(words: Sequence[str]) -> Meaning:
    if words and words[0] == "config":
        raise ConfigError(
            "duoka needs no accelerate config: it finds this machine's devices by itself, and the rest is in the YAML",
            fix="leave it out; a file of it is read by   duoka accelerate launch --config_file FILE train.py x.yaml",
        )
    if words and words[0] in ("env", "test"):
        return Meaning(("env" if words[0] == "env" else "doctor",))
    if words and words[0] == "estimate-memory":
        names = [word for word in words[1:] if not word.startswith("-")]
        fix = "write a YAML with   model: NAME   and ask:   duoka plan x.yaml   (or   duoka plan --params 7B)"
        raise ConfigError(f"what {names[0] if names else 'a model'} needs depends on how it is trained", fix=fix)
    if words and words[0] == "merge-weights":
        fix = "name the folder that save_model wrote; a run's adapter is merged by   duoka export RUN\n"
        fix += "shards that FSDP wrote elsewhere:   duoka import-checkpoint FOLDER --model BASE -o DIR"
        raise ConfigError("there is nothing to merge: duoka writes whole weights under every strategy", fix=fix)
    if not words or words[0] != "launch":
        raise ConfigError(
            f"duoka accelerate {words[0] if words else ''} is not there: accelerate launch is",
            fix="write for example:   duoka accelerate launch --num_processes=2 train.py --config x.yaml",
        )
    line = read_line(words[1:], ACCELERATE_SWITCHES, ACCELERATE_VALUES, "accelerate launch")
    from_env = {name: value for name in _VARIABLES if (value := os.environ.get(name, "")) not in ("", "false", "False")}
    asked = asked_for({_VARIABLES[name]: value for name, value in from_env.items()} | line.flags)
    machines = str(asked.get("num_machines", 1))
    count = str(asked.get("num_processes", ""))
    if count.isdecimal() and machines.isdecimal() and int(machines) > 1:
        if int(count) % int(machines):
            raise ConfigError(
                f"--num_processes {count} counts all machines, and {machines} machines cannot share them evenly",
                fix=f"write:   --num_processes={int(machines) * (int(count) // int(machines) + 1)}",
            )
        count = str(int(count) // int(machines))
    notes = ["accelerate's own name for --main_port is --main_process_port"] if "main_port" in line.flags else []
    if hosts := [f"--{name}" for name in _HOSTS if name in line.flags]:
        said = "this line starts this machine alone; all of a list:   duoka train x.yaml --hostfile FILE"
        notes.append(f"{', '.join(hosts)}: {said}")
    if counted := [name for name in from_env if _VARIABLES[name] not in line.flags]:
        notes.append(f"{', '.join(counted)} of the environment: before the config file, after flags")
    if "config_file" not in line.flags and (default := default_config()):
        notes.append(f"{default} is read, as accelerate launch does (HF_HOME)")
    num_ranks = int(count) * int(machines) if count.isdecimal() else 1
    started = starting_environment(asked, line.flags)
    config = _config_of(line)
    of_run = asked if config is not None else {**asked, "parallelism_config": None}  # a script's own business
    given = _settings_of(of_run, num_ranks, {**os.environ, **started})
    if config is not None:
        _check_agreement(config, given, num_ranks)
    settings = [f"{key}={yaml_text(value)}" for key, value in given.items()]
    address, port = str(asked.get("main_process_ip") or ""), str(asked.get("main_process_port") or "")
    rank = str(asked.get("machine_rank", "")) if machines != "1" else ""
    restarts = line.flags.get("max_restarts", "")
    meaning = _meaning(line, count, machines, rank, address, port, restarts, settings, notes)
    # A script that makes an Accelerator finds there what accelerate launch would tell it.
    told = environment_of(asked) if meaning.words[0] == "launch" else {}
    return Meaning(meaning.words, {**started, **meaning.env, **told}, meaning.notes)


def _settings_of(asked: dict[str, Any], num_ranks: int, env: Mapping[str, str]) -> dict[str, Any]:
    """What the launcher's settings mean for a run, by our keys. Raises Faults."""
    from duoka.config.dialects.engine import grow, translate
    from duoka.config.dialects.rows import Start
    from duoka.config.overlays import read_pointed
    from duoka.config.yaml_lines import SourcePlace
    from duoka.errors import Faults
    from duoka.plan.hardware import read_machine

    told = {name: value for name, value in asked.items() if value not in ("", None)}
    tree = grow({"distributed_type": "NO", **told}, SourcePlace("accelerate launch", 0, ""), "")
    start = Start(num_ranks, bool(read_machine(env).gpus))
    done = translate(dialects()["accelerate"], tree, start, dialects(), Path(), read_pointed)
    if done.faults:
        raise Faults(done.faults)
    return {
        given.key: given.value
        for given in done.given.values()
        # Defaults of the launcher must not override the YAML.
        if not (given.key == "parallel.strategy" and given.value == "auto")
        and not (given.key == "train.precision" and str(asked.get("mixed_precision")) == "no")
    }


def _check_agreement(words: Sequence[str], given: Mapping[str, Any], num_ranks: int) -> None:
    """Refuse contradictions of launcher and YAML, instead of letting one win silently."""
    from duoka.config.catalog import leaves
    from duoka.config.load import Start, load_config
    from duoka.errors import Fault, Faults
    from duoka.plan.hardware import read_machine

    try:
        loaded = load_config(words[0], list(words[1:]), start=Start(num_ranks, bool(read_machine().gpus)))
    except ConfigError:
        return  # duoka train says what is wrong with it
    here, same = leaves(loaded.config), {"zero3": "fsdp"}
    faults = []
    for key, value in given.items():
        origin, own = loaded.origins.get(key, "default"), here.get(key)
        if (
            origin.endswith("default")
            or own in (value, "auto")
            or same.get(str(own), own) == same.get(str(value), value)
        ):
            continue
        what = f"{key} is {yaml_text(own)} ({origin}) and {yaml_text(value)} for accelerate launch"
        faults.append(Fault(what, key=key, fix="keep one of them"))
    if faults:
        raise Faults(faults)


def _meaning(
    line: Line, count: str, nodes: str, rank: str, address: str, port: str, restarts: str, settings: Sequence[str],
    notes: Sequence[str], *, is_elastic: bool = False,
) -> Meaning:  # fmt: skip
    is_theirs = Path(*line.program.split(".")).with_suffix(".py").is_file()  # the guide's own code is here: run that
    env: dict[str, str] = {}
    if nodes != "1" and not is_elastic:
        several = {"NNODES": nodes, "NODE_RANK": rank, "MASTER_ADDR": address, "MASTER_PORT": port}
        env = {name: value for name, value in several.items() if value}
    if line.is_module and line.program in STAGE_MODULES and not is_theirs:
        if is_elastic:
            raise ConfigError(
                f"{line.program} by flags needs a fixed number of machines, each with its place",
                fix="write --nnodes=2 --node_rank=0 --master_addr=HOST --master_port=29500, or a YAML for "
                "  duoka train x.yaml --nodes 1:2 --meet HOST:29500",
            )
        words = [PYTHON_MODULES[line.program], *(["--nproc", count] if count else [])]
        words += ["--port", port] if port and not env else []
        own = line.arguments[1:] if line.arguments[:1] == ("--",) else line.arguments
        if line.program == "scripts.base_train" and not any(word.startswith("--depth") for word in own):
            own = (f"--depth={THEIR_DEPTH}", *own)
            notes = [*notes, f"{line.program} without --depth is a model of {THEIR_DEPTH} layers"]
        return Meaning((*words, *own), env, tuple(notes))
    if line.is_module and line.program in LATER_MODULES and not is_theirs:
        raise ConfigError(f"{line.program} is a command of its own here", fix=LATER_MODULES[line.program])
    config = _config_of(line)
    if config is None and not line.is_module and not Path(line.program).is_file():
        raise ConfigError(
            f"there is no script {line.program}, and no YAML behind it that duoka could train",
            fix="write for example:   duoka train x.yaml --nproc 2",
        )
    if nodes != "1" and not is_elastic:
        port = ""
    words = ["train", *config] if config is not None else ["launch"]
    words += ["--nproc", count] if count else []
    words += ["--nodes", nodes, "--meet", f"{address}:{port}" if address else ""] if is_elastic else []
    words += ["--port", port] if port and not is_elastic else []
    words += ["--restarts", restarts] if restarts not in ("", "0") else []
    if config is not None:
        words += ["--dry-run"] if any(map(_is_dry_run, line.arguments)) else []
        return Meaning((*words, *settings), env, tuple(notes))
    if is_elastic:
        folder = _shared_folder(line)
        words += ["--output", folder]
        notes = [*notes, f"{folder} must be on a disk that all machines see: the secret of the rendezvous lies there"]
    words += ["--module"] if line.is_module else []
    return Meaning((*words, line.program, *line.arguments), env, tuple(notes))


def _shared_folder(line: Line) -> str:
    """One name on all machines, for the logs of a script of one's own."""
    name = line.program.rpartition(".")[2] if line.is_module else Path(line.program).stem
    asked = line.flags.get("rdzv_id", "").strip("./")
    return line.flags.get("log_dir") or f"runs/{name}{'-' if asked else ''}{asked.replace('/', '-')}"


def _config_of(line: Line) -> list[str] | None:
    """[the YAML, key=value ...] when the program is duoka, or a guide's train.py that is not there; else None."""
    is_duoka = line.is_module and line.program in ("duoka", "duoka.cli")
    words = list(line.arguments)
    if is_duoka and words[:1] == ["train"]:
        words = words[1:]
    elif line.is_module or Path(line.program).is_file() or Path(line.program).name not in ("train.py", "duoka"):
        return None
    out = settings_of_words([word for word in words if not _is_dry_run(word)])
    files = [word for word in out if word.endswith((".yaml", ".yml", ".json")) and "=" not in word]
    if not files:
        return None
    return [files[0], *(word for word in out if word != files[0])]


def _is_dry_run(word: str) -> bool:
    """duoka's own flag behind a guide's line, of one who wants to know first what it would do."""
    return word.replace("_", "-") == "--dry-run"


def settings_of_words(words: Sequence[str], *, only: Container[str] | None = None) -> list[str]:
    """`--config x.yaml --lr 1e-4 --bf16` as `x.yaml lr=1e-4 bf16=true`: flags of a script as a file and its keys.

    `only`: names of keys; other flags stay as they are.
    """
    switches = {name for name, row in dialects()["llamafactory"].rows.items() if row.is_switch}
    out: list[str] = []
    place = 0
    while place < len(words):
        name, equals, value = words[place].partition("=")
        if only is not None and not equals and name.startswith("-") and name.lstrip("-").replace("-", "_") not in only:
            out.append(name)
        elif name.lstrip("-") in ("config", "config_file", "c") and name.startswith("-"):
            if not equals:
                place += 1
                value = words[place] if place < len(words) else ""
            out.append(value)
        elif name.startswith("--") and equals:
            out.append(f"{name[2:].replace('-', '_')}={value}")
        elif name.startswith("--"):
            following = words[place + 1] if place + 1 < len(words) else ""
            key = name[2:].replace("-", "_")
            # A switch may stand alone before a file or another setting.
            takes = bool(following) and not following.startswith("-")
            takes = takes and (key not in switches or is_true(following) or is_false(following))
            out.append(f"{key}={following if takes else 'true'}")
            place += takes
        elif words[place] != "train":
            out.append(words[place])
        place += 1
    return out
