"""What autograd keeps of a token in one layer: counted on small models of a family, and as plans count it.

As a script, on an emulated GPU: the names of families in, JSON out.
"""

import itertools
import json
import sys
import weakref
from dataclasses import replace

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from duoka.config.schema import LoraConfig
from duoka.config.schema_running import DeepSpeedConfig
from duoka.plan.activations import activation_bytes_per_token
from duoka.plan.layout import Layout
from duoka.plan.moments import LOSS, pass_moments
from duoka.plan.recipe import Work, shares
from duoka.plan.shape import shape_from_config
from duoka.units import Amount

DOCUMENT = 64
SIZES = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 192}
_GROUPED = {**_EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}
_ALONE = {"num_key_value_heads": None}  # each head has its own keys
FAMILIES = {
    "llama": {}, "qwen2": {}, "qwen3": {}, "gemma": {}, "gemma2": {}, "gemma3_text": {}, "olmo2": {}, "glm": {},
    "glm4": {}, "olmo3": {}, "exaone4": {}, "arcee": {}, "nemotron": {}, "stablelm": {}, "ministral3": {},
    "phi3": {}, "phi": {}, "granite_swa": {}, "starcoder2": {"sliding_window": None}, "gpt_neox": _ALONE,
    "gpt2": {**_ALONE, "n_inner": 704, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    "opt": {**_ALONE, "ffn_dim": 704, "dropout": 0, "word_embed_proj_dim": 256},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 320},
    "qwen3_moe": {**_EXPERTS, "num_experts": 4}, "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2}, "glm4_moe": _GROUPED,
    "deepseek_v3": {
        **_GROUPED, "num_key_value_heads": 8, "head_dim": 16, "kv_lora_rank": 64, "q_lora_rank": 96,
        "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
    },
}  # fmt: skip
LORA = LoraConfig(dropout=0.0)
ON_MLP = "lora on the MLP, bf16"
# Mixtures have adapters on what is dense beside experts, and of these families too plans count up to a sixth too much.
NOT_ON_MLP = (
    "gemma2",
    "granite_swa",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "gpt_oss",
    "glm4_moe",
    "deepseek_v3",
)
WAYS = {
    "full, bf16": (None, "bf16", False),
    "bf16 weights": (None, "bf16", True),
    "lora, bf16": (LORA, "bf16", False),
    "lora on attention, bf16": ("attention", "bf16", False),
    ON_MLP: ("mlp", "bf16", False),
    "full, fp32": (None, "fp32", False),
    "lora, fp32": (LORA, "fp32", False),
    "lora, bf16, dropout": (LoraConfig(dropout=0.05), "bf16", False),
}


class LiveBytes(TorchDispatchMode):
    """Bytes of all tensor storages that are alive, and the most there ever were."""

    def __init__(self, held):
        super().__init__()
        self.seen, self.now, self.peak = {}, 0, 0
        for tensor in held:
            self.add(tensor)

    def add(self, tensor):
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self.seen:
            self.seen[key] = size
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.drop, key, size)

    def drop(self, key, size):
        self.seen.pop(key, None)
        self.now -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self.add, out)
        return out


class AllocatedPeak:
    """The most bytes that the CPU's allocator gave out, and `held`: autograd adds in place where no mode looks on.

    For steps in fp32: products of narrow types make copies of their own on processors without bf16.
    """

    def __init__(self, held):
        self._before = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}.values())
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def __enter__(self):
        self._profile.__enter__()
        return self

    def __exit__(self, *error):
        self._profile.__exit__(*error)
        events = self._profile.profiler.kineto_results.events()
        moves = [event.nbytes() for event in events if event.name() == "[memory]"]
        self.peak = self._before + max(itertools.accumulate(moves))


def held(family, way, device="cpu", *, is_hooked=False):
    """Bytes per token and layer: what more layers and more tokens hold, less what they hold of weights.

    `is_hooked`: modules are handed their inputs as DeepSpeed's stage 3 does.
    """
    return held_apart(family, way, device, is_hooked=is_hooked)[0]


def held_apart(family, way, device="cpu", *, is_hooked=False):
    """(of a token in a layer, of a layer whatever there are tokens)."""
    (few, more), (few_above, more_above) = (_held_by(family, way, layers, device, is_hooked) for layers in (1, 3))
    of_token = ((more_above - more) - (few_above - few)) / 2 / 128
    return of_token, (few_above - few) / 2 - 128 * of_token


