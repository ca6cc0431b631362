"""TRL's command line takes YAML too. It does not say what is learned, which stands in the command (`trl dpo`); so such
a file is not read: it is named, and each of its keys with it, by duoka's word, or by why there is none.

Keys of transformers' TrainingArguments have their rows in llamafactory.py; here are those of TRL.
"""

from __future__ import annotations

from duoka.config.dialects.llamafactory import llamafactory
from duoka.config.dialects.rows import asks_for_nothing
from duoka.config.yaml_lines import Tree
from duoka.errors import Fault

# By these a file is known; three keys are no accident of LLaMA-Factory's.
_SIGNS = {
    "dataset_name": "data.train", "datasets": "data.train", "dataset_config": "data.train",
    "dataset_train_split": "data.train", "dataset_test_split": "data.eval", "dataset_text_field": "data.train",
    "test_split_size": "data.eval",
    "use_peft": "lora", "lora_r": "lora.rank", "lora_target_modules": "lora.targets",
    "completion_only_loss": "data.targets", "assistant_only_loss": "data.targets", "reward_funcs": "rl.rewards",
    "reward_model_name_or_path": "rl.rewards", "num_generations": "rl.samples",
    "max_completion_length": "rl.max_new_tokens", "use_vllm": "rl.engine",
}  # fmt: skip
_NOT_TRL = ("dataset", "stage", "template", "finetuning_type", "cutoff_len", "lora_rank", "lora_target")
_OURS = {
    **_SIGNS,
    "max_length": "data.max_length", "beta": "stage.beta", "loss_type": "stage.loss", "dtype": "train.precision",
    "load_in_4bit": "model.quantization", "bnb_4bit_quant_type": "model.quantization",
    "use_bnb_nested_quant": "model.double_quantization", "dataset_num_proc": "data.workers",
    "dataset_streaming": "data.stream", "padding_free": "data.packing", "router_aux_loss_coef": "train.router_aux_loss",
    "loss_weights": "stage.sft_weight", "cpo_alpha": "stage.sft_weight", "label_smoothing": "stage.label_smoothing",
    "desirable_weight": "stage.desirable_weight", "undesirable_weight": "stage.undesirable_weight",
    "simpo_gamma": "stage.gamma", "center_rewards_coefficient": "stage.centering",
    "activation_offloading": "parallel.offload",
}  # fmt: skip
# What the same words, and more, are of a file that draws answers.
_OF_RL = {
    "beta": "rl.kl", "loss_type": "rl.algorithm", "importance_sampling_level": "rl.algorithm",
    "scale_rewards": "rl.advantage", "normalize_advantages": "rl.advantage", "epsilon": "rl.clip",
    "epsilon_high": "rl.clip", "num_iterations": "rl.updates", "temperature": "rl.temperature", "top_k": "rl.top_k",
    "top_p": "rl.top_p", "mask_truncated_completions": "rl.truncated", "reward_weights": "rl.reward_weights",
    "max_tool_calling_iterations": "rl.tool_rounds", "vllm_server_base_url": "rl.engine",
    "vllm_importance_sampling_correction": "rl.importance", "vllm_importance_sampling_clip_max": "rl.importance",
    "vllm_importance_sampling_cap": "rl.importance",
}  # fmt: skip
_RL_SIGNS = (
    "reward_funcs", "num_generations", "num_iterations", "scale_rewards", "use_vllm", "steps_per_generation",
    "epsilon_high", "importance_sampling_level",
)  # fmt: skip
# Words that change nothing here, by why.
NEEDLESS: dict[str, tuple[str, ...]] = {
    "the reference's log-probabilities are always computed before the first step": (
        "precompute_ref_log_probs", "precompute_ref_batch_size",
    ),
    "a model's own dropout is off in every stage that judges answers": ("disable_dropout",),
    "padding changes no result": (
        "pad_to_multiple_of", "packing_strategy", "eval_packing", "padding_value", "pad_token", "lora_task_type",
    ),
    "every epoch is shuffled with the seed": ("shuffle_dataset",),
    "all answers of a run stand in RUN/rollouts": (
        "log_completions", "log_multimodal", "num_completions_to_print", "log_unique_prompts",
        "log_completions_hub_repo",
    ),
    "how the server or the ranks draw": (
        "vllm_mode", "vllm_model_impl", "vllm_enable_sleep_mode", "vllm_server_host", "vllm_server_port",
        "vllm_server_timeout", "vllm_group_port", "vllm_gpu_memory_utilization", "vllm_max_model_length",
        "vllm_tensor_parallel_size", "ds3_gather_for_generation", "cache_implementation",
        "use_transformers_continuous_batching", "transformers_continuous_batching_config",
        "use_transformers_paged",
    ),
    "the fastest exact attention that is there is used": ("attn_implementation",),
    "packed weights are kept as bytes": ("bnb_4bit_quant_storage",),
    "nothing is drawn for an evaluation": ("num_generations_eval", "generate_during_eval"),
    "a model's buffers are broadcast as torch does it": ("ignore_bias_buffers",),
}  # fmt: skip
# Words that would change the result, and that duoka cannot honor, by why; and values that ask for nothing.
ABSENT: dict[str, tuple[str, ...]] = {
    "the reference is the model that the run begins with, from its first step to its last": (
        "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps",
    ),
    "a long answer is cut at its end": ("truncation_mode",),
    "of these variants of a pair's loss there are none; docs/preferences.md has those that there are": (
        "f_divergence_type", "f_alpha_divergence_coef", "use_weighting", "discopop_tau", "alpha",
    ),
    "of these variants of a policy's loss there are none; docs/rl.md has those that there are": (
        "delta", "sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg",
        "vespo_lambda_neg", "top_entropy_quantile", "entropy_coef", "use_adaptive_entropy", "entropy_coef_min",
        "entropy_coef_max", "entropy_coef_delta", "entropy_target", "off_policy_mask_threshold",
        "use_bias_correction_kl", "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_min",
    ),
    "rewards are summed as they come; a function of yours clips or scales them": (
        "reward_clip_range", "multi_objective_aggregation", "missing_eos_penalty",
    ),
    "each step learns from answers that were drawn for it, all at once: train.global_batch prompts x rl.samples": (
        "generation_batch_size", "steps_per_generation",
    ),
    "answers are drawn by temperature, top_k and top_p": (
        "min_p", "repetition_penalty", "generation_kwargs", "vllm_structured_outputs_regex",
    ),
    "the chat template is the tokenizer's own and is given no arguments": (
        "chat_template_path", "chat_template_kwargs", "eos_token",
    ),
    "of LoRA's variants duoka has the plain one, LoRA+, rank-stabilised and PiSSA": (
        "lora_target_parameters", "lora_modules_to_save",
    ),
    "the head computes in the precision of training": ("cast_lm_head_to_fp32",),
    "the base under adapters is packed into 4 bits, or not": ("load_in_8bit",),
    "the model is loaded as its folder says": ("model_init_kwargs", "is_encoder_decoder", "dataset_kwargs"),
    "learning from a teacher's probabilities, or from pairs that are drawn while it learns, is not there": (
        "teacher_model_name_or_path", "teacher_model_revision", "teacher_model_init_kwargs", "lmbda", "seq_kd",
        "reward_model_path", "max_new_tokens",
    ),
}  # fmt: skip
_OFF = {
    "truncation_mode": ("keep_start",), "f_divergence_type": ("reverse_kl",), "top_entropy_quantile": (1, 1.0),
    "multi_objective_aggregation": ("sum_then_normalize",), "repetition_penalty": (1, 1.0), "entropy_coef": (0, 0.0),
    "alpha": (0, 0.0), "min_p": (0, 0.0),
}  # fmt: skip
# Of loss_type, in all trainers; sft stands beside another one there, as sft_weight does here.
_LOSSES = ("sigmoid", "hinge", "ipo", "robust", "apo_zero", "apo_down", "simpo", "sft", "kto", "nll", "dft")
_LOSSES_OF_RL = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo")
_STAGES = "trl sft is stage: sft; dpo, cpo and orpo: dpo; kto: kto; reward: reward; grpo and rloo: rl, with algorithm:"


