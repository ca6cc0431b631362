"""`duoka doctor`: are this machine, or several, fit for training? Exit code 3 when a finding is a blocker."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from duoka.cli.hosts import HostFlags, host_options, typed_hosts

if TYPE_CHECKING:
    from duoka.cluster.doctor import Finding
    from duoka.cluster.findings import NodeFinding
    from duoka.cluster.survey import Question
    from duoka.config.hosts import Host
    from duoka.config.loaded import Loaded
    from duoka.plan.report import Plan

_MARKS = {"ok": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "red"), "skip": ("-   ", None)}


@click.command("doctor", help="Check this machine, or those of --hosts (and of CONFIG): are they fit, and alike?")
@click.argument("config", type=click.Path(), required=False)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@host_options
@click.option(
    "--slurm",
    is_flag=False,
    flag_value="job",
    default="",
    metavar="KEY=VALUE,...",
    help="Nodes of Slurm: partition=gpu,nodes=2; without keys those of the job that this is in.",
)
@click.option("--k8s", default="", metavar="NAME", help="The pods of a running Kubernetes Job.")
@click.option(
    "--level", type=click.Choice(["quick", "net", "burn"]), default="quick", show_default=True,
    help="net: connect all pairs of hosts, both ways; burn: each processor computes, and is compared.",
)  # fmt: skip
@click.option("--seconds", type=click.FloatRange(1), default=10.0, show_default=True, help="How long burn computes.")
@click.option("--fix", is_flag=True, help="Ask for each fix that is a safe command of your own whether to run it.")
@click.option("--output", default="", help="The folder that runs will be written to; default: CONFIG's, or runs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    config: str | None, overrides: tuple[str, ...], hosts: str, hostfile: str, include: str, exclude: str, slurm: str,
    k8s: str, level: str, seconds: float, fix: bool, output: str, as_json: bool,
) -> int:  # fmt: skip
    from duoka.cluster.allocation import HERE, look_in_job, nodes_of_job, pods_of_job
    from duoka.cluster.burn import burn_here
    from duoka.cluster.doctor import examine
    from duoka.config.hosts import read_hosts
    from duoka.config.load import load_config
    from duoka.errors import ConfigError

    loaded = load_config(config, overrides) if config else None
    found = typed_hosts(HostFlags(hosts, hostfile, include, exclude))
    if sum(map(bool, (found, slurm, k8s))) > 1:
        raise ConfigError("--hosts, --slurm and --k8s each name machines", fix="keep one of them")
    if slurm not in ("", HERE):
        words = [*filter(None, (config, *overrides)), "--level", level, "--seconds", f"{seconds:g}"]
        words += ["--output", output] if output else []
        return look_in_job(slurm, [*words, *(["--json"] if as_json else []), *(["--fix"] if fix else [])])
    if slurm or k8s:
        found = nodes_of_job(os.environ) if slurm else pods_of_job(k8s)
    if not found and loaded is not None and loaded.config.cluster.hosts:
        found = read_hosts(loaded.config.cluster.hosts)
    output = output or (loaded.config.output if loaded is not None else "runs")
    if fix and as_json:
        raise ConfigError("--fix asks questions, and --json is for programs", fix="keep one of them")
    if found:
        plan = _plan_for(config, overrides, len(found)) if config else None
        findings = _examine_hosts(found, loaded, output, level, seconds, plan)
        findings += _look_at_time(slurm, k8s, plan)
        code = _print_json(findings) if as_json else _show_hosts(findings)
        return _offer_fixes([one.fix for one in findings if one.severity in ("warn", "fail")], code) if fix else code
    if level == "net":
        raise ConfigError(f"--level {level} is about several machines", fix="name them:   --hosts a,b")
    here = examine(Path(output)) + (_as_ours(burn_here(seconds)) if level == "burn" else [])
    code = _print_json(here) if as_json else _show_one(here)
    return _offer_fixes([one.fix for one in here if one.severity in ("warn", "fail")], code) if fix else code


def _offer_fixes(fixes: Sequence[str], code: int) -> int:
    """Run what is safe to run, each after a yes. The exit code is that of the findings: look again."""
    import shlex
    import subprocess

    from duoka.cluster.fixes import safe_command

    commands = {shlex.join(words): words for words in map(safe_command, fixes) if words}
    for text, words in commands.items():
        click.echo()
        if click.confirm(f"run:   {text}", default=False):
            done = subprocess.run(words)
            click.echo(f"exit code {done.returncode}")
    if not commands:
        click.echo("\nnone of these fixes is a command that is safe to run from here")
    else:
        click.echo("\nlook again:   duoka doctor")
    return code


def _as_ours(findings: Sequence[NodeFinding]) -> list[Finding]:
    """Of processors of this machine, as one of its findings."""
    from duoka.cluster.doctor import Finding

    return [Finding(one.severity, one.check, _values_of(one), one.cause, one.fix) for one in findings]


def _values_of(one: NodeFinding) -> str:
    return "; ".join(f"{name}: {value}" if name != "all" else value for name, value in one.nodes.items())


def _show_one(findings: Sequence[Finding]) -> int:
    width = max(len(one.check) for one in findings)
    for one in findings:
        _print_line(one.severity, one.check.ljust(width), one.seen)
        if one.severity in ("warn", "fail"):
            _print_more(width, wanted=one.wanted, do=one.fix)
    return _print_sum(findings, "training would not work here")


def _print_json(findings: Sequence[Finding] | Sequence[NodeFinding]) -> int:
    blockers = [one for one in findings if one.severity == "fail"]
    answer: dict[str, Any] = {"fit": not blockers, "findings": [asdict(one) for one in findings]}
    click.echo(json.dumps(answer, indent=2, ensure_ascii=False))
    return _exit_code(len(blockers))


def _exit_code(num_blockers: int) -> int:
    from duoka.errors import DoctorError

    return DoctorError.exit_code if num_blockers else 0


def _print_line(severity: str, check: str, seen: str) -> None:
    word, color = _MARKS[severity]
    click.echo(f"{click.style(word, fg=color)}  {check}  {seen}")


def _print_more(width: int, **words: str) -> None:
    for name, text in words.items():
        if text:
            click.echo(f"{' ' * (width + 8)}{name}: {text}")


def _print_sum(findings: Sequence[Finding] | Sequence[NodeFinding], consequence: str) -> int:
    num_blockers = sum(one.severity == "fail" for one in findings)
    warned = sum(one.severity == "warn" for one in findings)
    if num_blockers:
        click.echo(f"\n{num_blockers} blocker{'s' if num_blockers > 1 else ''}: {consequence}")
    else:
        click.echo(f"\nfit for training{f', with {warned} warning' + 's' * (warned > 1) if warned else ''}")
    return _exit_code(num_blockers)


# --- several machines ---


def _plan_for(config: str, overrides: tuple[str, ...], num_nodes: int) -> Plan | None:
    """None where there is none: what is wrong with the config is for `duoka plan` to say."""
    from duoka.cli.plan import plan_for_nodes
    from duoka.errors import DuokaError

    try:
        return plan_for_nodes(config, overrides, num_nodes)
    except DuokaError:
        return None


def _look_at_time(slurm: str, k8s: str, plan: Plan | None) -> list[NodeFinding]:
    from duoka.cluster.allocation import LOOKS, time_left_of_job, time_left_of_pods
    from duoka.cluster.compare_run import judge_time_left

    run_s = None if plan is None else plan.costs.total_s
    if k8s:
        return [judge_time_left(time_left_of_pods(k8s), run_s, "Kubernetes")]
    if slurm and os.environ.get("SLURM_JOB_NAME") != LOOKS:
        return [judge_time_left(time_left_of_job(os.environ), run_s, "Slurm")]
    return []


def _examine_hosts(
    hosts: list[Host], loaded: Loaded | None, output: str, level: str, seconds: float, plan: Plan | None
) -> list[NodeFinding]:
    from duoka.cluster.burn import burn_nodes
    from duoka.cluster.survey import examine_nodes

    question = _question(loaded, output, 0 if plan is None else plan.costs.checkpoint_bytes)
    findings = examine_nodes(hosts, question, "quick" if level == "quick" else "net")
    return findings + (burn_nodes(hosts, question.folder, seconds) if level == "burn" else [])


def _show_hosts(findings: Sequence[NodeFinding]) -> int:
    width = max(len(one.check) for one in findings)
    for one in findings:
        values = _values_of(one)
        if one.check == "reach" and one.severity == "ok":
            values = f"{len(one.nodes)} machines answer: {', '.join(one.nodes)}"
        _print_line(one.severity, one.check.ljust(width), values)
        if one.severity in ("warn", "fail"):
            _print_more(width, cause=one.cause, do=one.fix)
    return _print_sum(findings, "training over these machines would not work")


def _question(loaded: Loaded | None, output: str, checkpoint_bytes: int) -> Question:
    from duoka.cluster.survey import Question

    paths = paths_of(loaded) if loaded is not None else ()
    return Question(paths, output, checkpoint_bytes=checkpoint_bytes)


def paths_of(loaded: Loaded) -> list[str]:
    """The config, its data and its model: what must be the same everywhere."""
    from duoka.data.read.registry import find_sets
    from duoka.hub.models import find_model

    files = [path for found in find_sets(loaded.config, loaded.base) for path in found.files]
    folder = find_model(loaded.config.model, loaded.base).folder
    paths = [loaded.path, *files, *((folder,) if folder else ())]
    return list(dict.fromkeys(os.path.abspath(path) for path in paths))
