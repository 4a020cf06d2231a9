"""fp8 weights: e4m3 codes and scales.

The published FP8 checkpoints store one scale a block: a weight [O, I] comes with scales [ceil(O / block), ceil(I /
block)]; the last blocks may be ragged. They are called `weight_scale_inv`, yet the weight is codes *times* scales. Our
own draft head has one scale an output channel.
"""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from mtp.shapes import Array, Float, Float32


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Shape of the scales that belong to a weight of this shape, one for each (ragged) `block`."""
    return tuple(-(-size // edge) for size, edge in zip(shape, block, strict=True))


@functools.partial(jax.jit, static_argnames=("block", "dtype"))
def dequantise(
    codes: Float[Array, "O I"], scales: Float[Array, "o i"], *, block: tuple[int, int], dtype: DTypeLike
) -> Float[Array, "O I"]:
    """The weight [O, I]: `codes[i, j] * scales[i // block[0], j // block[1]]`, rounded once to `dtype`.

    Args:
      codes: float8_e4m3fn.
      scales: any float type, of shape `scale_shape(codes.shape, block)`.

    Raises:
      ValueError: if the two shapes do not belong together.
    """
    expected = scale_shape(codes.shape, block)
    if scales.shape != expected:
        raise ValueError(f"scales of {codes.shape} in blocks of {block} must be {expected}, got {scales.shape}")
    return (codes.astype(jnp.float32) * _widen(scales, codes.shape, block)).astype(dtype)


def _widen(scales: Float[Array, "o i"], shape: tuple[int, ...], block: tuple[int, int]) -> Float32[Array, "O I"]:
    """The scale of each weight."""
    wide = scales.astype(jnp.float32)
    for axis, (size, edge) in enumerate(zip(shape, block, strict=True)):
        wide = jax.lax.slice_in_dim(jnp.repeat(wide, edge, axis=axis), 0, size, axis=axis)
    return wide


@functools.partial(jax.jit, static_argnames=("block", "scale_dtype"))
def quantise(
    weight: Float[Array, "O I"], *, block: tuple[int, int], scale_dtype: DTypeLike
) -> tuple[Float[Array, "O I"], Float[Array, "o i"]]:
    """Codes (float8_e4m3fn) and scales that `dequantise` makes nearly the weight of.

    The largest magnitude of a block becomes the largest code; each weight is off by at most 1/16 of itself, or by 2^-10
    scales where it is tiny. Codes are made with the scales as rounded.
    """
    rows, columns = scale_shape(weight.shape, block)
    missing = [(0, count * edge - size) for count, edge, size in zip((rows, columns), block, weight.shape, strict=True)]
    wide = weight.astype(jnp.float32)
    largest = jnp.pad(jnp.abs(wide), missing).reshape(rows, block[0], columns, block[1]).max(axis=(1, 3))
    top = float(jnp.finfo(jnp.float8_e4m3fn).max)
    scales = jnp.where(largest == 0, 1.0, largest / top).astype(scale_dtype)
    return (wide / _widen(scales, weight.shape, block)).astype(jnp.float8_e4m3fn), scales


def quantise_channels(weight: Float[Array, "O I"]) -> tuple[Float[Array, "O I"], Float32[Array, "O"]]:
    """Codes (float8_e4m3fn) and one scale an output channel, so that `codes * scales[:, None]` is near the weight.

    As `quantise` in blocks of a channel.
    """
    codes, scales = quantise(weight, block=(1, weight.shape[1]), scale_dtype=jnp.float32)
    return codes, scales[:, 0]