def refuse_trl(tree: Tree) -> Fault | None:
    """Read as LLaMA-Factory's, half of its keys would be unknown and `max_length` would be of answers."""
    signs = [key for key in tree.value if key in _SIGNS]
    if not signs or "model_name_or_path" not in tree.value or any(key in tree.value for key in _NOT_TRL):
        return None
    what = f"this is a file of TRL's command line ({', '.join(signs[:3])}), which duoka does not read"
    fix = "\n".join(["write it in duoka's own words (docs/coming-from/trl.md):", *_told(tree)])
    first: Tree = tree.value[signs[0]]
    return first.place.fault(what, key=signs[0], fix=fix)


def trl_words() -> dict[str, tuple[str, str]]:
    """TRL's own words: duoka's key, or "" and why there is none. As keys of the block rl they have its name before."""
    out = {name: (ours, "") for name, ours in (_OURS | _OF_RL).items()}
    out |= {name: (_OURS[name], "") for name in _OURS.keys() & _OF_RL.keys()}
    out |= {f"rl.{name}": (ours, "") for name, ours in _OF_RL.items()}
    for table in (NEEDLESS, ABSENT):
        out |= {name: ("", why) for why, names in table.items() for name in names}
    return out


def _lacking_losses(tree: Tree, known: tuple[str, ...]) -> list[str]:
    """Names under loss_type that duoka has no loss for."""
    written = tree.value["loss_type"].plain_value() if "loss_type" in tree.value else None
    names = written if isinstance(written, list) else [] if written is None else [written]
    lacking = [str(name) for name in names if str(name) not in known]
    if not lacking and len([name for name in names if name != "sft"]) > 1:
        return [f"{' + '.join(map(str, names))} at once"]
    return lacking


