"""Stage rl, as types and one table: what an answer's reward does to its tokens, for each algorithm's name.

An algorithm is a row of `ALGORITHMS`: how rewards become advantages, what the ratio to the policy that drew the answer
is of, where it is clipped, what sums are divided by. Each column is a key, so that a row can be changed in one place.
docs/rl.md has the formulas with their sources.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from duoka.config.fields import Number, Seconds, Section, Whole

AlgorithmName = Literal["reinforce", "rloo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "ppo"]
Advantage = Literal["center", "group_std", "leave_one_out", "batch_std", "gae"]
Normalizer = Literal["tokens", "answers", "sequences", "length"]
Ratio = Literal["none", "token", "sequence", "weight"]
Weight = Annotated[Number, Field(ge=0)]
TASK_REWARD = "task"
ENGINES = ("vllm", "sglang")  # and their addresses
CALCULATOR = "calculator"  # a tool of ours
JUDGE = "model:"  # and a reward model's folder


@dataclass(frozen=True)
class Algorithm:
    """`ratio`: of what the ratio to the policy that drew is taken; `weight`: a token's, as a factor without gradient.

    `clip`: how far it may fall and rise.
    """

    advantage: Advantage
    normalize: Normalizer
    ratio: Ratio = "none"
    clip: tuple[float, float] | None = None
    drop_equal: bool = False

    @property
    def has_values(self) -> bool:
        """Whether a head of the model says what reward is still to come."""
        return self.advantage == "gae"


ALGORITHMS: dict[AlgorithmName, Algorithm] = {
    "reinforce": Algorithm("center", "tokens"),
    "rloo": Algorithm("leave_one_out", "sequences"),
    "grpo": Algorithm("group_std", "answers", "token", (0.2, 0.2)),
    "dr_grpo": Algorithm("center", "length", "token", (0.2, 0.2)),
    "dapo": Algorithm("group_std", "tokens", "token", (0.2, 0.28), drop_equal=True),
    "gspo": Algorithm("group_std", "answers", "sequence", (3e-4, 4e-4)),
    "cispo": Algorithm("group_std", "tokens", "weight", (1.0, 0.28)),
    "ppo": Algorithm("gae", "tokens", "token", (0.2, 0.2)),
}


class ValuesConfig(Section):
    """With advantage gae: a head of the model that says of each token what reward is still to come."""

    discount: Annotated[Number, Field(ge=0, le=1)] = Field(
        1.0, description="With advantage gae: what a reward one token later counts (gamma)."
    )
    gae_lambda: Annotated[Number, Field(ge=0, le=1)] = Field(
        0.95, description="With advantage gae: 1 trusts rewards alone, 0 the value of the next token alone."
    )
    weight: Weight = Field(0.1, description="With advantage gae: how much the values' loss counts beside the policy's.")
    clip: Weight = Field(
        0.2, description="With advantage gae: how far a value may move from what it was before the first update; 0: "
        "as far as it likes."
    )  # fmt: skip
    whiten: bool = Field(
        True, description="With advantage gae: advantages less their mean over the step's tokens, over their deviation."
    )


class RlConfig(Section):
    """Stage rl: how answers are drawn, what they are worth, and what is learned from that."""

    algorithm: AlgorithmName = Field(
        "reinforce", description="A row of settings (docs/rl.md), any of which may be written beside it."
    )
    rewards: tuple[str, ...] = Field(
        (TASK_REWARD,), min_length=1,
        description="What an answer is worth, summed: task is the check of the task that asked; functions of yours, "
        "such as [rewards.py:length]; reward models, such as [model:runs/reward].",
    )  # fmt: skip
    reward_weights: tuple[Annotated[Number, Field(ge=-1e6, le=1e6)], ...] = Field(
        (), description="How much each of them counts; left out: 1."
    )
    samples: Annotated[Whole, Field(ge=1, le=65_536)] = Field(
        8, description="Answers to each prompt; train.global_batch counts prompts. One is enough with advantage gae."
    )
    max_new_tokens: Annotated[Whole, Field(ge=1)] = Field(256, description="Longest answer.")
    temperature: Annotated[Number, Field(ge=1e-3)] = Field(
        1.0, description="Logits are divided by it, in drawing and in learning."
    )
    top_k: Annotated[Whole, Field(ge=0)] = Field(
        0, description="Draw from the k likeliest tokens only; 0: from all. Learning counts all."
    )
    top_p: Annotated[Number, Field(gt=0, le=1)] = Field(
        1.0, description="Draw from the likeliest tokens that sum to it; 1: from all. Learning counts all."
    )
    updates: Annotated[Whole, Field(ge=1)] = Field(1, description="Optimizer steps on each step's answers.")
    advantage: Advantage | None = Field(
        None, description="center: reward less its prompt's mean; group_std, batch_std: that over their deviation; "
        "leave_one_out: less the mean of the others; gae: of each token, by a value head. Left out: the algorithm's."
    )  # fmt: skip
    normalize: Normalizer | None = Field(
        None, description="What sums over tokens are divided by: all tokens; tokens of the answer, then answers; "
        "sequences: answers; length: answers x max_new_tokens. Left out: the algorithm's."
    )  # fmt: skip
    clip: tuple[Weight, Weight] | None = Field(
        None, description="How far the ratio to the policy that drew may fall and rise; left out: the algorithm's."
    )
    values: ValuesConfig = Field(
        ValuesConfig(), description="The value head of advantage gae, as ppo has it (docs/rl.md)."
    )
    importance: Annotated[Number, Field(ge=1)] | None = Field(
        None, description="Weigh each token by how much likelier training finds it, before the first update, than it "
        "was where it was drawn, at most this (truncated importance sampling); left out: 2 with an engine, else none."
    )  # fmt: skip
    kl: Weight = Field(0.0, description="How much the distance from the run's start counts (k3); 0: no reference.")
    drop_equal: bool | None = Field(
        None, description="Leave out prompts all of whose answers got one reward; left out: the algorithm's."
    )
    truncated: Literal["learn", "mask"] = Field(
        "learn", description="Answers that max_new_tokens cut: learned by their reward, or masked (they count in "
        "their prompt's mean alone)."
    )  # fmt: skip
    reward_deadline: Seconds = Field("10s", description="A reward that takes longer is a failure.")
    reward_workers: Annotated[Whole, Field(ge=1, le=256)] = Field(
        1, description="Processes of each rank that compute rewards; as many run tools."
    )
    max_failed: Annotated[Number, Field(ge=0, le=1)] = Field(
        0.5, description="End the run when the rewards of more of a step's answers than this share failed."
    )
    tools: tuple[str, ...] = Field(
        (), description="What the model may call while it answers: calculator, or functions of yours, such as "
        "[tools.py:search], told by their annotations and docstrings. What they answer is read, and not learned."
    )  # fmt: skip
    tool_rounds: Annotated[Whole, Field(ge=1, le=1000)] = Field(
        4, description="How often in one answer it may call them and go on."
    )
    tool_deadline: Seconds = Field("10s", description="A call that takes longer answers with an error.")
    engine: str | None = Field(
        None, description="A server that draws in place of the ranks, such as vllm:http://127.0.0.1:8000 or "
        "sglang:http://127.0.0.1:30000; it loads the weights of each step from this disk. Left out: the ranks draw."
    )  # fmt: skip
    rows: Annotated[Whole, Field(ge=1)] = Field(
        64, description="Answers that a rank draws at once, or asks an engine for, at most."
    )
    replay: str | None = Field(
        None, description="A folder of recorded answers (RUN/rollouts): learn from these, draw none."
    )

    @property
    def row(self) -> Algorithm:
        """The algorithm's settings, with what is written in place of some."""
        base = ALGORITHMS[self.algorithm]
        return Algorithm(
            self.advantage or base.advantage,
            self.normalize or base.normalize,
            base.ratio,
            base.clip if self.clip is None else self.clip,
            base.drop_equal if self.drop_equal is None else self.drop_equal,
        )

    @property
    def cap(self) -> float | None:
        """Of importance; None: tokens are not weighed."""
        return self.importance if self.importance is not None or self.engine is None else 2.0

    @property
    def judges(self) -> tuple[str, ...]:
        """Reward models among the rewards."""
        return tuple(name for name in self.rewards if name.startswith(JUDGE))

    @property
    def rewards_said(self) -> str:
        return ", ".join(self.rewards)

    @property
    def tools_said(self) -> str:
        return ", ".join(self.tools)

    def sentence(self) -> str:
        """For a banner: all that decides the loss."""
        row = self.row
        words = {
            "tokens": "all tokens",
            "answers": "each answer's tokens, then answers",
            "sequences": "answers",
            "length": f"answers x {self.max_new_tokens} tokens",
        }
        parts = [self.algorithm, f"advantage {row.advantage}", f"sums over {words[row.normalize]}"]
        parts += [f"ratio of {row.ratio}, clipped at {row.clip[0]:g} and {row.clip[1]:g}"] if row.clip else []
        if row.has_values:
            one = self.values
            parts += [
                f"values weigh {one.weight:g}, clipped at {one.clip:g}" if one.clip else f"values weigh {one.weight:g}"
            ]
            parts += [f"discount {one.discount:g}, lambda {one.gae_lambda:g}"]
            parts += ["advantages whitened"] if one.whiten else []
        parts += [f"KL {self.kl:g}"] if self.kl else []
        parts += ["prompts without a signal left out"] if row.drop_equal else []
        parts += [f"tokens weighed by importance up to {self.cap:g}"] if self.cap else []
        parts += [f"drawn by {self.engine}"] if self.engine else []
        parts += [f"tools {', '.join(self.tools)}"] if self.tools else []
        parts += ["cut answers masked"] if self.truncated == "mask" else []
        return ", ".join(parts)
