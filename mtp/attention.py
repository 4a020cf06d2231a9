"""Full attention with an output gate (HF `Qwen3_5Attention`): grouped heads, normed queries and keys, partial rotary.

`project` and `combine` are the two halves around the attention itself, so that serving (over pages) and training (over
a whole sequence) share every weight and every rounding. `attend_pages` is the serving middle.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from mtp.cache import Pages, append
from mtp.config import ModelConfig
from mtp.kernels.paged_attention import paged_attention
from mtp.layers import Fp8Linear, Linear, RMSNorm, rotary_angles, rotate, stack_linears
from mtp.shapes import Array, Float, Hidden, Int32, PerLane


class GatedAttention(nnx.Module):
    """Projections, norms and gate of one full-attention layer."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        width, dim = config.hidden_size, config.head_dim
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = Linear(2 * heads * dim, width, rngs, dtype, ("heads", None))
        self.k_proj = Linear(groups * dim, width, rngs, dtype, ("kv_heads", None))
        self.v_proj = Linear(groups * dim, width, rngs, dtype, ("kv_heads", None))
        self.o_proj = Linear(width, heads * dim, rngs, dtype, (None, "heads"))
        self.q_norm = RMSNorm(dim, config.rms_norm_eps, dtype)
        self.k_norm = RMSNorm(dim, config.rms_norm_eps, dtype)
        self.config = config
        # q, k and v in one matrix, which then are None
        self.qkv_proj: Linear | Fp8Linear | None = None

    def stack(self) -> None:
        """Stores q, k and v as one matrix, in place."""
        self.qkv_proj = nnx.data(stack_linears(self.q_proj, self.k_proj, self.v_proj))
        self.q_proj = self.k_proj = self.v_proj = None

    def _project(self, x: Hidden) -> tuple[Array, Array, Array]:
        """q (with its gate), k and v. A compiler does the stacked product once, however often it is asked for."""
        if self.qkv_proj is None:
            return self.q_proj(x), self.k_proj(x), self.v_proj(x)
        config = self.config
        queries = 2 * config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        q, k, v = jnp.split(self.qkv_proj(x), (queries, queries + keys), axis=-1)
        return q, k, v

    def keys_values(
        self, x: Hidden, positions: Int32[Array, "B T"]
    ) -> tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        """Normed, rotated keys and plain values of the rows."""
        shape = (*x.shape[:2], self.config.num_key_value_heads, self.config.head_dim)
        _, keys, values = self._project(x)
        keys = rotate(self.k_norm(keys.reshape(shape)), rotary_angles(positions, self.config))
        return keys, values.reshape(shape)

    def queries_gate(
        self, x: Hidden, positions: Int32[Array, "B T"]
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N H"]]:
        """Normed, rotated queries and the output gate; each head's projection holds its query, then its gate."""
        both = self._project(x)[0].reshape(*x.shape[:2], self.config.num_attention_heads, 2 * self.config.head_dim)
        queries, gate = jnp.split(both, 2, axis=-1)
        return rotate(self.q_norm(queries), rotary_angles(positions, self.config)), gate

    def combine(self, attended: Float[Array, "B T N H"], gate: Float[Array, "B T N H"]) -> Hidden:
        """Gates the heads' outputs in float32 and projects them back to the residual width."""
        gated = attended.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))
        return self.o_proj(gated.astype(attended.dtype).reshape(*attended.shape[:2], -1))


def attend_pages(
    layer: GatedAttention,
    x: Hidden,
    pages: Pages,
    page_table: Int32[Array, "B M"],
    starts: PerLane,
    num_rows: PerLane,
    first: int = 0,
) -> tuple[Hidden, Pages]:
    """Writes the rows' keys and values at cache indices `starts ..`, then attends to everything up to each row.

    `first` is the first readable cache index, and what a row's index exceeds its rotary position by: 0 for the trunk, 1
    for the MTP layer.
    """
    positions = starts[:, None] + jnp.arange(x.shape[1], dtype=jnp.int32)[None, :] - first
    queries, gate = layer.queries_gate(x, positions)
    pages = append(pages, page_table, starts, num_rows, *layer.keys_values(x, positions))
    attended = paged_attention(queries, pages.keys, pages.values, page_table, starts, num_rows, first)
    return layer.combine(attended, gate), pages
