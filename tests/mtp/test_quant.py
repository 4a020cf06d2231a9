"""fp8: block dequantisation against an element by element numpy twin, exactly, and our own scales a channel."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mtp import quant
from mtp.layers import Fp8Linear

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
BF16 = np.dtype(ml_dtypes.bfloat16)


def _random(shape: tuple[int, int], block: tuple[int, int], scale_dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    codes = rng.uniform(-448, 448, shape).astype(np.float32).astype(FP8)
    scales = rng.uniform(1e-3, 1e-1, quant.scale_shape(shape, block)).astype(scale_dtype)
    return codes, scales


def _twin(codes: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    rows, columns = np.indices(codes.shape)
    return codes.astype(np.float32) * scales.astype(np.float32)[rows // block[0], columns // block[1]]


@pytest.mark.parametrize("scale_dtype", [np.dtype(np.float32), np.dtype(np.float16), BF16], ids=str)
@pytest.mark.parametrize(
    ("shape", "block"),
    [((256, 128), (128, 128)), ((130, 257), (128, 128)), ((5, 7), (128, 128)), ((9, 10), (2, 3))],
)
def test_dequantise_multiplies_each_block_by_its_scale(shape, block, scale_dtype):
    codes, scales = _random(shape, block, scale_dtype)
    expected = _twin(codes, scales, block)
    got = np.asarray(quant.dequantise(jnp.asarray(codes), jnp.asarray(scales), block=block, dtype=jnp.float32))
    np.testing.assert_array_equal(got, expected)
    got = np.asarray(quant.dequantise(jnp.asarray(codes), jnp.asarray(scales), block=block, dtype=jnp.bfloat16))
    np.testing.assert_array_equal(got, expected.astype(BF16))


def test_every_code_has_its_e4m3_value():
    codes = np.arange(256, dtype=np.uint8).view(FP8).reshape(16, 16)
    ones = np.ones((1, 1), np.float32)
    got = np.asarray(quant.dequantise(jnp.asarray(codes), jnp.asarray(ones), block=(16, 16), dtype=jnp.float32))
    # e4m3fn by its definition: sign, four exponent bits of bias 7, three of mantissa; all ones is NaN.
    bits = np.arange(256)
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    value = np.where(bits & 127 == 127, np.nan, np.where(bits & 128, -value, value))
    np.testing.assert_array_equal(got.reshape(-1), value.astype(np.float32))


def test_scales_of_another_shape_are_refused_with_both_shapes():
    codes, _ = _random((130, 257), (128, 128), BF16)
    with pytest.raises(ValueError, match=r"must be \(2, 3\), got \(3, 2\)"):
        quant.dequantise(jnp.asarray(codes), jnp.ones((3, 2), jnp.float32), block=(128, 128), dtype=jnp.float32)


@pytest.mark.parametrize("scale_dtype", [np.dtype(np.float32), BF16], ids=str)
@pytest.mark.parametrize(("shape", "block"), [((130, 257), (128, 128)), ((9, 10), (2, 3))])
def test_quantise_is_undone_within_half_a_step(shape, block, scale_dtype):
    rng = np.random.default_rng(3)
    weight = rng.normal(size=shape).astype(np.float32)
    weight[: block[0], : block[1]] = 0
    codes, scales = quant.quantise(jnp.asarray(weight), block=block, scale_dtype=scale_dtype)
    assert codes.dtype == FP8 and scales.dtype == scale_dtype and scales.shape == quant.scale_shape(shape, block)
    back = np.asarray(quant.dequantise(codes, scales, block=block, dtype=jnp.float32))
    # the same code again: what is read from a checkpoint is written back unchanged
    wide = _twin(np.ones(shape, FP8), np.asarray(scales), block)
    np.testing.assert_array_equal((back / wide).astype(FP8), codes)
    # half a step of three mantissa bits, or of the smallest exponent
    allowed = np.maximum(np.abs(weight) / 16, wide * 2.0**-10)
    assert (np.abs(back - weight) <= allowed * (1 + 1e-6)).all()


def test_channels_are_quantised_to_the_nearest_code_of_their_own_scale():
    rng = np.random.default_rng(1)
    # channels of very different size, one of them zero
    weight = rng.normal(size=(6, 64)).astype(np.float32) * np.array([1e-3, 1, 30, 0, 5, 2], np.float32)[:, None]
    codes, scales = (np.asarray(x) for x in quant.quantise_channels(jnp.asarray(weight)))
    assert codes.dtype == FP8 and scales.dtype == np.float32
    np.testing.assert_allclose(scales, np.where(weight.any(1), np.abs(weight).max(1) / 448, 1), rtol=1e-6)
    back = codes.astype(np.float32) * scales[:, None]
    # half a step of three mantissa bits, or of the smallest exponent
    allowed = np.maximum(np.abs(weight) / 16, scales[:, None] * 2.0**-10)
    assert (np.abs(back - weight) <= allowed * (1 + 1e-6)).all()


def test_an_fp8_linear_map_multiplies_with_its_codes():
    rng = np.random.default_rng(2)
    weight, x = rng.normal(size=(24, 32)).astype(np.float32), rng.normal(size=(3, 32)).astype(np.float32)
    layer = Fp8Linear(jnp.asarray(weight))
    stored = np.asarray(layer.codes[...]).astype(np.float64) * np.asarray(layer.scales[...])[:, None]
    # float32 against float64 over 32 products
    np.testing.assert_allclose(layer(jnp.asarray(x)), x.astype(np.float64) @ stored.T, rtol=0, atol=1e-4)
    assert layer(jnp.asarray(x, jnp.bfloat16)).dtype == jnp.bfloat16
    assert layer.wide(jnp.asarray(x, jnp.bfloat16)).dtype == jnp.float32
