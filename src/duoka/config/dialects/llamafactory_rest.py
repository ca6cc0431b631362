"""LLaMA-Factory's keys without a meaning of their own here: reported with a reason, or refused with one.

llamafactory.py joins these rows to its own. A key moves there when duoka comes to honor it.
"""

from __future__ import annotations

from duoka.config.dialects.rows import Row, refused, reported

# Names that `template:` may have there; the model's own template is used for all but chatml.
_NAMES = """
aeva alpaca bailing bailing_v2 breeze chatglm3 chatml chatml_de cohere cpm4 dbrx deepseek deepseek3
deepseekcoder deepseekr1 default dots_ocr empty ernie ernie_nothink ernie_vl exaone falcon falcon_h1 fewshot
gemma gemma2 gemma3 gemma3n gemma4 gemma4n glm4 glm4_5v glm4_7 glm4_moe glm4v glm_ocr glmz1 gpt_oss granite3
granite3_vision granite4 hunyuan hunyuan_small hy3 hy_dense_1_8b hy_dense_7b index intern2 intern_s1 intern_vl
keye_vl kimi_vl lfm2 lfm2_vl llama2 llama2_zh llama3 llama4 llava llava_next llava_next_llama3
llava_next_mistral llava_next_qwen llava_next_video llava_next_video_mistral llava_next_video_yi llava_next_yi
mimo mimo_v2 mimo_vl minicpm_o minicpm_v minicpm_v_4_6 minimax1 minimax2 ministral ministral3 mistral
mistral_small mllama moonlight moss_vl olmo openchat openchat-3.6 opencoder paligemma paligemma_chat phi phi4
phi4_mini phi_small pixtral qwen qwen2_audio qwen2_omni qwen2_vl qwen3 qwen3_5 qwen3_5_nothink qwen3_6
qwen3_nothink qwen3_omni qwen3_omni_nothink qwen3_vl qwen3_vl_nothink sailor seed_coder seed_oss smollm
smollm2 solar starchat telechat2 vicuna video_llava xuanyuan yi yi_vl youtu youtu_vl yuan zephyr
"""
TEMPLATES = tuple(_NAMES.split())


def rest_rows() -> list[Row]:
    return [
        *_reported(),
        *_reported_elsewhere(),
        *_of_stages_reported(),
        *_refused_methods(),
        *_refused_training(),
        *_refused_elsewhere(),
    ]


def _reported() -> list[Row]:
    return [
        *reported("the loss curve is always drawn", "plot_loss"),
        *reported("tokens are kept by the content they come from, so old ones are never used", "overwrite_cache"),
        *reported("a checkpoint can always be gone on from", "save_only_model"),
        *reported("batches are read from memory-mapped tokens", "dataloader_num_workers", "dataloader_pin_memory",
                  "dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_multiprocessing_context",
                  "dataloader_in_order", "preprocessing_batch_size", "data_shared_file_system", "group_by_length",
                  "length_column_name"),
        *reported("the fastest exact attention that is there is used; it changes no result", "flash_attn",
                  "use_reentrant_gc", "use_unsloth_gc", "gradient_checkpointing_kwargs",
                  "activation_checkpointing_kwargs", "use_v1_kernels", "enable_liger_kernel", "use_liger_kernel",
                  "liger_kernel_config", "use_unsloth", "use_cache", "low_cpu_mem_usage",
                  "torch_compile_backend", "torch_compile_mode", "torch_empty_cache_steps", "tf32"),
        *reported("the model's fast tokenizer is used", "use_fast_tokenizer", "cache_dir"),
        *reported("evaluation uses train.micro_batch; its size changes no number", "per_device_eval_batch_size",
                  "per_gpu_eval_batch_size", "eval_accumulation_steps", "bf16_full_eval", "fp16_full_eval",
                  "eval_do_concat_batches", "eval_use_gather_object", "batch_eval_metrics", "prediction_loss_only"),
        *reported("evaluation data that is given is measured", "do_eval", "eval_on_start", "eval_delay",
                  "eval_on_each_dataset"),
        *reported("loss, perplexity and token accuracy: duoka eval RUN", "compute_accuracy", "include_for_metrics",
                  "metric_for_best_model", "greater_is_better"),
        *reported("the folder's name is the run's", "run_name", "project"),
        *reported("logs and TensorBoard files lie in the run folder, every step is recorded", "logging_dir",
                  "logging_first_step", "logging_strategy", "logging_nan_inf_filter", "log_level", "log_level_replica",
                  "log_on_each_node", "disable_tqdm", "include_num_input_tokens_seen", "print_param_status",
                  "include_effective_tokens_per_second", "skip_memory_metrics", "save_on_each_node"),
        *reported("DDP here: buffers as torch has them, places from the launcher", "ddp_broadcast_buffers",
                  "local_rank", "master_addr", "master_port"),
        *reported("the same seed gives the same run; on a GPU its kernels may differ in the last digits",
                  "full_determinism"),
        *reported("a run goes on at the exact sample", "ignore_data_skip", "restore_callback_states_from_checkpoint",
                  "enable_jit_checkpoint"),
        *reported("only the columns of the conversation are read", "remove_unused_columns", "label_names"),
        *reported("safetensors always", "save_safetensors", "export_legacy_format"),
        *reported("the loss is the mean over the target tokens of the whole global batch, as this asks for",
                  "average_tokens_across_devices"),
        *reported("padding is never a target", "ignore_pad_token_for_loss"),
        *reported("a device is used when it is there; CUDA_VISIBLE_DEVICES= in front keeps to the CPU", "use_cpu",
                  "no_cuda"),
    ]  # fmt: skip


