"""Attention of a few query rows a lane over keys and values that lie in pages.

`paged_attention` is the public op; its plain jnp form, `reference`, is the definition that the GPU kernel has to meet.
"""

import jax
import jax.numpy as jnp
from jax import lax

from mtp.kernels import backend
from mtp.kernels import paged_attention_mgpu as mgpu
from mtp.shapes import Array, Float, Int32, PerLane


def paged_attention(
    queries: Float[Array, "B T N H"],
    keys: Float[Array, "P page K H"],
    values: Float[Array, "P page K H"],
    page_table: Int32[Array, "B M"],
    starts: PerLane,
    num_rows: PerLane,
    first: int = 0,
    *,
    implementation: str | None = None,
) -> Float[Array, "B T N H"]:
    """Row t of a lane attends to cache indices `first .. starts + t`; query head n reads KV head n // (N // K).

    Scores and softmax are float32, the scale is H ** -0.5. The lane's own entries end before `starts + num_rows`; what
    lies behind that in its pages (another request's leftovers, maybe NaN) is never multiplied in. A row is NaN if an
    entry that it attends to is not finite; one behind it, such as a draft that will be rejected, leaves it alone. Rows
    at or behind `num_rows` return unspecified numbers.

    `implementation`: see `mtp.kernels.backend`.
    """
    chosen = backend.choose("paged_attention", implementation, mgpu.unfit(queries, keys, values, page_table))
    if chosen == "xla":
        return reference(queries, keys, values, page_table, starts, num_rows, first)
    interpret = chosen == "interpret"
    return mgpu.paged_attention(queries, keys, values, page_table, starts, num_rows, first, interpret=interpret)


def reference(
    queries: Float[Array, "B T N H"],
    keys: Float[Array, "P page K H"],
    values: Float[Array, "P page K H"],
    page_table: Int32[Array, "B M"],
    starts: PerLane,
    num_rows: PerLane,
    first: int = 0,
) -> Float[Array, "B T N H"]:
    """The definition of `paged_attention`, in plain jnp."""
    batch, rows, heads, dim = queries.shape
    groups = keys.shape[2]
    exact = lax.Precision.HIGHEST if queries.dtype == jnp.float32 else None
    lane_keys = keys[page_table].reshape(batch, -1, groups, dim)
    lane_values = values[page_table].reshape(batch, -1, groups, dim)
    index = jnp.arange(lane_keys.shape[1], dtype=jnp.int32)

    own = (index[None, :] >= first) & (index[None, :] < (starts + num_rows)[:, None])
    finite = jnp.all(jnp.isfinite(lane_values), axis=(2, 3))
    lane_values = jnp.where((own & finite)[:, :, None, None], lane_values, jnp.zeros((), lane_values.dtype))
    grouped = queries.reshape(batch, rows, groups, heads // groups, dim)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, lane_keys, precision=exact, preferred_element_type=jnp.float32)
    bound = starts[:, None] + jnp.arange(rows, dtype=jnp.int32)[None, :]
    seen = own[:, None, :] & (index[None, None, :] <= bound[:, :, None])  # [B, T, S]
    scores = jnp.where(seen[:, None, None], scores * dim**-0.5, jnp.float32(-1e30))
    weights = jax.nn.softmax(scores, axis=-1).astype(queries.dtype)
    mixed = jnp.einsum("bkgts,bskh->btkgh", weights, lane_values, precision=exact)
    # a weight of 0 times NaN would be NaN: what is not finite is left out above, and told here to those who see it
    broken = jnp.any(seen & ~finite[:, None, :], axis=-1)
    mixed = jnp.where(broken[:, :, None, None, None], jnp.nan, mixed)
    return mixed.reshape(batch, rows, heads, dim).astype(queries.dtype)
