"""The gated delta rule: causal convolution, the serial recurrence of decoding, and the chunked form of prefill.

Per value head the state S [Z, Y] follows, for each token (Gated DeltaNet, arXiv 2412.06464):

    S <- exp(g) S;   u = beta (v - S k);   S <- S + u k^T;   o = S q

`gated_delta_window` is the op of a decoding step: it folds the pending rows into the committed state and returns the
outputs of the window that follows, without writing the window. The jnp forms here are the definition that a GPU kernel
has to meet. All arithmetic on the state is float32, written as multiply and sum, so that no matmul unit rounds it.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from mtp.kernels import backend, gated_delta_mgpu
from mtp.shapes import Array, Bool, Float, Float32, Int32, PerLane

CHUNK = 64


@partial(jax.tree_util.register_dataclass, data_fields=["qkv", "log_decay", "write_strength"], meta_fields=[])
@dataclass(frozen=True)
class DeltaRows:
    """What a token brings to the delta rule of one layer, before the convolution."""

    # query, key, value channels, activation dtype
    qkv: Float[Array, "B T C"]
    # g <= 0 of each value head; 0 keeps the state
    log_decay: Float32[Array, "B T U"]
    # beta in [0, 1] of each value head; 0 writes nothing
    write_strength: Float32[Array, "B T U"]

    @property
    def arrays(self) -> tuple[Array, Array, Array]:
        """The three fields, in order."""
        return self.qkv, self.log_decay, self.write_strength

    def masked(self, valid: Bool[Array, "B T"]) -> "DeltaRows":
        """The same rows, with the invalid ones made neutral: zero channels, no decay, no write."""
        keep = lambda x: jnp.where(valid[..., None], x, jnp.zeros((), x.dtype))  # noqa: E731
        return DeltaRows(keep(self.qkv), keep(self.log_decay), keep(self.write_strength))


def conv_silu(
    rows: Float[Array, "B rows C"],
    weight: Float[Array, "C W"],
    documents: Int32[Array, "B rows"] | None = None,
) -> Float[Array, "B T C"]:
    """Depthwise causal convolution over time, then SiLU; summed in float32 and rounded once.

    The first W - 1 rows are history. Tap W - 1 meets the current token. With `documents` (an id a row, for packed
    training text) a tap reaches rows of its own document only.
    """
    taps = weight.shape[1]
    length = rows.shape[1] - taps + 1
    weight32 = weight.astype(jnp.float32)

    def term(tap: int) -> Array:
        reached = rows[:, tap : tap + length].astype(jnp.float32) * weight32[None, None, :, tap]
        if documents is None:
            return reached
        same = documents[:, tap : tap + length] == documents[:, taps - 1 :]
        return jnp.where(same[..., None], reached, 0.0)

    return jax.nn.silu(sum((term(tap) for tap in range(1, taps)), term(0))).astype(rows.dtype)


def split_heads(
    mixed: Float[Array, "B T C"], heads: int, key_dim: int, value_dim: int
) -> tuple[Float32[Array, "B T U Y"], Float32[Array, "B T U Y"], Float32[Array, "B T U Z"]]:
    """Unit queries (times Y ** -0.5) and keys, repeated for their value heads, and values; float32."""
    batch, length, channels = mixed.shape
    key_heads = (channels - heads * value_dim) // (2 * key_dim)
    q, k, v = jnp.split(mixed.astype(jnp.float32), [key_heads * key_dim, 2 * key_heads * key_dim], axis=-1)

    def unit(x: Array) -> Array:
        x = x.reshape(batch, length, key_heads, key_dim)
        x = x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
        return jnp.repeat(x, heads // key_heads, axis=2)

    return unit(q) * key_dim**-0.5, unit(k), v.reshape(batch, length, heads, value_dim)


def delta_step(
    state: Float32[Array, "B U Z Y"],
    k: Float32[Array, "B U Y"],
    v: Float32[Array, "B U Z"],
    log_decay: Float32[Array, "B U"],
    write_strength: Float32[Array, "B U"],
) -> Float32[Array, "B U Z Y"]:
    """The state after one token."""
    state = state * jnp.exp(log_decay)[..., None, None]
    update = (v - jnp.sum(state * k[..., None, :], axis=-1)) * write_strength[..., None]
    return state + update[..., None] * k[..., None, :]


def delta_rule_serial(
    state: Float32[Array, "B U Z Y"],
    q: Float32[Array, "B T U Y"],
    k: Float32[Array, "B T U Y"],
    v: Float32[Array, "B T U Z"],
    log_decay: Float32[Array, "B T U"],
    write_strength: Float32[Array, "B T U"],
) -> tuple[Float32[Array, "B U Z Y"], Float32[Array, "B T U Z"]]:
    """The state after all tokens and the output of each, token by token."""

    def token(state: Array, row: tuple[Array, ...]) -> tuple[Array, Array]:
        q, *rest = row
        state = delta_step(state, *rest)
        return state, jnp.sum(state * q[..., None, :], axis=-1)

    state, outputs = lax.scan(token, state, _by_token(q, k, v, log_decay, write_strength))
    return state, jnp.moveaxis(outputs, 0, 1)


def _by_token(*rows: Array) -> tuple[Array, ...]:
    return tuple(jnp.moveaxis(x, 1, 0) for x in rows)


def fold_pending(
    state: Float32[Array, "B U Z Y"],
    conv: Float[Array, "B history C"],
    pending: DeltaRows,
    num_pending: PerLane,
    weight: Float[Array, "C W"],
) -> tuple[Float32[Array, "B U Z Y"], Float[Array, "B history C"]]:
    """The committed state and convolution history after the first `num_pending` pending rows of each lane."""
    _, heads, value_dim, key_dim = state.shape
    limit = pending.qkv.shape[1]
    # a row that decays nothing and writes nothing leaves the state as it is, bit for bit
    pending = pending.masked(jnp.arange(limit, dtype=jnp.int32)[None, :] < num_pending[:, None])
    before = jnp.concatenate([conv, pending.qkv], axis=1)
    _, k, v = split_heads(conv_silu(before, weight), heads, key_dim, value_dim)
    rows = _by_token(k, v, pending.log_decay, pending.write_strength)
    state, _ = lax.scan(lambda state, row: (delta_step(state, *row), None), state, rows)
    return state, rows_from(before, num_pending, conv.shape[1])


def gated_delta_window(
    state: Float32[Array, "B U Z Y"],
    conv: Float[Array, "B history C"],
    pending: DeltaRows,
    num_pending: PerLane,
    window: DeltaRows,
    num_rows: PerLane,
    weight: Float[Array, "C W"],
    *,
    implementation: str | None = None,
) -> tuple[Float32[Array, "B U Z Y"], Float[Array, "B history C"], Float32[Array, "B T U Z"]]:
    """Folds the pending rows, then reads the window from the folded state. Lanes without rows are left as they are.

    Args:
        num_pending: rows to fold, at most those of `pending`.
        num_rows: rows of each lane's window; the outputs of rows behind them are unspecified.
        implementation: see `mtp.kernels.backend`.

    Returns:
        The committed state and convolution history after the fold, and the window's outputs.
    """
    num_pending = jnp.where(num_rows > 0, num_pending, 0)
    chosen = backend.choose("gated_delta", implementation, gated_delta_mgpu.unfit(state, conv, weight.shape[1]))
    if chosen != "xla":
        before = jnp.concatenate([conv, pending.qkv], axis=1)
        state, outputs = gated_delta_mgpu.gated_delta_window(
            state, conv, pending.arrays, num_pending, window.arrays, num_rows, weight, interpret=chosen == "interpret"
        )
        return state, rows_from(before, num_pending, conv.shape[1]), outputs
    state, conv = fold_pending(state, conv, pending, num_pending, weight)
    mixed = conv_silu(jnp.concatenate([conv, window.qkv], axis=1), weight)
    _, heads, value_dim, key_dim = state.shape
    q, k, v = split_heads(mixed, heads, key_dim, value_dim)
    _, outputs = delta_rule_serial(state, q, k, v, window.log_decay, window.write_strength)
    return state, conv, outputs


def rows_from(rows: Float[Array, "B T C"], starts: PerLane, count: int) -> Float[Array, "B count C"]:
    """`count` rows of each lane from its own start."""
    index = starts[:, None] + jnp.arange(count, dtype=jnp.int32)[None, :]
    return jnp.take_along_axis(rows, index[:, :, None], axis=1)


def delta_rule_chunked(
    state: Float32[Array, "B U Z Y"],
    q: Float32[Array, "B T U Y"],
    k: Float32[Array, "B T U Y"],
    v: Float32[Array, "B T U Z"],
    log_decay: Float32[Array, "B T U"],
    write_strength: Float32[Array, "B T U"],
    starts: Bool[Array, "B T"] | None = None,
    precision: lax.Precision = lax.Precision.HIGHEST,
) -> tuple[Float32[Array, "B U Z Y"], Float32[Array, "B T U Z"]]:
    """The same as `delta_rule_serial`, in chunks of up to 64 tokens (QWEN3.5 / FLA chunked form, arXiv 2412.06464).

    Within a chunk, with G_i = g_1 + .. + g_i, D_ij = exp(g_(j+1) + .. + g_i) for i >= j, and S the incoming state:

        (I + strictly_lower(beta_i k_i.k_j D_ij)) U = beta V - (beta exp(G) K) S^T
        O = (exp(G) Q) S^T + (Q K^T * D) U
        S <- exp(G_last) S + U^T (D_last K)

    `starts` marks the first token of each packed document: nothing flows across it.
    """
    length = q.shape[1]
    size = min(CHUNK, 1 << (length - 1).bit_length())
    count = -(-length // size)

    def chunks(x: Array) -> Array:  # [B, T, U, ...] -> [count, B, U, size, ...]
        x = jnp.pad(x, [(0, 0), (0, count * size - length)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(x.shape[0], count, size, *x.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 2, 3)

    matmul = partial(jnp.matmul, precision=precision)
    q, k, v, g, beta = (chunks(x) for x in (q, k, v, log_decay, write_strength))
    causal = jnp.tril(jnp.ones((size, size), bool))[None, None, None]
    # documents begun within the chunk, up to and including this token
    begun = jnp.zeros((count, 1, 1, size), jnp.int32)
    if starts is not None:
        begun = jnp.cumsum(chunks(starts.astype(jnp.int32)[..., None]), axis=-1)
    together = causal & (begun[..., :, None] == begun[..., None, :])
    # log D_ij is summed from j + 1 to i: as a difference of two running sums it would lose the small behind the large
    after = jnp.where(jnp.tril(causal, -1), g[..., :, None], 0.0)
    decay = jnp.where(together, jnp.exp(jnp.cumsum(after, axis=-2)), 0.0)
    carry = jnp.where(begun == 0, jnp.exp(jnp.cumsum(g, axis=-1)), 0.0)
    until_end = decay[..., -1, :]

    k_t = jnp.swapaxes(k, -1, -2)
    inner = jnp.tril(beta[..., None] * matmul(k, k_t) * decay, -1)
    identity = jnp.broadcast_to(jnp.eye(size, dtype=jnp.float32), inner.shape)
    inverse = lax.linalg.triangular_solve(inner, identity, left_side=True, lower=True, unit_diagonal=True)
    fresh = matmul(inverse, beta[..., None] * v)
    reading = matmul(inverse, (beta * carry)[..., None] * k)
    scores = matmul(q, k_t) * decay
    q_carry, k_end = carry[..., None] * q, until_end[..., None] * k

    def one_chunk(state: Array, xs: tuple[Array, ...]) -> tuple[Array, Array]:
        fresh, reading, scores, q_carry, k_end, keep = xs
        state_t = jnp.swapaxes(state, -1, -2)
        update = fresh - matmul(reading, state_t)
        outputs = matmul(q_carry, state_t) + matmul(scores, update)
        return keep[..., None, None] * state + matmul(jnp.swapaxes(update, -1, -2), k_end), outputs

    state, outputs = lax.scan(one_chunk, state, (fresh, reading, scores, q_carry, k_end, carry[..., -1]))
    outputs = jnp.moveaxis(jnp.moveaxis(outputs, 3, 2), 0, 1)  # [B, count, size, U, Z]
    return state, outputs.reshape(outputs.shape[0], count * size, *outputs.shape[3:])[:, :length]
