"""Contradictions of stage rl: what a model that answers while it is trained does not bear.

A part of the table in rules.py, which evaluates it.
"""

from __future__ import annotations

import re

from duoka.config.rl import CALCULATOR, ENGINES, JUDGE, TASK_REWARD, RlConfig, ValuesConfig
from duoka.config.rule import Rule, names_of
from duoka.config.schema import DataConfig, RunConfig
from duoka.units import parse_amount

_NONE = RlConfig()
_ENGINE = re.compile(rf"({'|'.join(ENGINES)}):https?://[^\s/]+\S*")
_STRATEGIES = ("auto", "single", "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp")


def _draws(c: RunConfig) -> bool:
    return c.stage.kind.draws


def _micro_is_more_than_all_answers(c: RunConfig) -> bool:
    if not _draws(c) or c.train.micro_batch == "auto":
        return False
    micro, batch = parse_amount(c.train.micro_batch), parse_amount(c.train.global_batch)
    return micro.unit == batch.unit and micro.count > batch.count * c.rl.samples


def _is_reward(name: str) -> bool:
    return name == TASK_REWARD or ".py:" in name or (name.startswith(JUDGE) and name != JUDGE)


def _unread_data(c: RunConfig) -> bool:
    usual = DataConfig(train=c.data.train)
    return any(getattr(c.data, key) != getattr(usual, key) for key in ("eval", "on_long", "targets", "fixed_rows"))


def _is_mixed(c: RunConfig) -> bool:
    return not all(source.is_plain for source in c.data.train)


def _is_cut(c: RunConfig) -> bool:
    return c.parallel.sequence * c.parallel.tensor * c.parallel.pipeline > 1


