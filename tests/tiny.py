"""A tiny chat model as a transformers folder: what a user brings, small enough to train in a blink."""

from __future__ import annotations

import json
from pathlib import Path

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def build_tiny_tokenizer():
    """Byte-level BPE without merges: 3 special tokens and the 256 bytes (a Chinese character is 3 tokens)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    fast.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    fast.chat_template = CHATML
    return fast


ODD = {"hidden_size": 66, "intermediate_size": 161, "num_attention_heads": 3, "num_key_value_heads": 1}


def write_tiny_model(
    folder: Path,
    *,
    seed: int = 0,
    tied: bool = True,
    dtype: str = "float32",
    odd: bool = False,
    hidden: int = 64,
    layers: int = 2,
) -> Path:
    """Config, safetensors and tokenizer in `folder`, from `seed` alone; with `odd`, sizes that 4 ranks cannot share.

    Two layers: one has a layer behind it, the other one before it. A test that wants one in the middle asks for more.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    tokenizer = build_tiny_tokenizer()
    even = {"hidden_size": hidden, "intermediate_size": hidden * 5 // 2}
    even |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        vocab_size=len(tokenizer) + (4 if odd else 5),  # a padded vocabulary, as many real models have
        num_hidden_layers=layers,
        **(ODD if odd else even),
        max_position_embeddings=1024,
        initializer_range=0.08,
        tie_word_embeddings=tied,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_conversations(path: Path, num_conversations: int, *, seed: int = 0, longest: int = 24) -> Path:
    """A messages file whose answers differ widely in length (1 to about 120 characters: `longest` words)."""
    import random

    dice = random.Random(seed)
    words = ("cat", "多卡", "sum", "rank", "tokens", "你好", "ring", "layer", "a", "batch")

    def text(most: int) -> str:
        return " ".join(dice.choice(words) for _ in range(dice.randint(1, most)))

    with path.open("w", encoding="utf-8") as file:
        for index in range(num_conversations):
            messages = []
            for _ in range(1 + index % 2):
                messages.append({"role": "user", "content": text(6)})
                messages.append({"role": "assistant", "content": text(1 if index % 5 == 0 else longest)})
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
    return path


def write_labeled(path: Path, count: int, *, seed: int = 0) -> Path:
    """Answers labeled good or bad, as TRL's unpaired sets have them: some prompts have several, the ring's ends too."""
    import random

    dice = random.Random(seed)
    good, bad = ("cat", "多卡", "sum", "rank", "你好"), ("dog", "ring", "layer", "不", "batch")

    def text(words: tuple[str, ...], most: int) -> str:
        return " ".join(dice.choice(words) for _ in range(dice.randint(1, most)))

    prompts = [text(good + bad, 6) + str(index) for index in range(count)]
    for index in range(count):
        if index % 4 == 2:
            prompts[index] = prompts[index - 1]
    prompts[-1] = prompts[0]
    with path.open("w", encoding="utf-8") as file:
        for index, prompt in enumerate(prompts):
            label = index % 3 != 1
            record = {"prompt": prompt, "completion": text(good if label else bad, 3 + 9 * (index % 2)), "label": label}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    return path


def write_pairs(path: Path, num_pairs: int, *, seed: int = 0) -> Path:
    """Preference pairs as TRL has them, of widely different lengths: the better answer is of its own words."""
    import random

    dice = random.Random(seed)
    better, worse = ("cat", "多卡", "sum", "rank", "你好"), ("dog", "ring", "layer", "不", "batch")

    def text(words: tuple[str, ...], most: int) -> str:
        return " ".join(dice.choice(words) for _ in range(dice.randint(1, most)))

    with path.open("w", encoding="utf-8") as file:
        for index in range(num_pairs):
            record = {"prompt": text(better + worse, 5), "chosen": text(better, 2 + 7 * (index % 3))}
            record["rejected"] = text(worse, 2 + 7 * (index % 2))
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    return path
