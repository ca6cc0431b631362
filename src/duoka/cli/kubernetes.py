"""`duoka train run.yaml --k8s image=...,nodes=2 -o job.yaml`: the run as a manifest for `kubectl apply`."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from duoka.cluster.kubernetes import Asked, Work
    from duoka.cluster.nodes import Flags


def write_manifest(k8s: str, out: str, config: str, overrides: tuple[str, ...], flags: Flags) -> int:
    """To the file `out`, or to stdout; what to type next goes to stderr."""
    from duoka.cluster.kubernetes import read_asked, render
    from duoka.cluster.run_lock import find_run_folder
    from duoka.config.load import load_config
    from duoka.errors import ConfigError

    if flags.nodes or flags.meet or flags.wait or flags.port:
        raise ConfigError(
            "--nodes, --meet, --wait and --port are not for --k8s",
            fix="they are keys there:   --k8s nodes=2,port=29500",
        )
    loaded = load_config(config, overrides)
    asked = read_asked(k8s, find_run_folder(loaded).name)
    typed = shlex.join(["duoka", "train", config, *overrides, "--k8s", k8s])
    text = manifest_text(render(asked, _work(config, overrides, flags, loaded.config)), typed)
    if out in ("", "-"):
        click.echo(text, nl=False)
    else:
        Path(out).write_text(text, encoding="utf-8")
    click.echo("\n".join(next_lines(asked, "-" if out in ("", "-") else out)), err=True)
    return 0


def _work(config: str, overrides: tuple[str, ...], flags: Flags, read: Any) -> Work:
    from duoka.cluster.kubernetes import Work
    from duoka.errors import ConfigError

    text = Path(config).read_text(encoding="utf-8")
    if re.search(r"^extends\s*:", text, re.MULTILINE):
        raise ConfigError(
            f"{config} extends another file, and pods get one", fix=f"duoka config show {config} > whole.yaml"
        )
    words = (("--nproc", flags.nproc), ("--restarts", flags.restarts))
    passed = [part for name, value in words if value for part in (name, str(value))]
    # The YAML's own hosts are for who starts machines by ssh.
    alone = ["cluster.hosts=[]"] if read.cluster.hosts else []
    # A name of its own: `config.yaml` would be taken for the one in a run folder.
    name = f"{re.sub(r'[^-.A-Za-z0-9_]', '-', Path(config).stem)}.yaml"
    # Which folder is meant must not depend on where the file lies.
    output = [] if any(word.startswith("output=") for word in overrides) else [f"output={read.output}"]
    return Work(
        name, text, [*overrides, *output, *alone, *passed], read.output, read.faults.stop_within_s,
        read.faults.patience_s,
    )  # fmt: skip


def manifest_text(documents: list[dict[str, Any]], typed: str) -> str:
    import yaml

    class Dumper(yaml.SafeDumper):
        """Long texts as blocks, nothing by reference: people read it."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def dump_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, dump_text)
    parts = [yaml.dump(one, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120) for one in documents]
    return f"# Written by: {typed}\n" + "---\n".join(parts)


def next_lines(asked: Asked, out: str) -> list[str]:
    """Start, watch, stop with a save, go on."""
    where = f" -n {asked.namespace}" if asked.namespace else ""
    job = f"job/{asked.name}" if asked.kind == "job" else f"trainjob/{asked.name}"
    label = "batch.kubernetes.io/job-name" if asked.kind == "job" else "jobset.sigs.k8s.io/jobset-name"
    pick = f"{label}={asked.name},batch.kubernetes.io/job-completion-index=0"
    suspend = f"kubectl{where} patch {job} --type=merge -p"
    return [
        f"start:             kubectl{where} apply -f {out}",
        f"watch:             kubectl{where} logs -f -l {pick}",
        f"""stop with a save:  {suspend} '{{"spec":{{"suspend":true}}}}'""",
        f"""go on:             {suspend} '{{"spec":{{"suspend":false}}}}'""",
    ]
