"""The small pieces: linear maps stored `[out, in]`, the zero-centred RMS norm, the gated MLP, partial rotary positions.

They take and return arrays of the model's dtype; norms and rotary angles are float32 inside.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from mtp.config import ModelConfig
from mtp.quant import quantise_channels
from mtp.shapes import Array, Float, Float32, Hidden, Int32


def linear(x: Float[Array, "... I"], weight: Float[Array, "O I"]) -> Float[Array, "... O"]:
    """`x @ weight.T` in the dtype of x, accumulated in float32; float32 inputs multiply in full float32."""
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(x, weight, contract, precision=exact, preferred_element_type=x.dtype)


class Linear(nnx.Module):
    """A weight `[out, in]` without bias: the layout of the checkpoint, and the fast one for few rows."""

    def __init__(
        self,
        out_features: int,
        in_features: int,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        axes: tuple[str | None, str | None] = (None, None),
    ) -> None:
        scale = in_features**-0.5
        weight = scale * jax.random.normal(rngs.params(), (out_features, in_features), jnp.float32)
        self.weight = nnx.Param(weight.astype(dtype), axes=axes)

    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        return linear(x, self.weight[...])


def stack_linears(*parts: Linear) -> Linear:
    """One map with the outputs of all, in order: maps of the same input are read and launched as one."""
    whole: Linear = nnx.merge(*nnx.split(parts[0]))
    rows = jnp.concatenate([part.weight[...] for part in parts], axis=0)
    whole.weight = nnx.Param(rows, axes=parts[0].weight.axes)
    return whole


class Fp8Linear(nnx.Module):
    """A linear map whose weight is fp8 with a scale an output channel; inputs and sums keep their own dtype.

    The codes are widened where they are multiplied, so half the bytes are read and nothing else is rounded.
    """

    def __init__(self, weight: Float[Array, "O I"]) -> None:
        codes, scales = quantise_channels(weight)
        self.codes, self.scales = nnx.Param(codes), nnx.Param(scales)

    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        """In the dtype of x."""
        return self.wide(x).astype(x.dtype)

    def wide(self, x: Float[Array, "... I"]) -> Float32[Array, "... O"]:
        """In float32."""
        contract = (((x.ndim - 1,), (1,)), ((), ()))
        product = lax.dot_general(x, self.codes[...].astype(x.dtype), contract, preferred_element_type=jnp.float32)
        return product * broadcast_last(self.scales[...], x.ndim)


class Embedding(nnx.Module):
    """A row a token."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        shape = (config.vocab_size, config.hidden_size)
        weight = 0.02 * jax.random.normal(rngs.params(), shape, jnp.float32)
        self.weight = nnx.Param(weight.astype(dtype), axes=("vocab", None))

    def __call__(self, tokens: Int32[Array, "..."]) -> Float[Array, "... D"]:
        return self.weight[...][tokens]


class RMSNorm(nnx.Module):
    """x / rms(x) * (1 + weight): the weight is stored zero-centred (HF `Qwen3_5RMSNorm`)."""

    def __init__(self, size: int, eps: float, dtype: DTypeLike) -> None:
        self.weight = nnx.Param(jnp.zeros((size,), dtype), axes=(None,))
        self.eps = eps

    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... I"]:
        x32 = x.astype(jnp.float32)
        x32 = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return (x32 * broadcast_last(1.0 + self.weight[...].astype(jnp.float32), x32.ndim)).astype(x.dtype)


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(inner, width, rngs, dtype, ("mlp", None))
        self.up_proj = Linear(inner, width, rngs, dtype, ("mlp", None))
        self.down_proj = Linear(width, inner, rngs, dtype, (None, "mlp"))
        # gate and up in one matrix, which then are None
        self.gate_up_proj: Linear | Fp8Linear | None = None

    def stack(self) -> None:
        """Stores gate and up as one matrix, in place."""
        self.gate_up_proj = nnx.data(stack_linears(self.gate_proj, self.up_proj))
        self.gate_proj = self.up_proj = None

    def __call__(self, x: Hidden) -> Hidden:
        if self.gate_up_proj is None:
            gate, up = self.gate_proj(x), self.up_proj(x)
        else:
            gate, up = jnp.split(self.gate_up_proj(x), 2, axis=-1)
        return self.down_proj(jax.nn.silu(gate) * up)


def broadcast_last(vector: Float[Array, "I"], ndim: int) -> Float[Array, "..."]:
    """The vector with leading axes of size one, so that it meets an array of `ndim` axes along its last."""
    return vector.reshape((1,) * (ndim - 1) + vector.shape)


def rotary_angles(positions: Int32[Array, "B T"], config: ModelConfig) -> Float32[Array, "B T A"]:
    """Angles of the A = rotary_dim / 2 frequencies, float32. For text the three position axes of mrope are equal."""
    half = config.rotary_dim // 2
    inverse = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    return positions.astype(jnp.float32)[..., None] * inverse[None, None, :]


def rotate(x: Float[Array, "B T N H"], angles: Float32[Array, "B T A"]) -> Float[Array, "B T N H"]:
    """Rotates the first 2A dims of each head, pairing dim j with dim j + A; the rest passes through."""
    half = angles.shape[-1]
    cos, sin = jnp.cos(angles)[:, :, None, :], jnp.sin(angles)[:, :, None, :]
    first, second = (x[..., i * half : (i + 1) * half].astype(jnp.float32) for i in (0, 1))
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), x[..., 2 * half :]], axis=-1)
