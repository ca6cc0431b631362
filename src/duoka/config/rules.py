"""What spans several keys: settings that contradict each other, as one table, all rows evaluated.

`load.py` calls `check_rules`. A row knows the config only; what depends on files, models or the machine is checked
by the rooms that know those. Rows about the optimizer, the model, the strategy and plain text have files of their own.
"""

from __future__ import annotations

import os

from duoka.config.catalog import leaves
from duoka.config.rule import Rule, names_of
from duoka.config.rules_compile import COMPILE_RULES
from duoka.config.rules_deepspeed import DEEPSPEED_RULES
from duoka.config.rules_expert import EXPERT_RULES
from duoka.config.rules_fp8 import FP8_RULES
from duoka.config.rules_model import MODEL_RULES
from duoka.config.rules_optim import OPTIM_RULES
from duoka.config.rules_parallel import PARALLEL_RULES
from duoka.config.rules_pipeline import PIPELINE_RULES
from duoka.config.rules_rl import RL_RULES
from duoka.config.rules_stages import STAGE_RULES
from duoka.config.rules_tensor import TENSOR_RULES
from duoka.config.rules_text import TEXT_RULES
from duoka.config.schema import RunConfig
from duoka.units import parse_amount

__all__ = ["RULES", "Rule", "check_rules"]

_NO_FOLDERS = ("", "no", "off", "none", "false", "yes", "on", "true", "latest", "last", "always")


def check_rules(config: RunConfig, skipped_keys: set[str] | frozenset[str] = frozenset()) -> list[Rule]:
    """Every rule that the config breaks, leaving out those about keys that were refused already."""
    return [rule for rule in RULES if not skipped_keys.intersection(rule.keys) and rule.is_broken(config)]


def _max_length_is_more_than_the_batch(c: RunConfig) -> bool:
    batch = parse_amount(c.train.global_batch)
    return batch.unit == "tokens" and batch.count < c.sample_tokens


def _micro_is_more_than_global(c: RunConfig) -> bool:
    if c.train.micro_batch == "auto" or c.stage.kind.draws:  # one counts answers there, and the other prompts
        return False
    micro, batch = parse_amount(c.train.micro_batch), parse_amount(c.train.global_batch)
    return micro.unit == batch.unit and micro.count > batch.count


def _bad_output(c: RunConfig) -> bool:
    path = os.path.normpath(os.path.expanduser(c.output))
    return bool(c.output) and path in (".", "..", "/", os.path.expanduser("~"))


def _long_output(c: RunConfig) -> bool:
    """A folder's name ends at 255 bytes everywhere, and checkpoints put some hundred behind the path."""
    try:
        parts = os.fsencode(os.path.expanduser(c.output)).split(b"/")
    except UnicodeEncodeError:  # letters that the locale does not have
        return True
    return (
        b"\0" in b"".join(parts)
        or any(len(part) > 255 for part in parts)
        or sum(len(part) + 1 for part in parts) > 3500
    )


