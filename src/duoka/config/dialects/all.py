"""The dialects by name, and which of them a file is in."""

from __future__ import annotations

from functools import cache

from duoka.config.catalog import known_keys
from duoka.config.dialects.accelerate import accelerate
from duoka.config.dialects.axolotl import refuse_axolotl
from duoka.config.dialects.deepspeed import deepspeed
from duoka.config.dialects.engine import leaves_of
from duoka.config.dialects.llamafactory import llamafactory
from duoka.config.dialects.nested import nested
from duoka.config.dialects.rows import Dialect
from duoka.config.dialects.trl import refuse_trl
from duoka.config.yaml_lines import Tree
from duoka.errors import Fault


@cache
def dialects() -> dict[str, Dialect]:
    return {dialect.id: dialect for dialect in (llamafactory(), nested(), accelerate(), deepspeed())}


def speaks(tree: Tree, dialect: Dialect) -> bool:
    """Whether a file that extends one in `dialect` goes on in its words.

    Both are one file then: what the other tool does where a file is silent is asked of all that is written.
    """
    own = recognize(tree)
    if own is not None or not tree.value:
        return own is dialect
    return all(
        leaf.name in dialect.rows and not (leaf.name in known_keys() and isinstance(leaf.tree.value, dict))
        for leaf in leaves_of(dialect, tree)
    )


# Keys of LLaMA-Factory's second form (its examples/v1); three of them are no accident.
_V1 = {
    "model_class", "dist_config", "kernel_config", "quant_config", "peft_config", "init_config", "optim_config",
    "train_dataset", "micro_batch_size", "sample_backend", "batching_strategy", "cp_size", "cp_mode",
}  # fmt: skip


def _refuse_benchmark(tree: Tree) -> Fault | None:
    """What `llamafactory-cli eval` reads: MMLU, C-Eval or CMMLU by name, fetched from the Hub."""
    if "task" not in tree.value or "model_name_or_path" not in tree.value or "dataset" in tree.value:
        return None
    task: Tree = tree.value["task"]
    what = f"this asks for LLaMA-Factory's benchmark ({task.value}), which duoka does not read"
    fix = (
        "MMLU in a folder of yours, and other tasks:   duoka eval RUN --tasks mmlu:FOLDER   (docs/tasks.md)\n"
        "C-Eval and CMMLU: lm-evaluation-harness with duoka.evals.lm_eval_model"
    )
    return task.place.fault(what, key="task", fix=fix)


def refuse_unread_form(tree: Tree) -> Fault | None:
    """What a file is that is known and not read; None for all others."""
    other = refuse_trl(tree) or refuse_axolotl(tree) or _refuse_benchmark(tree)
    if other is not None:
        return other
    known = [key for key in tree.value if key in _V1]
    peft = tree.value.get("peft_config")
    merges = peft is not None and isinstance(peft.value, dict) and "export_dir" in peft.value
    if (len(known) < 3 and not merges) or "model_name_or_path" in tree.value:
        return None
    what = f"this is LLaMA-Factory's v1 form ({', '.join(known[:3])} ...), which duoka does not read"
    fix = "write the usual form (model_name_or_path, dataset, per_device_train_batch_size), or:   duoka init x.yaml"
    if merges:
        fix = "write   duoka export ADAPTER -o DIR   or the usual form (adapter_name_or_path, export_dir) at the top"
    first: Tree = tree.value[known[0]]
    return first.place.fault(what, fix=fix)


def recognize(tree: Tree) -> Dialect | None:
    """The dialect that a file is in, judged by its keys; None for duoka's own."""
    top = tree.plain_value()
    if not isinstance(top, dict):
        return None
    return next((dialect for dialect in dialects().values() if dialect.fits(top)), None)
