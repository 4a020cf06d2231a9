"""fp8 block dequantisation against an element by element numpy twin, exactly."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mtp import quant

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
