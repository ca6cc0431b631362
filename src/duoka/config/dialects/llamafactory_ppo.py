"""LLaMA-Factory's `stage: ppo`: what its file means as stage rl here, by its own defaults where it is silent.

The rows stand in llamafactory.py's table. What is drawn by (`max_new_tokens`, `temperature`, `top_k`, `top_p`) is
taken along by `stage`, because other stages' files name them for chatting alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from duoka.config.dialects.llamafactory_stages import stage_of
from duoka.config.dialects.rows import Answer, Asked, Convert, Refusal, Row, implemented, is_none, number, whole, words

_STAGES = {"sft": "sft", "pt": "pretrain", "rm": "reward", "dpo": "dpo", "kto": "kto", "ppo": "rl"}
_MAX_NEW, _EPOCHS, _KL = 1024, 4, 0.2  # where the file is silent
_DRAWN = {"temperature": 0.95, "top_p": 0.7}


def ppo_rows() -> list[Row]:
    return [
        *implemented("stage", "stage.name", _stage, "ppo is stage rl with algorithm ppo"),
        *implemented("cutoff_len", "data.max_length", _cutoff, "of ppo, with the answer's room beside it"),
        *implemented("reward_model", "rl.rewards", _of_ppo(_judge), "a reward model's folder"),
        *implemented("ppo_epochs", "rl.updates", _of_ppo(lambda value, asked: whole(value, "ppo_epochs"))),
        *implemented("ppo_buffer_size", "", _of_ppo(_one_buffer), "above 1 it is refused"),
        *implemented("ppo_score_norm", "", _of_ppo(_off("ppo_score_norm")), "on it is refused"),
        *implemented("ppo_whiten_rewards", "", _of_ppo(_off("ppo_whiten_rewards")), "on it is refused"),
        *implemented("reward_model_type", "", _of_ppo(_type), "lora or full; api is refused"),
    ]


def _stage(value: Any, asked: Asked) -> Any:
    name = words("stage", _STAGES)(value, asked)
    if name != "rl":
        return name
    if is_none(asked.get("reward_model")):
        raise Refusal("stage ppo needs a reward model", "write:   reward_model: FOLDER", "reward_model")
    return Answer({"stage.name": "rl", **_settings(asked)}, "values are learned by a head; KL is a part of the loss")


def _settings(asked: Asked) -> Mapping[str, Any]:
    found: dict[str, Any] = {"rl.algorithm": "ppo", "rl.samples": 1, "rl.kl": _KL, "rl.max_new_tokens": _room(asked)}
    found |= {f"rl.{name}": number(_given(asked, name, usual), name) for name, usual in _DRAWN.items()}
    found["rl.top_k"] = max(0, whole(_given(asked, "top_k", 50), "top_k", -1))
    return found | ({"rl.updates": _EPOCHS} if is_none(asked.get("ppo_epochs")) else {})


def _given(asked: Asked, name: str, usual: Any) -> Any:
    value = asked.get(name)
    return usual if is_none(value) else value


def _room(asked: Asked) -> int:
    return whole(_given(asked, "max_new_tokens", _MAX_NEW), "max_new_tokens")


def _cutoff(value: Any, asked: Asked) -> Any:
    return whole(value, "cutoff_len") + _room(asked) if stage_of(asked) == "ppo" else value


def _of_ppo(convert: Convert) -> Convert:
    """Keys that only this stage reads."""

    def run(value: Any, asked: Asked) -> Any:
        if is_none(value):
            return Answer()
        if stage_of(asked) != "ppo":
            return Answer(note=f"of PPO, which {stage_of(asked)} does not read")
        return convert(value, asked)

    return run


def _judge(value: Any, asked: Asked) -> Any:
    name = str(value)
    if "://" in name or str(asked.get("reward_model_type", "lora")).strip().lower() == "api":
        raise Refusal(
            f"reward_model {name} is a server", "name a folder, or ask the server in a function of rl.rewards"
        )
    return [f"model:{name}"]


def _type(value: Any, asked: Asked) -> Any:
    words("reward_model_type", {name: name for name in ("lora", "full", "oft", "api")})(value, asked)
    return Answer()


def _one_buffer(value: Any, asked: Asked) -> Any:
    if whole(value, "ppo_buffer_size") > 1:
        raise Refusal(
            f"ppo_buffer_size {value}: answers of several batches are not collected here",
            "write a larger gradient_accumulation_steps, and   ppo_buffer_size: 1",
        )
    return Answer()


def _off(name: str) -> Convert:
    def run(value: Any, asked: Asked) -> Any:
        if str(value).strip().lower() in ("true", "1", "yes", "on"):
            raise Refusal(f"{name} {value}: rewards are taken as they are", f"delete {name}")
        return Answer()

    return run
