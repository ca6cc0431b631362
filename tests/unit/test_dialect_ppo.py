"""LLaMA-Factory's `stage: ppo`: what its file means here, and what of it is refused."""

import pytest
from test_dialects import BASE, load

from duoka.errors import Faults

PPO = BASE | {"stage": "ppo", "reward_model": "saves/reward"}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_ppo_file_is_stage_rl_with_a_value_head_and_a_judge():
    more = {"stage": "ppo", "reward_model": "saves/reward", "max_new_tokens": 512, "top_k": 0, "top_p": 0.9}
    config = load(BASE | more | {"cutoff_len": 1024}).config
    rl = config.rl
    assert config.stage.name == "rl" and config.data.max_length == 1024 + 512
    assert (rl.algorithm, rl.row.has_values, rl.samples, rl.updates) == ("ppo", True, 1, 4)
    assert (rl.rewards, rl.max_new_tokens, rl.top_k, rl.top_p) == (("model:saves/reward",), 512, 0, 0.9)
    assert (rl.temperature, rl.kl) == (0.95, 0.2)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"reward_model": "http://a/b"}, ("is a server", "rl.rewards")),
        ({"reward_model_type": "api"}, ("is a server",)),
        ({"ppo_buffer_size": 2}, ("ppo_buffer_size 2", "ppo_buffer_size: 1")),
        ({"ppo_score_norm": True}, ("taken as they are", "delete")),
        ({"ppo_whiten_rewards": True}, ("ppo_whiten_rewards", "delete")),
        ({"reward_model_adapters": "a"}, ("reward_model_adapters",)),
    ],
)
def test_what_ppo_cannot_be_here_is_refused(more, words):
    with pytest.raises(Faults) as caught:
        load(PPO | more)
    for word in words:
        assert word in str(caught.value)


def test_keys_of_ppo_are_told_and_passed_over_in_another_stage():
    assert load(BASE | {"ppo_epochs": 2, "ppo_buffer_size": 3}).config.rl.updates == 1