RL_RULES: tuple[Rule, ...] = (
    Rule(
        "rl-is-another-stage",
        ("rl", "stage"),
        lambda c: not _draws(c) and c.rl != RlConfig(),
        "the block rl is written, and stage {c.stage.name} does not read it",
        "write:   stage: rl   or delete the block",
    ),
    Rule(
        "rl-batch-of-prompts",
        ("train.global_batch", "stage"),
        lambda c: _draws(c) and parse_amount(c.train.global_batch).unit != "samples",
        'train.global_batch is "{c.train.global_batch}", and stage rl counts prompts, each answered rl.samples times',
        "write for example:   global_batch: 16",
    ),
    Rule(
        "rl-micro-above-answers",
        ("train.micro_batch", "train.global_batch", "rl.samples", "stage"),
        _micro_is_more_than_all_answers,
        "train.micro_batch is {c.train.micro_batch} answers, and a step has fewer: train.global_batch "
        "({c.train.global_batch}) prompts, each answered rl.samples ({c.rl.samples}) times",
        "write:   micro_batch: auto   or a larger global_batch",
    ),
    Rule(
        "rl-answer-has-no-room",
        ("rl.max_new_tokens", "data.max_length", "stage"),
        lambda c: _draws(c) and c.rl.max_new_tokens >= c.data.max_length,
        "rl.max_new_tokens ({c.rl.max_new_tokens}) leaves no room for a prompt in data.max_length "
        "({c.data.max_length})",
        "write a larger max_length, or a smaller max_new_tokens",
    ),
    Rule(
        "rl-data-are-prompts",
        ("data.eval", "data.on_long", "data.targets", "data.fixed_rows", "stage"),
        lambda c: _draws(c) and _unread_data(c),
        "stage rl reads prompts alone: data.eval, data.on_long, data.targets and data.fixed_rows have no meaning there",
        "delete them; duoka eval RUN --tasks measures the result",
    ),
    Rule(
        "rl-prompts-count-once",
        ("data.train", "stage"),
        lambda c: _draws(c) and _is_mixed(c),
        "stage rl asks each prompt once in a pass: weight, share and epochs of a data set have no meaning there",
        "delete them; max_samples takes the first of a set",
    ),
    Rule(
        "rl-reward-of-a-task",
        ("rl.rewards", "data.train", "stage"),
        lambda c: _draws(c) and TASK_REWARD in c.rl.rewards and any(n[:5] != "task:" for n in names_of(c.data.train)),
        "rl.rewards is task, the check of the task that asked, and data.train names sets that are no tasks",
        "write a function of yours:   rewards: [rewards.py:score]   or name tasks:   train: [task:arithmetic]",
    ),
    Rule(
        "rl-reward-without-function",
        ("rl.rewards", "stage"),
        lambda c: _draws(c) and any(not _is_reward(name) for name in c.rl.rewards),
        "rl.rewards has a name that is neither task nor a file's function nor a reward model: {c.rl.rewards_said}",
        "write for example:   rewards: [rewards.py:score]   or   rewards: [model:runs/reward]",
    ),
    Rule(
        "rl-tool-is-a-function",
        ("rl.tools",),
        lambda c: any(name != CALCULATOR and ".py:" not in name for name in c.rl.tools),
        "rl.tools has a name that is neither calculator nor a file's function: {c.rl.tools_said}",
        "write for example:   tools: [calculator, tools.py:search]   (programs that the model wrote are run by a "
        "function of yours, where that is safe)",
    ),
    Rule(
        "rl-tools-of-one-name",
        ("rl.tools",),
        lambda c: len({name.rpartition(":")[2] for name in c.rl.tools}) < len(c.rl.tools),
        "two of rl.tools ({c.rl.tools_said}) have one name, by which the model calls them",
        "rename one of the functions",
    ),
    Rule(
        "rl-rounds-of-no-tool",
        ("rl.tool_rounds", "rl.tool_deadline", "rl.tools"),
        lambda c: not c.rl.tools and (c.rl.tool_rounds, c.rl.tool_deadline) != (_NONE.tool_rounds, _NONE.tool_deadline),
        "rl.tool_rounds or rl.tool_deadline is written, and there are no rl.tools",
        "write for example:   tools: [calculator]   or delete them",
    ),
    Rule(
        "rl-engine-has-an-address",
        ("rl.engine",),
        lambda c: c.rl.engine is not None and not _ENGINE.fullmatch(c.rl.engine),
        "rl.engine is {c.rl.engine}, and no kind of server with its address",
        "write for example:   engine: vllm:http://127.0.0.1:8000   or   engine: sglang:http://127.0.0.1:30000",
    ),
    Rule(
        "rl-engine-has-no-password",
        ("rl.engine",),
        lambda c: c.rl.engine is not None and "@" in c.rl.engine,
        "rl.engine has a user's name or a password in its address, which a run's files would show",
        "write the address alone, and give the server's key in the environment variable DUOKA_ENGINE_TOKEN",
    ),
    Rule(
        "rl-engine-draws-from-all",
        ("rl.engine", "rl.top_k", "rl.top_p"),
        lambda c: c.rl.engine is not None and (c.rl.top_k > 0 or c.rl.top_p < 1),
        "rl.engine tells how likely a token was among those that it drew from, and rl.top_k ({c.rl.top_k}) and "
        "rl.top_p ({c.rl.top_p}) leave some out, which training counts",
        "delete top_k and top_p",
    ),
    Rule(
        "rl-replay-draws-nothing",
        ("rl.engine", "rl.replay"),
        lambda c: c.rl.engine is not None and c.rl.replay is not None,
        "rl.replay learns from recorded answers, and rl.engine would draw others",
        "delete one of them",
    ),
    Rule(
        "rl-weight-for-each-reward",
        ("rl.reward_weights", "rl.rewards"),
        lambda c: bool(c.rl.reward_weights) and len(c.rl.reward_weights) != len(c.rl.rewards),
        "rl.reward_weights has another number of entries than rl.rewards",
        "write one weight for each reward, or none",
    ),
    Rule(
        "rl-clip-without-ratio",
        ("rl.clip", "rl.algorithm"),
        lambda c: c.rl.clip is not None and c.rl.row.ratio == "none",
        "rl.clip is written, and {c.rl.algorithm} takes no ratio that could be clipped",
        "delete it, or write   algorithm: grpo",
    ),
    Rule(
        "rl-updates-without-ratio",
        ("rl.updates", "rl.algorithm"),
        lambda c: c.rl.updates > 1 and c.rl.row.ratio == "none",
        "rl.updates is {c.rl.updates}, and {c.rl.algorithm} takes no account of how far the model has moved from where "
        "its answers were drawn",
        "write   updates: 1   or an algorithm with a ratio, such as grpo",
    ),
    Rule(
        "rl-values-without-gae",
        ("rl.values", "rl.advantage", "rl.algorithm"),
        lambda c: c.rl.values != ValuesConfig() and not c.rl.row.has_values,
        "rl.values is written, and {c.rl.algorithm} with advantage {c.rl.row.advantage} has no value head",
        "delete it, or write   algorithm: ppo",
    ),
    Rule(
        "rl-one-answer-compares-with-none",
        ("rl.samples", "rl.advantage", "stage"),
        lambda c: _draws(c) and c.rl.samples < 2 and not c.rl.row.has_values,
        "rl.samples is 1, and advantage {c.rl.row.advantage} compares the answers to one prompt: nothing is learned",
        "write   samples: 8   or an algorithm with a value head:   algorithm: ppo",
    ),
    Rule(
        "rl-values-drop-nothing",
        ("rl.drop_equal", "rl.advantage", "stage"),
        lambda c: _draws(c) and c.rl.row.drop_equal and c.rl.row.has_values,
        "rl.drop_equal leaves out prompts whose answers got one reward, and advantage gae learns from these too",
        "write   drop_equal: false",
    ),
    Rule(
        "rl-layouts",
        ("parallel.sequence", "parallel.tensor", "parallel.pipeline", "parallel.strategy", "stage"),
        lambda c: _draws(c) and (_is_cut(c) or c.parallel.strategy not in _STRATEGIES),
        "stage rl answers with whole layers, each prompt on one rank, and parallel: ({c.parallel.strategy}) cuts them",
        "delete tensor, pipeline and sequence; strategy is one of single, ddp, zero1, zero2, fsdp, hsdp",
    ),
    Rule(
        "rl-compiles-nothing",
        ("train.compile", "stage"),
        lambda c: _draws(c) and bool(c.train.compile),
        "train.compile is on, and answers grow by a token at a time: every length would be compiled anew",
        "delete it",
    ),
    Rule(
        "rl-drops-nothing",
        ("lora.dropout", "stage"),
        lambda c: _draws(c) and c.lora is not None and c.lora.dropout > 0,
        "lora.dropout is {c.lora.dropout}, and stage rl learns from answers of the model without it",
        "write:   dropout: 0",
    ),
    Rule(
        "rl-has-its-own-loss",
        ("train.loss", "train.label_smoothing", "stage"),
        lambda c: _draws(c) and (c.train.loss != "likelihood" or c.train.label_smoothing > 0),
        "train.loss ({c.train.loss}) and label_smoothing ({c.train.label_smoothing}) are of answers that data has",
        "delete them; rl.algorithm says what is learned",
    ),
)
