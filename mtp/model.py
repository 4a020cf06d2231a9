"""Qwen3.5, text side: embedding, decoder layers (three Gated DeltaNet, one full attention, and so on), final norm.

`forward` is the one pass of serving: a prefill chunk, a decoded token and a window to verify differ in their number of
rows and in whether the delta-rule state moves along (`keep`). `forward_documents` is the same trunk over whole packed
sequences for training. Both return hidden rows after the final norm: what `unembed` and the MTP head read.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from mtp.attention import GatedAttention, attend_pages
from mtp.cache import Cache, DeltaState, Pages
from mtp.config import ModelConfig
from mtp.gated_deltanet import GatedDeltaNet, read_chunk, read_documents, read_window
from mtp.layers import MLP, Embedding, Linear, RMSNorm
from mtp.shapes import Array, Bool, Float, Float32, Hidden, PerLane, Tokens


class DecoderLayer(nnx.Module):
    """Norm, mixer, norm, MLP; the mixer is `linear_attn` or `self_attn`, the other is None."""

    def __init__(self, config: ModelConfig, kind: str, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.linear_attn = GatedDeltaNet(config, rngs, dtype) if kind == "linear_attention" else None
        self.self_attn = GatedAttention(config, rngs, dtype) if kind == "full_attention" else None
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = MLP(config, rngs, dtype)

    def stack(self) -> None:
        """Stores maps of the same input as one matrix, in place."""
        self.mlp.stack()
        for mixer in (self.linear_attn, self.self_attn):
            if mixer is not None:
                mixer.stack()

    def __call__(self, x: Hidden, mix: Callable[[Hidden], Hidden]) -> Hidden:
        """The layer around a mixer that the caller brings, bound to its memory."""
        x = x + mix(self.input_layernorm(x))
        with jax.named_scope("mlp"):
            return x + self.mlp(self.post_attention_layernorm(x))


class Qwen35(nnx.Module):
    """The parameters of the text model, named as in the checkpoint. `lm_head` is None when embeddings are tied."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype: DTypeLike = jnp.bfloat16) -> None:
        self.embed_tokens = Embedding(config, rngs, dtype)
        self.layers = nnx.List([DecoderLayer(config, kind, rngs, dtype) for kind in config.layer_types])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Linear(config.vocab_size, config.hidden_size, rngs, dtype, ("vocab", None))
        self.config = config

    def stack(self) -> Self:
        """Stores maps of the same input as one matrix, in place: for decoding, where every launch counts.

        What the checkpoint names is gone then: such a model can't be exported, nor trained.
        """
        for layer in self.layers:
            layer.stack()
        return self

    @property
    def unembedding(self) -> Float[Array, "V D"]:
        """The matrix that logits are made with; the embedding's where they are tied."""
        return (self.embed_tokens if self.lm_head is None else self.lm_head).weight[...]

    def unembed(self, hidden: Float[Array, "... D"]) -> Float32[Array, "... V"]:
        """Logits."""
        return unembed(self.unembedding, hidden)


def unembed(table: Float[Array, "V D"], hidden: Float[Array, "... D"]) -> Float32[Array, "... V"]:
    """Logits of the tokens in an unembedding, or in some rows of one; accumulated and kept in float32."""
    exact = lax.Precision.HIGHEST if hidden.dtype == jnp.float32 else None
    contract = (((hidden.ndim - 1,), (1,)), ((), ()))
    with jax.named_scope("unembed"):
        return lax.dot_general(hidden, table, contract, precision=exact, preferred_element_type=jnp.float32)


def forward(model: Qwen35, cache: Cache, tokens: Tokens, num_tokens: PerLane, *, keep: bool) -> tuple[Hidden, Cache]:
    """Runs the first `num_tokens` rows of each lane behind what the cache holds; a lane with 0 rows is left as it is.

    Args:
        tokens: the lane's next tokens; the first is its last token when decoding or verifying.
        keep: True reads a prefill chunk: the delta-rule state moves to its end. False reads a window (one token, or one
            and its drafts; at most R rows): the state stays before it and the rows become pending, so that
            `cache.commit` can keep any number of them. Keys and values are written either way.

    Returns:
        Hidden rows [B, T, D] after the final norm (rows behind `num_tokens` are unspecified), and the cache, whose
        `lengths` still have to be moved: by `commit`, or by `draft_head.prefill`, which calls this.
    """
    live = num_tokens > 0
    attention: list[Pages] = []
    delta: list[DeltaState] = []
    x = model.embed_tokens(tokens)

    def mix_attention(layer: GatedAttention, x: Hidden) -> Hidden:
        pages = cache.attention[len(attention)]
        y, pages = attend_pages(layer, x, pages, cache.page_table, cache.lengths, num_tokens)
        attention.append(pages)
        return y

    def mix_delta(layer: GatedDeltaNet, x: Hidden) -> Hidden:
        memory = cache.delta[len(delta)]
        if keep:
            y, memory = read_chunk(layer, x, memory, cache.num_pending, num_tokens)
        else:
            y, memory = read_window(layer, x, memory, cache.num_pending, num_tokens)
        delta.append(memory)
        return y

    for layer in model.layers:
        if layer.self_attn is not None:
            with jax.named_scope("attention_layer"):
                x = layer(x, lambda h, mixer=layer.self_attn: mix_attention(mixer, h))
        else:
            with jax.named_scope("delta_layer"):
                x = layer(x, lambda h, mixer=layer.linear_attn: mix_delta(mixer, h))
    cache = replace(
        cache,
        attention=tuple(attention),
        delta=tuple(delta),
        num_pending=jnp.where(live, 0, cache.num_pending),
    )
    return model.norm(x), cache


def forward_documents(
    model: Qwen35,
    tokens: Tokens,
    starts: Bool[Array, "B T"],
    attend: Callable[[GatedAttention, Hidden], Hidden],
    precision: lax.Precision = lax.Precision.HIGHEST,
    remat: bool = False,
) -> Hidden:
    """Hidden rows of packed sequences without a cache (training), after the final norm.

    Args: as `residual_documents`.
    """
    return model.norm(residual_documents(model, tokens, starts, attend, precision, remat))


def residual_documents(
    model: Qwen35,
    tokens: Tokens,
    starts: Bool[Array, "B T"],
    attend: Callable[[GatedAttention, Hidden], Hidden],
    precision: lax.Precision = lax.Precision.HIGHEST,
    remat: bool = False,
) -> Hidden:
    """What the last layer leaves of packed sequences, before the final norm.

    Args:
        starts: True at the first token of each document; nothing flows across.
        attend: causal attention within documents, `(layer, normed x) -> y`.
        precision: of the float32 matmuls of the chunked delta rule.
        remat: recompute each layer in the backward pass instead of keeping its activations.
    """
    x = model.embed_tokens(tokens)
    for layer in model.layers:

        def block(layer: DecoderLayer, x: Hidden) -> Hidden:
            if layer.self_attn is not None:
                return layer(x, lambda h: attend(layer.self_attn, h))
            return layer(x, lambda h: read_documents(layer.linear_attn, h, starts, precision))

        x = (jax.checkpoint(block) if remat else block)(layer, x)
    return x
