"""The first hour of somebody who has Python, git and make, and nothing else: pages followed word by word.

    python benchmarks/first_hour.py --bind /folder/that/pip/needs [--who duoka,trl,llamafactory]

Makes an empty root (its own mounts: the system read-only, an empty home, no cache), types what the README and three
task pages say, in one shell, and writes down minutes, megabytes and commands. Every line typed for duoka stands on its
page, or the script ends. The quick starts of TRL and LLaMA-Factory are typed as literally, with a model and a data set
from a folder in the place of their Hub's: that one model of 135M, those 120 conversations. Linux, as root. Writes
first_hour.json and the table of first_hour.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from watching import describe_machine, fill_page, stamp

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[1]
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc")
KEPT = re.compile(r"PIP_|SSL_|.*_PROXY$|.*_proxy$")
END = "::ended::"
QUESTION = "Who are you?"


@dataclass
class Line:
    """What is typed, and the page that says so; `is_given`: not counted: files and folders that stand ready."""

    typed: str
    page: str = ""
    is_given: bool = False
    code: int = 0


@dataclass
class Way:
    name: str
    lines: list[Line]


def ways(yaml: str) -> list[Way]:
    ask = [{"role": "user", "content": QUESTION}]
    code = f"from transformers import pipeline; print(pipeline('text-generation', 'OUT')({ask})[0]['generated_text'])"
    answer = f'python -c "{code}"'
    tune, use = "docs/howto/finetune.md", "docs/howto/use.md"
    return [
        Way("duoka", [
            Line("git clone /given/repository duoka", is_given=True), Line("cd duoka", is_given=True),
            Line("make demo", "README.md"), Line(". .venv/bin/activate", "README.md"),
            Line("cp examples/own_data.jsonl mine.jsonl", is_given=True),
            Line("duoka new mine.yaml --data mine.jsonl --method lora", tune),
            Line("duoka data inspect mine.yaml", tune), Line("duoka train mine.yaml", tune),
                Line('duoka chat runs/mine --prompt "What are your opening hours?"', tune),
            Line('duoka plan --params 13B --on RTX4090 lora="{rank: 16}"', "docs/howto/lora.md", code=4),
            Line("duoka export runs/mine -o mine-model", use), Line("duoka chat mine-model --prompt 'Who are you?'"),
        ]),
        Way("trl", [
            Line("python -m venv env", is_given=True), Line(". env/bin/activate", is_given=True),
            Line("pip install trl peft"),
            Line("trl sft --model_name_or_path /given/model --dataset_name /given/data --output_dir out --use_peft"
                 " --num_train_epochs 3 --use_cpu"),
            Line(answer.replace("OUT", "out")),
        ]),
        Way("llamafactory", [
            Line("python -m venv env", is_given=True), Line(". env/bin/activate", is_given=True),
            Line("pip install llamafactory"),
            Line(f"cat > lora.yaml <<'X'\n{yaml}X", is_given=True),
            Line("llamafactory-cli train lora.yaml"),
            Line("llamafactory-cli export model_name_or_path=/given/model adapter_name_or_path=out template=chatml"
                 " export_dir=merged"),
            Line(answer.replace("OUT", "merged")),
        ]),
    ]  # fmt: skip


LLAMAFACTORY = """\
model_name_or_path: /given/model
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset_dir: /given/data
dataset: identity
template: chatml
cutoff_len: 2048
output_dir: out
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
"""


def check_pages(way: Way) -> None:
    for line in way.lines:
        if line.page and line.typed not in (ROOT / line.page).read_text(encoding="utf-8"):
            raise SystemExit(f"{line.page} does not say: {line.typed}")


def give(folder: Path) -> None:
    """The model as a plain folder, and 120 conversations in the forms of both peers."""
    from duoka.config.schema import ModelConfig
    from duoka.hub.models import model_folder

    (folder / "model").symlink_to(model_folder(ModelConfig(name="demo"), Path()).resolve())
    found = next((ROOT / "src/duoka/data/builtin").glob("identity*.jsonl"))
    rows = [json.loads(line) for line in found.read_text(encoding="utf-8").splitlines()]
    (folder / "data").mkdir()
    text = "".join(json.dumps({"messages": row["messages"]}, ensure_ascii=False) + "\n" for row in rows)
    (folder / "data" / "train.jsonl").write_text(text, encoding="utf-8")
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    columns = {"messages": "messages"}
    entry = {
        "file_name": "train.jsonl",
        "formatting": "sharegpt",
        "columns": columns,
        "tags": {**tags, "system_tag": "system"},
    }
    (folder / "data" / "dataset_info.json").write_text(json.dumps({"identity": entry}))


@contextmanager
def shell(root: Path, given: Path, binds: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A shell in the empty root. Its mounts are its own, and end with it."""
    python = Path(sys.base_prefix)
    seen = [*(one for one in SYSTEM if Path(one).exists()), str(python), *binds]
    mounts = []
    for name in dict.fromkeys(seen):
        mounts += [
            f"mkdir -p {root}{name}",
            f"mount --rbind {name} {root}{name}",
            f"mount -o remount,ro,bind {root}{name} || true",
        ]
    for name, source in (("repository", ROOT), ("model", (given / "model").resolve()), ("data", given / "data")):
        mounts += [f"mkdir -p {root}/given/{name}", f"mount --bind {source} {root}/given/{name}"]
    mounts += [f"mkdir -p {root}/proc {root}/dev {root}/tmp {root}/home/user", f"mount --rbind /dev {root}/dev",
               f"mount -t proc proc {root}/proc"]  # fmt: skip
    kept = [f"{key}={value}" for key, value in os.environ.items() if KEPT.match(key)]
    path = f"PATH={python / 'bin'}:/usr/bin:/bin:/usr/sbin:/sbin"
    safe = "git config --global --add safe.directory '*'; cd"
    inside = [
        "chroot",
        str(root),
        "env",
        "-i",
        "HOME=/home/user",
        "LANG=C.UTF-8",
        path,
        *kept,
        "bash",
        "-c",
        f"{safe}; exec bash",
    ]
    command = " && ".join(mounts) + " && exec " + shlex.join(inside)
    process = subprocess.Popen(
        ["unshare", "--mount", "--propagation", "private", "bash", "-c", command], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(timeout=60)


def type_in(process: subprocess.Popen[str], typed: str, log: Path) -> tuple[int, str]:
    """The line's exit code, and what it printed."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{typed}\necho {END}$?\n")
    process.stdin.flush()
    said: list[str] = []
    with log.open("a", encoding="utf-8") as out:
        out.write(f"$ {typed}\n")
        for line in process.stdout:
            if END in line:
                before, _, code = line.partition(END)
                return int(code), "".join([*said, before])
            said.append(line)
            out.write(line)
    raise SystemExit(f"the shell ended at {typed!r}; see {log}")


def follow(way: Way, folder: Path, given: Path, binds: list[str]) -> dict[str, Any]:
    root, log = folder / way.name, folder / f"{way.name}.log"
    root.mkdir()
    steps, answer = [], ""
    with shell(root, given, binds) as process:
        for line in way.lines:
            began = time.monotonic()
            code, said = type_in(process, line.typed, log)
            seconds = round(time.monotonic() - began, 1)
            print(f"{way.name}: {line.typed.splitlines()[0]} -> {code}, {seconds} s", flush=True)
            if code != line.code:
                raise SystemExit(f"{way.name} fails at {line.typed!r} with {code}:\n{said[-3000:]}")
            steps.append({"typed": line.typed, "page": line.page, "given": line.is_given, "seconds": seconds})
            answer = said.strip().splitlines()[-1] if said.strip() else answer
    size = int(
        subprocess.run(
            ["du", "-sm", root / "home", root / "tmp"], capture_output=True, text=True, check=True
        ).stdout.split()[0]
    )
    return {"steps": steps, "answer": answer[-300:], "home_mib": size}


def table(found: dict[str, Any]) -> str:
    lines = [
        "| | commands typed | minutes until the model answers | of them installing | on disk | its last words |",
        "|---|---|---|---|---|---|",
    ]
    for name, one in found.items():
        if "left_out" in one:
            lines.append(f"| {name} | | | | | did not get there: {one['left_out']} |")
            continue
        steps = one["steps"]
        installing = sum(
            step["seconds"] for step in steps if "pip install" in step["typed"] or "venv" in step["typed"].split(".")[0]
        )
        total = sum(step["seconds"] for step in steps)
        typed = sum(not step["given"] for step in steps)
        words = one["answer"].replace("|", "\\|")[:120]
        told = f"{installing / 60:.1f}" if installing > 6 else "in `make demo`"
        lines.append(f"| {name} | {typed} | {total / 60:.1f} | {told} | {one['home_mib']:,} MiB | {words} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bind", action="append", default=[], help="a folder that pip needs (an index on disk)")
    parser.add_argument("--who", default="duoka,trl,llamafactory")
    parser.add_argument("--folder", type=Path, help="roots and logs stay here")
    parser.add_argument("--out", type=Path, default=HERE / "first_hour.json")
    asked = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="first-hour-"))
    given = folder / "given"
    given.mkdir(parents=True)
    give(given)
    found: dict[str, Any] = {}
    for way in ways(LLAMAFACTORY):
        if way.name not in asked.who.split(","):
            continue
        check_pages(way)
        try:
            found[way.name] = follow(way, folder, given, asked.bind)
        except SystemExit as error:
            if way.name == "duoka":
                raise
            found[way.name] = {"left_out": str(error).strip().splitlines()[-1][:200]}
            print(str(error), flush=True)
    asked.out.write_text(
        json.dumps({**stamp(), "machine": describe_machine(), "found": found}, indent=1, ensure_ascii=False)
    )
    if (page := asked.out.with_suffix(".md")).exists():
        fill_page(page, table(found), "table")
    print(table(found))


if __name__ == "__main__":
    main()