def _reported_elsewhere() -> list[Row]:
    return [
        *reported("duoka chat FILE and duoka eval FILE go by it, and the drawing of stage ppo", "do_sample",
                  "temperature", "top_p", "max_new_tokens"),
        *reported("of answers; duoka chat FILE refuses what it cannot do, and stage ppo draws by top_k", "top_k",
                  "num_beams",
                  "repetition_penalty", "infer_backend"),
        *reported("of answers: duoka chat and duoka eval have flags for what they can do", "max_length",
                  "length_penalty", "skip_special_tokens", "generation_max_length", "generation_num_beams",
                  "generation_config", "eval_num_beams", "use_kv_cache", "offload_folder",
                  "vllm_maxlen", "vllm_gpu_util", "vllm_enforce_eager", "vllm_max_lora_rank", "vllm_config",
                  "sglang_maxlen", "sglang_mem_fraction", "sglang_tp_size", "sglang_config", "sglang_lora_backend"),
        *reported("duoka export FILE goes by it", "export_dir", "export_size", "infer_dtype"),
        *reported("merging is computed in fp32 on the CPU", "export_device"),
        *reported("pictures, sounds and films are not read; text is", "image_max_pixels", "image_min_pixels",
                  "image_do_pan_and_scan", "crop_to_patches", "video_max_pixels", "video_min_pixels", "video_fps",
                  "video_maxlen", "use_audio_in_video", "audio_sampling_rate", "media_dir", "freeze_vision_tower",
                  "freeze_multi_modal_projector"),
        *reported("log.to: [swanlab] and [trackio] write to them; where to, their variables say",
                  "use_swanlab",
                  "swanlab_project", "swanlab_workspace", "swanlab_run_name", "swanlab_mode", "swanlab_logdir",
                  "swanlab_lark_webhook_url", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
        *reported("duoka plan and the event log say where time and memory go", "enable_torch_profiler",
                  "profiler_output_dir", "profiler_wait_steps", "profiler_warmup_steps", "profiler_active_steps",
                  "profiler_repeat", "profiler_record_shapes", "profiler_profile_memory", "profiler_with_stack",
                  "profile_modules", "debug"),
        *reported("nothing is sent to a hub", "hub_strategy", "hub_always_push", "hub_private_repo", "hub_revision",
                  "hub_model_id", "export_hub_model_id"),
    ]  # fmt: skip


def _of_stages_reported() -> list[Row]:
    return [
        *reported("of PPO; there KL has one weight, rl.kl, and none that follows a target", "ppo_target"),
        *refused("a reward model is named by its own folder", "reward_model_adapters", "reward_model_quantization_bit"),
        *reported("a trained adapter is always written as a plain one, for the base as it came", "pissa_convert"),
        *reported("of a method that is not on", "loraplus_lr_embedding",
                  "oft_rank", "oft_block_size", "oft_target", "module_dropout", "galore_target", "galore_rank",
                  "galore_update_interval", "galore_scale", "galore_proj_type", "galore_layerwise", "apollo_target",
                  "apollo_rank", "apollo_update_interval", "apollo_scale", "apollo_proj", "apollo_proj_type",
                  "apollo_scale_type", "apollo_layerwise", "apollo_scale_front", "badam_mode", "badam_start_block",
                  "badam_switch_mode", "badam_switch_interval", "badam_update_ratio", "badam_mask_mode",
                  "badam_verbose", "asft_alpha", "eaft_alpha", "quantization_device_map", "export_quantization_dataset",
                  "export_quantization_nsamples", "export_quantization_maxlen", "ray_num_workers",
                  "ray_init_kwargs", "buffer_size",
                  "fsdp_transformer_layer_cls_to_wrap", "optim_target_modules", "hyper_parallel_args"),
    ]  # fmt: skip


def _refused_methods() -> list[Row]:
    return [
        *refused("of LoRA's variants duoka has the plain one, LoRA+, rank-stabilised and PiSSA", "use_dora",
                 "additional_target"),
        *refused("a folder inside a repository of the Hub, and adapters are read from local folders", "adapter_folder"),
        *refused("of these optimizers duoka has AdamW and Muon; its own optim.name has more", "use_galore",
                 "use_apollo", "use_badam", "use_adam_mini", "optim_args", "adafactor"),
        *refused("the loss is plain cross-entropy, or DFT's", "use_asft_loss", "use_eaft_loss",
                 "neftune_noise_alpha", off=(0, 0.0)),
        *refused("models are not written in fewer bits", "export_quantization_bit"),
        *reported("of fp8: torch's own products, by one scale a tensor", "fp8_backend"),
        *reported("of fp8: gathered weights travel in bf16, and are rounded to 8 bits where they compute",
                  "fp8_enable_fsdp_float8_all_gather"),
        *refused("the model's architecture is taken as it is", "mixture_of_depths", "rope_scaling", "shift_attn",
                 "upcast_layernorm", "upcast_lmhead_output", "freeze_language_model",
                 "include_mtp"),
        *refused("the vocabulary is taken as it is", "resize_vocab", "add_tokens", "add_special_tokens",
                 "new_special_tokens_config", "split_special_tokens"),
        *reported("of new tokens, which there are none", "init_special_tokens"),
    ]  # fmt: skip


def _refused_training() -> list[Row]:
    return [
        *refused("local files are tokenized once and memory-mapped; plain text in Parquet is read while it is learned "
                 "with data.stream, in duoka's own YAML", "streaming"),
        *refused("sets are laid end to end and shuffled; weights can be given in duoka's own data.train",
                 "mix_strategy", "interleave_probs", off=("concat",)),
        *refused("every epoch is shuffled with the seed", "disable_shuffling"),
        *refused("every epoch is shuffled with the seed", "train_sampling_strategy", off=("random", "group_by_length")),
        *refused("the last, smaller batch of an epoch counts too", "dataloader_drop_last"),
        *refused("a run ends where the config says", "early_stopping_steps"),
        *refused("the result is the last step; checkpoint.keep_best keeps the best one, for duoka export --checkpoint",
                 "load_best_model_at_end"),
        *refused("training and predicting are two commands here: duoka train, then duoka eval FILE do_train=false",
                 "do_predict", "predict_with_generate"),
        *reported("of prediction, which is not on", "sortish_sampler"),
        *reported("tokens go to duoka's cache by themselves; without do_train they are made and nothing is trained",
                  "tokenized_path"),
        *refused("system messages come from the data", "default_system"),
        *refused("tools are written as the model's own template writes them", "tool_format"),
        *refused("the batch is what train.global_batch says", "auto_find_batch_size"),
        *reported("how FSDP wraps, gathers and saves is duoka's own; it changes no result", "fsdp_config",
                  "fsdp_min_num_params"),
        *refused("axes of a model are written in duoka's own YAML, where a batch is of all ranks: duoka explain "
                 "parallel.tensor, parallel.pipeline, parallel.sequence, parallel.expert", "parallelism_config",
                 "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
                 "hyper_parallel_cp_size", "virtual_pipeline_model_parallel_size", "sequence_parallel",
                 "expert_model_parallel_size", off=(1,)),
    ]  # fmt: skip


def _refused_elsewhere() -> list[Row]:
    return [
        *refused("Megatron is another trainer", "use_mca", "use_megatron_bridge", "use_hyper_parallel",
                 "megatron_pretrained_checkpoint"),
        *reported("of Megatron, which is not on", "recompute_granularity", "recompute_method", "recompute_num_layers",
                  "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
                  "bias_activation_fusion", "apply_rope_fusion", "masked_softmax_fusion",
                  "cross_entropy_loss_fusion", "moe_grouped_gemm", "moe_token_dispatcher_type",
                  "calculate_per_token_loss", "use_distributed_optimizer", "overlap_param_gather",
                  "overlap_grad_reduce", "use_packed_sequences", "mixed_precision", "export_hf_on_finish",
                  "extra_config"),
        *refused("KTransformers is another engine", "use_kt"),
        *reported("of KTransformers, which is not on", "kt_cpu_activation", "kt_weight_path",
                  "kt_non_expert_weight_path", "kt_expert_checkpoint_path", "kt_use_lora_experts",
                  "kt_lora_expert_num", "kt_lora_expert_intermediate_size", "kt_config"),
        *refused("Ray does not start the ranks: duoka train --nproc, or one command per node", "use_ray"),
        *refused("nothing is sent to a hub", "push_to_hub"),
        *refused("a secret belongs in the environment (HF_TOKEN), not in a file", "hf_hub_token", "ms_hub_token",
                 "om_hub_token", "hub_token", "swanlab_api_key", "swanlab_lark_secret"),
    ]  # fmt: skip
