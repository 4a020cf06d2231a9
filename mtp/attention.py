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
from mtp.layers import Linear, RMSNorm, rotary_angles, rotate
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

    def keys_values(
        self, x: Hidden, positions: Int32[Array, "B T"]
    ) -> tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        """Normed, rotated keys and plain values of the rows."""
        shape = (*x.shape[:2], self.config.num_key_value_heads, self.config.head_dim)
        keys = self.k_norm(self.k_proj(x).reshape(shape))
        return rotate(keys, rotary_angles(positions, self.config)), self.v_proj(x).reshape(shape)

    def queries_gate(
        self, x: Hidden, positions: Int32[Array, "B T"]
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N H"]]:
        """Normed, rotated queries and the output gate; each head's projection holds its query, then its gate."""
        both = self.q_proj(x).reshape(*x.shape[:2], self.config.num_attention_heads, 2 * self.config.head_dim)
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
