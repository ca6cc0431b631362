"""Of a step's scored answers: which are learned from, with what advantage, and what is logged of them."""

from __future__ import annotations

import math

from duoka.config.rl import RlConfig
from duoka.tasks.tools import ERROR
from duoka.train.rl.advantages import advantages, deviation, estimate, has_signal, whitened
from duoka.train.rl.batch import Learned
from duoka.train.rl.rollouts import Rollout, RolloutStep


def learned_of(step: RolloutStep, rl: RlConfig) -> list[Learned]:
    """Answers with a reward, and of these what the settings leave in, in their order."""
    return _by_values(step, rl) if rl.row.has_values else _by_groups(step, rl)


def _by_groups(step: RolloutStep, rl: RlConfig) -> list[Learned]:
    groups = _groups(step)
    values = advantages([[one.reward for one in group] for group in groups], rl.row.advantage)
    place = {id(one): at for at, one in enumerate(step.rollouts)}
    found = []
    for group, worth in zip(groups, values, strict=True):
        if rl.row.drop_equal and not has_signal([one.reward for one in group]):
            continue
        for one, value in zip(group, worth, strict=True):
            if value is not None and _is_kept(one, rl):
                found.append(Learned(place[id(one)], one, value))
    return sorted(found, key=lambda one: one.place)


def _by_values(step: RolloutStep, rl: RlConfig) -> list[Learned]:
    """Of each token by the value head; whitened over all that is learned from."""
    how = rl.values
    kept = [(place, one) for place, one in enumerate(step.rollouts) if one.reward is not None and _is_kept(one, rl)]
    worth = [estimate(one.values or (), one.reward or 0.0, how.discount, how.gae_lambda) for _, one in kept]
    # What values are to be is not whitened: it is in the units of the reward.
    returns = [
        [gain + value for gain, value in zip(gains, one.values or (), strict=True)]
        for gains, (_, one) in zip(worth, kept, strict=True)
    ]
    scaled = whitened(worth) if how.whiten else worth
    return [
        Learned(place, one, tuple(gains), tuple(targets))
        for (place, one), gains, targets in zip(kept, scaled, returns, strict=True)
    ]


def _is_kept(one: Rollout, rl: RlConfig) -> bool:
    return one.ended or rl.truncated == "learn"


def _groups(step: RolloutStep) -> list[list[Rollout]]:
    groups: dict[int, list[Rollout]] = {}
    for one in step.rollouts:
        groups.setdefault(one.prompt, []).append(one)
    return list(groups.values())


def facts_of(step: RolloutStep, rl: RlConfig) -> dict[str, float]:
    """What is logged of a step's answers."""
    groups = [[one.reward for one in group] for group in _groups(step)]
    rewards = [value for group in groups for value in group if value is not None]
    lengths = [one.num_own for one in step.rollouts]
    facts = {
        "reward": math.fsum(rewards) / max(1, len(rewards)),
        "reward_sd": deviation(rewards),
        "answer_tokens": sum(lengths) / len(lengths),
        "longest_answer": float(max(lengths)),
        "truncated": sum(not one.ended for one in step.rollouts) / len(lengths),
        "unrewarded": sum(one.reward is None for one in step.rollouts) / len(lengths),
    }
    if rl.tools:
        facts |= _facts_of_calls(step)
    if rl.row.has_values:
        return facts | _facts_of_values(_by_values(step, rl))
    return facts | {"groups_equal": sum(not has_signal(group) for group in groups) / len(groups)}


def _facts_of_calls(step: RolloutStep) -> dict[str, float]:
    """Calls of an answer, and the share of these that failed."""
    calls = [call for one in step.rollouts for call in one.calls or ()]
    failed = sum(call["answer"].startswith(ERROR) for call in calls)
    return {"tool_calls": len(calls) / len(step.rollouts), "tool_errors": failed / max(1, len(calls))}


def _facts_of_values(answers: list[Learned]) -> dict[str, float]:
    """The mean value, and which share of what came it had foreseen (1: all of it, 0: no more than one number does)."""
    came = [value for one in answers for value in one.returns or ()]
    said = [value for one in answers for value in one.rollout.values or ()]
    spread = deviation(came) ** 2
    missed = deviation([a - b for a, b in zip(came, said, strict=True)]) ** 2
    return {"value": math.fsum(said) / max(1, len(said)), "value_explained": 1 - missed / spread if spread else 0.0}
