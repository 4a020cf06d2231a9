"""The Gated DeltaNet mixer (HF `Qwen3_5GatedDeltaNet`): projections, causal convolution, delta rule, gated norm.

Three ways through it share every weight: `read_window` (decoding and verification: fold the pending rows, read the
window, commit nothing of it) and `read_chunk` (prefill: the chunked form, which moves the state along);
`read_documents` is the chunked form over packed training text.
"""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from mtp.cache import DeltaState
from mtp.config import ModelConfig
from mtp.kernels.gated_delta import (
    DeltaRows,
    conv_silu,
    delta_rule_chunked,
    fold_pending,
    gated_delta_window,
    rows_from,
    split_heads,
)
from mtp.layers import Linear, broadcast_last, stack_linears
from mtp.shapes import Array, Bool, Float, Float32, Hidden, PerLane


class Conv1d(nnx.Module):
    """Taps of the depthwise causal convolution [C, W] (HF stores [C, 1, W])."""

    def __init__(self, channels: int, taps: int, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        weight = taps**-0.5 * jax.random.normal(rngs.params(), (channels, taps), jnp.float32)
        self.weight = nnx.Param(weight.astype(dtype), axes=(None, None))


class GatedNorm(nnx.Module):
    """x / rms(x) * weight * gate, per head, float32 throughout; the weight is not zero-centred."""

    def __init__(self, config: ModelConfig) -> None:
        self.weight = nnx.Param(jnp.ones((config.linear_value_head_dim,), jnp.float32), axes=(None,))
        self.eps = config.rms_norm_eps
        self.activation = {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}[config.output_gate_type]

    def __call__(self, x: Float32[Array, "B T U Z"], gate: Float[Array, "B T U Z"]) -> Float32[Array, "B T U Z"]:
        x = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return x * broadcast_last(self.weight[...], 4) * self.activation(gate.astype(jnp.float32))


class GatedDeltaNet(nnx.Module):
    """Projections and constants of one delta-rule layer."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        width, heads = config.hidden_size, config.linear_num_value_heads
        self.in_proj_qkv = Linear(config.conv_channels, width, rngs, dtype)
        self.in_proj_z = Linear(config.value_dim, width, rngs, dtype, ("heads", None))
        self.in_proj_b = Linear(heads, width, rngs, dtype, ("heads", None))
        self.in_proj_a = Linear(heads, width, rngs, dtype, ("heads", None))
        self.conv1d = Conv1d(config.conv_channels, config.linear_conv_kernel_dim, rngs, dtype)
        # decay rates spread over 1..16 and steps near 0.01..0.1, as the released models were initialised
        decay = jax.random.uniform(rngs.params(), (heads,), jnp.float32, 1.0, 16.0)
        step = jnp.exp(jax.random.uniform(rngs.params(), (heads,), jnp.float32, jnp.log(0.001), jnp.log(0.1)))
        self.A_log = nnx.Param(jnp.log(decay), axes=("heads",))
        self.dt_bias = nnx.Param(jnp.log(jnp.expm1(step)).astype(dtype), axes=("heads",))
        self.norm = GatedNorm(config)
        self.out_proj = Linear(width, config.value_dim, rngs, dtype, (None, "heads"))
        self.config = config
        # qkv, z, b and a in one matrix, which then are None
        self.in_proj: Linear | None = None

    def stack(self) -> None:
        """Stores qkv, z, b and a as one matrix, in place."""
        self.in_proj = nnx.data(stack_linears(self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a))
        self.in_proj_qkv = self.in_proj_z = self.in_proj_b = self.in_proj_a = None

    def _project(self, x: Hidden) -> tuple[Array, Array, Array, Array]:
        """qkv, z, b and a. A compiler does the stacked product once, however often it is asked for."""
        if self.in_proj is None:
            return self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)
        config = self.config
        sizes = config.conv_channels, config.value_dim, config.linear_num_value_heads
        qkv, z, b, a = jnp.split(self.in_proj(x), tuple(itertools.accumulate(sizes)), axis=-1)
        return qkv, z, b, a

    def rows(self, x: Hidden) -> DeltaRows:
        """What the rows bring to the recurrence; gates in float32."""
        qkv, _, b, a = self._project(x)
        a = a.astype(jnp.float32) + broadcast_last(self.dt_bias[...].astype(jnp.float32), 3)
        log_decay = -broadcast_last(jnp.exp(self.A_log[...]), 3) * jax.nn.softplus(a)
        return DeltaRows(qkv, log_decay, jax.nn.sigmoid(b.astype(jnp.float32)))

    def finish(self, outputs: Float32[Array, "B T U Z"], x: Hidden) -> Hidden:
        """Norms and gates the heads' outputs and projects them back to the residual width."""
        normed = self.norm(outputs, self._project(x)[1].reshape(outputs.shape))
        return self.out_proj(normed.astype(x.dtype).reshape(*x.shape[:2], -1))


def read_window(
    layer: GatedDeltaNet, x: Hidden, memory: DeltaState, num_pending: PerLane, num_rows: PerLane
) -> tuple[Hidden, DeltaState]:
    """Folds the pending rows and reads the window, which becomes the new pending; idle lanes keep theirs."""
    rows = layer.rows(x)
    live = num_rows > 0
    state, conv, outputs = gated_delta_window(
        memory.state,
        memory.conv,
        memory.pending,
        num_pending,
        rows,
        num_rows,
        layer.conv1d.weight[...],
    )
    # the old pending rows have been read by now: the new ones take their place without a copy
    rows, outputs = lax.optimization_barrier((rows, outputs))

    def keep(new: Array, old: Array) -> Array:
        new = jnp.pad(new, ((0, 0), (0, old.shape[1] - new.shape[1]), (0, 0)))
        return jnp.where(live[:, None, None], new, old)

    memory = DeltaState(
        state,
        conv,
        keep(rows.qkv, memory.pending_qkv),
        keep(rows.log_decay, memory.pending_log_decay),
        keep(rows.write_strength, memory.pending_write_strength),
    )
    return layer.finish(outputs, x), memory


def read_chunk(
    layer: GatedDeltaNet, x: Hidden, memory: DeltaState, num_pending: PerLane, num_tokens: PerLane
) -> tuple[Hidden, DeltaState]:
    """Folds the pending rows, then moves the state over the first `num_tokens` rows; idle lanes keep theirs."""
    valid = jnp.arange(x.shape[1], dtype=jnp.int32)[None, :] < num_tokens[:, None]
    rows = layer.rows(x).masked(valid)
    weight = layer.conv1d.weight[...]
    fold = jnp.where(num_tokens > 0, num_pending, 0)
    state, conv = fold_pending(memory.state, memory.conv, memory.pending, fold, weight)
    history = jnp.concatenate([conv, rows.qkv], axis=1)
    _, heads, value_dim, key_dim = state.shape
    q, k, v = split_heads(conv_silu(history, weight), heads, key_dim, value_dim)
    state, outputs = delta_rule_chunked(state, q, k, v, rows.log_decay, rows.write_strength)
    # the window of the last real tokens, not of the padding behind them
    conv = rows_from(history, num_tokens, conv.shape[1])
    return layer.finish(outputs, x), replace(memory, state=state, conv=conv)


def read_documents(
    layer: GatedDeltaNet,
    x: Hidden,
    starts: Bool[Array, "B T"],
    precision: lax.Precision = lax.Precision.HIGHEST,
) -> Hidden:
    """A whole packed sequence without memory (training): nothing flows into a row marked as a document's start."""
    rows = layer.rows(x)
    weight = layer.conv1d.weight[...]
    config = layer.config
    heads, key_dim, value_dim = (
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
    )
    history = jnp.pad(rows.qkv, ((0, 0), (weight.shape[1] - 1, 0), (0, 0)))
    documents = jnp.cumsum(starts.astype(jnp.int32), axis=1)
    documents = jnp.pad(documents, ((0, 0), (weight.shape[1] - 1, 0)), constant_values=-1)
    q, k, v = split_heads(conv_silu(history, weight, documents), heads, key_dim, value_dim)
    state = jnp.zeros((x.shape[0], heads, value_dim, key_dim), jnp.float32)
    _, outputs = delta_rule_chunked(
        state, q, k, v, rows.log_decay, rows.write_strength, starts=starts, precision=precision
    )
    return layer.finish(outputs, x)
