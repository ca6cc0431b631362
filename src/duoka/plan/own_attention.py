"""Model types that are trained by the attention of their own code, in padded rows (docs/models.md).

A run finds that out by a tiny copy of its model. A plan loads no torch, and knows it of the types of transformers;
tests hold the two together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from duoka.config.schema import RunConfig
from duoka.plan.sizes import ModelShape

# Whether that attention is written out, and keeps the scores of all pairs of a row's tokens.
OWN_ATTENTION: Mapping[str, bool] = {
    "axk2": False, "bloom": True, "deepseek_v32": False, "deepseek_v4": True, "falcon": False, "git": True,
    "glm_moe_dsa": False, "gpt_neo": True, "gpt_neox_japanese": True, "hy_v4": True, "inkling2_loop_text": True,
    "inkling2_text": True, "inkling_text": False, "llama4": False, "llama4_text": False, "mpt": True, "mvp": True,
    "trocr": True, "xglm": True,
}  # fmt: skip


def as_computed(config: RunConfig, shape: ModelShape) -> tuple[RunConfig, ModelShape, str]:
    """Both as a run of this model sees them, and what is to be said about it."""
    writes_scores = OWN_ATTENTION.get(shape.model_type)
    if writes_scores is None or config.stage.kind.reads_text or config.data.fixed_rows:
        return config, shape, ""
    data = config.data.model_copy(update={"packing": False})
    note = f"model type {shape.model_type} is trained by its own attention, in padded rows"
    note += ", and keeps the scores of all pairs of a row's tokens" if writes_scores else ""
    return config.model_copy(update={"data": data}), replace(shape, writes_scores=writes_scores), note
