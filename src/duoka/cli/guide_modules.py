"""Modules that guides start with `python -m` or torchrun, and what stands for each here."""

from __future__ import annotations

# A guide's modules: the first stage, and those that begin from the result of one before.
PRETRAIN_MODULES = ("scripts.base_train", "duoka.pretrain")
_SCORE = "write   duoka eval runs/NAME --tasks"
MID_MODULE = "scripts.mid_train"
SFT_MODULE = "scripts.chat_sft"
RL_MODULE = "scripts.chat_rl"
LATER_MODULES = {
    "scripts.tok_train": "write   duoka data tokenizer FILES --vocab-size 32768 --out tokenizer",
    "scripts.base_eval": f"{_SCORE} core:FOLDER",
    "scripts.chat_eval": f"{_SCORE} gsm8k:FOLDER,mmlu:FOLDER",
    "scripts.chat_cli": "write   duoka chat runs/NAME",
    "scripts.chat_web": "write   duoka serve runs/NAME   (a chat page, and OpenAI's API)",
}
STAGE_MODULES = (*PRETRAIN_MODULES, MID_MODULE, SFT_MODULE, RL_MODULE)  # by flags, on any launcher
THEIR_DEPTH = 20  # what scripts.base_train takes where --depth is not given
# Modules that a guide starts with `python -m`, and the command that stands for it here.
PYTHON_MODULES = {
    "torch.distributed.launch": "torchrun",
    "torch.distributed.run": "torchrun",
    "accelerate.commands.launch": "accelerate launch",
    **dict.fromkeys(PRETRAIN_MODULES, "pretrain"),
    MID_MODULE: "mid",
    SFT_MODULE: "sft",
    RL_MODULE: "rl",
    "duoka": "",
}
