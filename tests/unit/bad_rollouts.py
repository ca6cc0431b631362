"""Configs that stage rl cannot be trained with, by the rule that refuses them; see bad_configs.py."""

RL = "model: demo\nstage: rl\n"
ASKS = "data: {train: [task:sort]}\n"
ROLLOUT_CONTRADICTIONS = {
    "rl-is-another-stage": "model: demo\ndata: {train: [a]}\nrl: {samples: 4}\n",
    "rl-batch-of-prompts": RL + "train: {global_batch: 8k tokens}\n" + ASKS,
    "rl-micro-above-answers": RL + "train: {global_batch: 2, micro_batch: 17}\nrl: {samples: 8}\n" + ASKS,
    "rl-answer-has-no-room": RL + "rl: {max_new_tokens: 64}\ndata: {train: [task:sort], max_length: 64}\n",
    "rl-data-are-prompts": RL + "data: {train: [task:sort], eval: 0.1}\n",
    "rl-prompts-count-once": RL + "data: {train: [{name: task:sort, epochs: 2}]}\n",
    "rl-reward-of-a-task": RL + "data: {train: [a]}\n",
    "rl-reward-without-function": RL + "rl: {rewards: [length]}\n" + ASKS,
    "rl-tool-is-a-function": RL + "rl: {tools: [search]}\n" + ASKS,
    "rl-tools-of-one-name": RL + "rl: {tools: [a.py:look, b.py:look]}\n" + ASKS,
    "rl-rounds-of-no-tool": RL + "rl: {tool_rounds: 2}\n" + ASKS,
    "rl-engine-has-an-address": RL + "rl: {engine: vllm}\n" + ASKS,
    "rl-engine-has-no-password": RL + "rl: {engine: 'vllm:http://me:secret@127.0.0.1:8000'}\n" + ASKS,
    "rl-engine-draws-from-all": RL + "rl: {engine: 'vllm:http://127.0.0.1:8000', top_k: 20}\n" + ASKS,
    "rl-replay-draws-nothing": RL + "rl: {engine: 'vllm:http://127.0.0.1:8000', replay: runs/a/rollouts}\n" + ASKS,
    "rl-weight-for-each-reward": RL + "rl: {reward_weights: [1, 2]}\n" + ASKS,
    "rl-clip-without-ratio": RL + "rl: {clip: [0.2, 0.2]}\n" + ASKS,
    "rl-updates-without-ratio": RL + "rl: {updates: 2}\n" + ASKS,
    "rl-values-without-gae": RL + "rl: {algorithm: grpo, values: {weight: 1}}\n" + ASKS,
    "rl-one-answer-compares-with-none": RL + "rl: {algorithm: grpo, samples: 1}\n" + ASKS,
    "rl-values-drop-nothing": RL + "rl: {algorithm: ppo, drop_equal: true}\n" + ASKS,
    "rl-layouts": RL + "parallel: {tensor: 2}\n" + ASKS,
    "rl-compiles-nothing": RL + "train: {compile: true}\n" + ASKS,
    "rl-drops-nothing": RL + "lora: {dropout: 0.1}\n" + ASKS,
    "rl-has-its-own-loss": RL + "train: {label_smoothing: 0.1}\n" + ASKS,
}