def _told(tree: Tree) -> list[str]:
    """Every key of the file, once."""
    ours: dict[str, str] = {}
    absent: dict[str, list[str]] = {}
    needless, unknown = [], []
    draws = any(key in tree.value for key in _RL_SIGNS)
    words = _OURS | (_OF_RL if draws else {})
    rows, known = llamafactory().rows, trl_words()
    for key, value in tree.value.items():
        row = rows.get(key)
        if key in words:
            ours[key] = words[key]
        elif key in known:
            why = known[key][1] or "of answers that are drawn, in another file"
            is_asked = why in ABSENT and not asks_for_nothing(value.plain_value(), _OFF.get(key, ()))
            absent.setdefault(why, []).append(key) if is_asked else needless.append(key)
        elif row is None:
            unknown.append(key)
        elif row.state == "implemented" and row.key:
            ours[key] = row.key
        elif row.state == "refused" and not asks_for_nothing(value.plain_value(), row.off):
            absent.setdefault(row.note, []).append(key)
        else:
            needless.append(key)
    if lacking := _lacking_losses(tree, _LOSSES_OF_RL if draws else _LOSSES):
        absent["docs/rl.md has those that there are" if draws else "docs/preferences.md has those that there are"] = [
            f"loss_type {', '.join(lacking)}"
        ]
    pairs = [f"{key} is {name}" for key, name in ours.items()]
    lines = [_STAGES, *(", ".join(pairs[at : at + 4]) for at in range(0, len(pairs), 4))]
    lines += [f"not there: {', '.join(keys)} ({why})" for why, keys in absent.items()]
    lines += [f"needless here: {', '.join(needless)}"] if needless else []
    lines += [f"not known, of TRL neither: {', '.join(unknown)}"] if unknown else []
    return lines