RULES: tuple[Rule, ...] = (
    Rule(
        "output-is-no-path",
        ("output",),
        _long_output,
        "output is a path that no file system takes: a name has at most 255 bytes, none of them NUL, a path 4,095, "
        "all in letters that the shell's locale has",
        "write a shorter one:   output: runs/name   (for letters beyond ASCII:   export LC_ALL=C.UTF-8)",
    ),
    Rule(
        "batch-below-one-sample",
        ("train.global_batch", "data.max_length"),
        _max_length_is_more_than_the_batch,
        'train.global_batch is "{c.train.global_batch}", but one conversation may have data.max_length = '
        "{c.data.max_length} tokens and would not fit into a batch",
        "write a larger global_batch, or a smaller max_length",
    ),
    Rule(
        "micro-above-global",
        ("train.micro_batch", "train.global_batch"),
        _micro_is_more_than_global,
        "train.micro_batch ({c.train.micro_batch}) is more than train.global_batch ({c.train.global_batch}): "
        "one rank would compute at once more than a whole step holds",
        "write:   micro_batch: auto   or a larger global_batch",
    ),
    Rule(
        "eval-every-without-eval",
        ("train.eval_every", "data.eval", "train.eval_tasks"),
        lambda c: not c.is_evaluated and c.train.eval_every != "1 epoch",
        "train.eval_every is {c.train.eval_every}, but data.eval is 0 and train.eval_tasks names none: nothing "
        "is to be evaluated",
        "write:   eval: 0.1   under data:, or eval_tasks: [sort]   beside it, or delete eval_every",
    ),
    Rule(
        "train-set-twice",
        ("data.train",),
        lambda c: len(set(names_of(c.data.train))) < len(c.data.train),
        "data.train names a data set twice: its samples would be learned twice in every epoch",
        "name it once; train.epochs says how often all is seen, a weight how much a set counts",
    ),
    Rule(
        "eval-set-twice",
        ("data.eval",),
        lambda c: len(set(names_of(c.data.eval))) < len(names_of(c.data.eval)),
        "data.eval names a data set twice: its samples would be measured twice",
        "name it once",
    ),
    Rule(
        "eval-on-train",
        ("data.eval", "data.train"),
        # A task has items of its own for evaluation.
        lambda c: any(name in names_of(c.data.train) for name in names_of(c.data.eval) if name[:5] != "task:"),
        "data.eval names a data set that data.train learns: its loss would say nothing about new data",
        "write:   eval: 0.1   to hold a tenth of train back, or name another set",
    ),
    Rule(
        "eval-weight",
        ("data.eval",),
        lambda c: isinstance(c.data.eval, tuple) and not all(source.is_plain for source in c.data.eval),
        "data.eval gives a weight, share or epochs: an evaluation counts every sample once",
        "delete it",
    ),
    Rule(
        "mixture-in-two-measures",
        ("data.train",),
        lambda c: (
            any(source.weight is not None for source in c.data.train)
            and any(source.share is not None or source.epochs is not None for source in c.data.train)
        ),
        "data.train mixes by weight and by share or epochs: a weight divides an epoch of fixed length, the others make "
        "it longer or shorter",
        "write weights alone, or shares and epochs",
    ),
    Rule(
        "set-with-share-and-epochs",
        ("data.train",),
        lambda c: any(source.share is not None and source.epochs is not None for source in c.data.train),
        "data.train gives one set both a share and epochs: each alone says how many of its samples there are",
        "delete one of them",
    ),
    Rule(
        "shares-of-more-than-all",
        ("data.train",),
        lambda c: sum(source.share or 0.0 for source in c.data.train) >= 1.0,
        "the shares of data.train add up to 1 or more, and nothing is left for the other sets",
        "make them add up to less, or write them as weights",
    ),
    Rule(
        "shares-of-nothing-else",
        ("data.train",),
        lambda c: all(source.share is not None for source in c.data.train),
        "every set of data.train has a share, and a share is measured by the sets without one",
        "leave the share of one set out, or write them as weights",
    ),
    Rule(
        "fixed-rows-are-packed",
        ("data.fixed_rows", "data.packing", "parallel.strategy"),
        lambda c: c.data.fixed_rows and (not c.data.packing or c.parallel.strategy == "dp"),
        "data.fixed_rows packs samples into rows, but data.packing is {c.data.packing} and parallel.strategy is "
        "{c.parallel.strategy}",
        "delete fixed_rows, or write:   packing: true   (and not strategy: dp, which pads)",
    ),
    Rule(
        "resume-is-a-switch",
        ("checkpoint.resume",),
        lambda c: c.checkpoint.resume.strip().lower() in _NO_FOLDERS,
        'checkpoint.resume is "{c.checkpoint.resume}", which is neither auto, nor never, nor a folder',
        "write:   resume: auto   to go on from the newest checkpoint, or   resume: never",
    ),
    Rule(
        "keep-best-of-nothing",
        ("checkpoint.keep_best", "checkpoint.best_by", "data.eval"),
        lambda c: c.checkpoint.keep_best and c.checkpoint.best_by == "loss" and not c.data.eval,
        "checkpoint.keep_best is on, but data.eval is 0: no evaluation loss says which checkpoint is the best",
        "write:   eval: 0.1   under data:, or best_by: TASK   of train.eval_tasks, or delete keep_best",
    ),
    Rule(
        "eval-tasks-of-scores",
        ("train.eval_tasks", "stage"),
        lambda c: bool(c.train.eval_tasks) and c.stage.kind.scores,
        "train.eval_tasks asks the model questions, and stage {c.stage.name} trains one that says no words",
        "delete it; data.eval measures a reward model",
    ),
    Rule(
        "eval-tasks-with-axes",
        ("train.eval_tasks", "parallel.tensor", "parallel.pipeline", "parallel.sequence"),
        lambda c: bool(c.train.eval_tasks) and c.parallel.tensor * c.parallel.pipeline * c.parallel.sequence > 1,
        "train.eval_tasks writes answers token by token, which is not done yet where several ranks share one model",
        "delete it, and score the run when it is done:   duoka eval RUN --tasks A,B",
    ),
    Rule(
        "best-by-no-task",
        ("checkpoint.best_by", "train.eval_tasks"),
        lambda c: c.checkpoint.best_by not in ("loss", *c.train.eval_tasks),
        "checkpoint.best_by is {c.checkpoint.best_by}, which is neither loss nor one of train.eval_tasks",
        "write:   best_by: loss   or the task as train.eval_tasks names it",
    ),
    Rule(
        "best-by-without-best",
        ("checkpoint.best_by", "checkpoint.keep_best"),
        lambda c: c.checkpoint.best_by != "loss" and not c.checkpoint.keep_best,
        "checkpoint.best_by is {c.checkpoint.best_by}, but checkpoint.keep_best is off: no best step is kept",
        "write:   keep_best: true   or delete best_by",
    ),
    Rule(
        "allowed-change-of-no-key",
        ("checkpoint.allow_changes",),
        lambda c: bool(set(c.checkpoint.allow_changes) - set(leaves(c)) - set(type(c).model_fields)),
        "checkpoint.allow_changes names what is no key: {c.checkpoint.allow_changes}",
        "write keys with their block, such as   allow_changes: [optim.lr]",
    ),
    Rule(
        "output-is-a-shared-folder",
        ("output",),
        _bad_output,
        "output is {c.output}: a run needs a folder of its own",
        "write for example:   output: runs/identity",
    ),
    *OPTIM_RULES,
    *MODEL_RULES,
    *PARALLEL_RULES,
    *COMPILE_RULES,
    *DEEPSPEED_RULES,
    *TENSOR_RULES,
    *EXPERT_RULES,
    *PIPELINE_RULES,
    *FP8_RULES,
    *TEXT_RULES,
    *STAGE_RULES,
    *RL_RULES,
)
