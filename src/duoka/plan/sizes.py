"""The sizes of a decoder-only language model, as types: what every estimate of the plan starts from.

Made by `shape.py` from a config.json, a depth or a number of parameters; never reads a file itself.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Linear:
    """One linear layer of a transformer block, by its name inside the block."""

    name: str
    num_in: int
    num_out: int
    bias: bool = False

    @property
    def num_parameters(self) -> int:
        return self.num_in * self.num_out + (self.num_out if self.bias else 0)


def cuts_inside(count: int, rows: int, num_ranks: int) -> bool:
    """Whether ranks of FSDP share the rows inside of each of `count` experts, not the experts.

    Where experts are shared, their number is filled up to a multiple of the ranks, which may be several times as many;
    rows have to come out even, and are sorted into place by a copy.
    """
    filled = -(-count // num_ranks) * num_ranks
    return 2 * filled >= 3 * count and rows % num_ranks == 0


@dataclass(frozen=True)
class Experts:
    """A mixture of experts, of the layers that have one. Every token visits `num_active` of `num_experts`."""

    num_experts: int
    num_active: int
    num_layers: int
    num_parameters_each: int
    num_router: int  # parameters of the router, and of a gate before the shared experts
    numbers: tuple[int, ...]  # of the layers that have one
    adapted: Literal["all", "none"] = "all"  # by PEFT, beside attention
    wide_router: bool = False  # in fp32, whatever it reads

    @property
    def num_parameters(self) -> int:
        """Of one layer, shared experts apart."""
        return self.num_experts * self.num_parameters_each + self.num_router

    @property
    def num_idle(self) -> int:
        """Parameters of one layer that a token does not visit."""
        return (self.num_experts - self.num_active) * self.num_parameters_each


@dataclass(frozen=True)
class LayerParts:
    """How a layer is computed, where that decides what is kept of it (layer_parts.py)."""

    # shifted: x (1 + weight), in fp32 (Gemma); wide: x weight in fp32, and then rounded (OLMo 2).
    # narrow: a layer norm that reads what a GPU's autocast has narrowed (Nemotron).
    norm: Literal["rms", "wide", "shifted", "layer", "narrow"] = "rms"
    post_norms: int = 0  # of the block's norms, those behind attention and MLP
    parallel: bool = False  # attention and MLP read the same
    joined_gate: bool = False  # one product gives gate and up
    joins_heads: bool = False  # products of queries, keys and values are put together again on a tensor axis
    conv1d: bool = False  # products are transformers' Conv1D, and adapters beside them PEFT's own code
    act: str = "silu"
    own_rotation: bool = False  # of queries and keys, by code that no kernel takes the place of (gpt-oss)
    bends_scores: bool = False  # attention with a soft cap or sinks, which no kernel of torch knows


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only language model. `exact` is False when its type is not in the table; `num_tables` and
    `num_more` make its number of parameters that of its files, where these are there (`is_counted`).

    With experts, `linears` are those of a layer that has them (attention, shared experts) and `intermediate_size` is
    what one token sees: the active experts together. `dense_linears` are those of the layers without experts.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    linears: tuple[Linear, ...]  # of one block
    num_norm_parameters_per_layer: int
    num_final_norm_parameters: int
    block_norms: int = 2
    qk_norm: bool = False
    gated: bool = True  # two products into the feed-forward layer, not one
    bent_logits: bool = False  # scaled or soft-capped: the loss keeps a slope beside its logits
    exact: bool = True
    writes_scores: bool = False  # its attention keeps scores of all pairs of a row's tokens
    experts: Experts | None = None
    dense_linears: tuple[Linear, ...] = ()
    window: int = 0  # how far `num_window_layers` of the layers look back
    num_window_layers: int = 0
    num_positions: int = 0  # rows of a learned table of positions
    num_head_bias: int = 0
    packed_bits: int = 0  # of weights whose files hold them so: 4 or 8
    packed_by: str = ""  # whom these files name
    parts: LayerParts = LayerParts()
    is_counted: bool = False
    num_tables: int = 0  # of further tables that words are looked up in
    num_more: int = 0  # in the layers, beside what is counted of them; less than 0 where that is too much
    kept: tuple[tuple[str, float], ...] = ()  # bytes of a token in a layer, by "full bf16" and such: kept_bytes.py
    num_beside: int = 0  # of towers for images and sound, which training on text leaves as they are

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_embedding(self) -> int:
        return (self.vocab_size + self.num_positions) * self.hidden_size + self.num_tables

    @property
    def num_head(self) -> int:
        """Weights of the output head that are its own."""
        return 0 if self.tied else self.vocab_size * self.hidden_size

    def has_experts(self, number: int) -> bool:
        """Whether the layer of that number is a mixture."""
        return self.experts is not None and number in self.experts.numbers

    @property
    def num_dense_layers(self) -> int:
        return self.num_layers - self.experts.num_layers if self.experts else self.num_layers

    @property
    def num_per_layer(self) -> int:
        """Of the larger kind of layer, which decides what is gathered at once."""
        own = sum(linear.num_parameters for linear in self.linears) + self.num_norm_parameters_per_layer
        return own + (self.experts.num_parameters if self.experts else 0) + self.num_more // self.num_layers

    @property
    def num_per_dense_layer(self) -> int:
        linears = self.dense_linears or self.linears
        own = sum(linear.num_parameters for linear in linears) + self.num_norm_parameters_per_layer
        return own + self.num_more // self.num_layers

    @property
    def num_block_linear(self) -> int:
        """Weights of linear layers in all blocks: what autocast keeps a half-precision copy of."""
        norms = self.num_layers * self.num_norm_parameters_per_layer
        return self.num_in_layers - norms

    @property
    def num_packable(self) -> int:
        """Those that are layers by themselves: experts of a layer are one tensor, which no packer takes apart."""
        mixed = self.experts.num_layers * self.experts.num_parameters if self.experts else 0
        return self.num_block_linear - mixed

    @property
    def num_in_layers(self) -> int:
        rest = self.num_more % self.num_layers
        if self.experts is None:
            return self.num_layers * self.num_per_layer + rest
        return self.experts.num_layers * self.num_per_layer + self.num_dense_layers * self.num_per_dense_layer + rest

    @property
    def num_parameters(self) -> int:
        ends = self.num_embedding + self.num_head + self.num_head_bias
        return ends + self.num_in_layers + self.num_final_norm_parameters

    @property
    def num_active(self) -> int:
        """Parameters that one token passes: all but the experts that it does not visit."""
        idle = self.experts.num_layers * self.experts.num_idle if self.experts else 0
        return self.num_parameters - idle

    def num_expert_adapters(self, targets: str | Collection[str]) -> int | None:
        """Of all layers, at rank 1, what PEFT puts on experts: pairs for each one's product (of gate and up together
        with twice the rank), with "all" on routers too, and nothing dense beside these. None: on linear layers alone.
        """
        if self.experts is None or any("shared_expert." in linear.name for linear in self.linears):
            return None
        hidden, size = self.hidden_size, self.experts.num_parameters_each // (3 * self.hidden_size)
        into, out = 2 * (hidden + 2 * size), hidden + size
        router = hidden + self.experts.num_experts
        if targets == "all":
            whole = self.experts.num_experts * (into + out) + router
            return self.experts.num_layers * whole if self.experts.adapted == "all" else 0
        names = {name.rsplit(".", 1)[-1] for name in targets}
        if self.experts.adapted != "all" or not names & {"gate_proj", "up_proj", "down_proj"}:
            return None
        each = into * ({"gate_proj", "up_proj"} <= names) + out * ("down_proj" in names)
        return self.experts.num_layers * self.experts.num_experts * each

    def expert_adapters(self, targets: str | Collection[str]) -> tuple[Linear, ...]:
        """Of a layer with experts, the products that have adapters in all experts, as often as a token visits these:
        of gate and up together twice, for twice the rank."""
        if self.experts is None or not self.num_expert_adapters(targets):
            return ()
        names = {name.rsplit(".", 1)[-1] for name in targets} if targets != "all" else set()
        hidden, size = self.hidden_size, self.experts.num_parameters_each // (3 * self.hidden_size)
        first = 2 * (Linear("mlp.experts.gate_up_proj", hidden, 2 * size),)
        down = (Linear("mlp.experts.down_proj", size, hidden),)
        is_first, is_down = ({"gate_proj", "up_proj"} <= names or not names), ("down_proj" in names or not names)
        return self.experts.num_active * (is_first * first + is_down * down)

    def mean_span(self, length: int) -> float:
        """Tokens that one token looks at, itself included, on average over positions and layers."""
        whole = (length + 1) / 2
        if not self.num_window_layers or not 0 < self.window < length:
            return whole
        near = self.window - self.window * (self.window - 1) / (2 * length)
        share = self.num_window_layers / self.num_layers
        return share * near + (1 - share) * whole