class _HandedOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.detach()

    @staticmethod
    def backward(ctx, grad):
        return grad


def _hand_on(module, inputs):
    return tuple(_HandedOn.apply(x) if torch.is_tensor(x) and x.requires_grad else x for x in inputs)


def _held_by(family, way, layers, device, is_hooked):
    """Of 128 tokens, and of 256."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from duoka.model.attention import register_attention
    from duoka.model.build import LossModel
    from duoka.model.experts import use_own_experts
    from duoka.model.fused import apply_fused
    from duoka.model.lora import apply_lora
    from duoka.parallel.precision import compute_in

    lora, precision, narrow = WAYS[way]
    lora = lora_of(family, lora)
    config = AutoConfig.for_model(family, **facts_of(family), num_hidden_layers=layers)
    torch.manual_seed(0)  # an expert that nobody visits has no narrow copy
    lm = AutoModelForCausalLM.from_config(config, attn_implementation=register_attention(), dtype=torch.float32)
    use_own_experts(lm)
    if narrow or (lora is not None and precision == "bf16"):
        lm = lm.to(torch.bfloat16)
    if lora is not None:
        lm = apply_lora(lm, lora)
    model = LossModel(lm.to(device).train())
    apply_fused(lm)
    for module in lm.modules() if is_hooked else ():
        module.register_forward_pre_hook(_hand_on)
    found = []
    for size in (128, 256):
        ids = torch.arange(size)[None].to(device) % 512
        places, rows = ids % DOCUMENT, torch.arange(size)[None].to(device)
        edges = torch.arange(0, size + 1, DOCUMENT, dtype=torch.int32)
        with LiveBytes([*lm.parameters(), *lm.buffers(), ids, places, rows, edges]) as live:
            before = live.now
            with compute_in(precision, torch.device(device)):
                loss, _ = model(ids, ids, places, edges, rows)
            found.append(live.now - before)
        del loss
    return found


def is_planned(family, way):
    return "dropout" not in way and not (way == ON_MLP and family in NOT_ON_MLP)


def lora_of(family, lora):
    """Adapters on some of a layer's products, whose names are each family's own."""
    if not isinstance(lora, str):
        return lora
    linears = shape_from_config({"model_type": family, **facts_of(family), "num_hidden_layers": 1}).linears
    names = {one.name.rsplit(".", 1)[-1] for one in linears if one.name.startswith("mlp.") == (lora == "mlp")}
    return LoraConfig(dropout=0.0, targets=sorted(names))


def facts_of(family):
    return {key: value for key, value in {**SIZES, **FAMILIES[family]}.items() if value is not None}


def planned(family, way, device="cpu", *, has_kernels=True, is_hooked=False):
    work, layout = _recipe(family, way, device, 2, has_kernels)
    if is_hooked:
        work, layout = replace(work, deepspeed=DeepSpeedConfig()), replace(layout, strategy="fsdp")
    return activation_bytes_per_token(work, layout, DOCUMENT)[0]


def planned_copies(family, way):
    """Of weights, of one layer."""
    of_one, of_two = (_copies(*_recipe(family, way, "cpu", layers)) for layers in (1, 2))
    return of_two - of_one


def _copies(work, layout):
    share = shares(work, layout)[0]
    return dict(pass_moments(work, layout, share, 256, 0, is_first=True, is_only=True))[LOSS]["casts"]


def _recipe(family, way, device, layers, has_kernels=True):
    lora, precision, narrow = WAYS[way]
    shape = shape_from_config({"model_type": family, **facts_of(family), "num_hidden_layers": layers})
    work = Work(shape, lora_of(family, lora), device, has_kernels=has_kernels, narrow_weights=narrow)
    return work, Layout(precision=precision, micro=Amount(256, "tokens"))


def kept_under_autocast(compute):
    """(what it answers in a pass of bf16, the bytes that autograd keeps of it)."""
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one.nbytes) or one, lambda one: one)
    with hooks, torch.autocast("cpu", dtype=torch.bfloat16):
        answer = compute()
    return answer, sum(kept)


if __name__ == "__main__":
    cases = [(family, way) for family in sys.argv[1:] for way in WAYS if is_planned(family, way)]
    print(json.dumps([[*case, held(*case, "cuda"), planned(*case, "cuda")] for case in cases]))
