"""What a prediction is worth: likelihood of the text, distance from the trunk's own distribution, acceptance.

All predictions of one row (the trunk's, and that of each draft depth) are of the same next token. Their logits are the
largest thing in training, so rows go through in chunks, each computed again for the backward pass: memory is that of
one chunk, and nothing is approximated.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Shaped

from mtp.shapes import Array, Bool, Float, Float32, Hidden, Int32, Tokens


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowScores:
    """Scores of each row's predictions, in nats where they are logarithms. p is the trunk's distribution, the teacher
    without a gradient; q is the draft's."""

    # -log of the next token's probability
    trunk_nll: Float32[Array, "*rows"]
    draft_nll: Float32[Array, "*rows k"]
    # sum p (log p - log q)
    kl: Float32[Array, "*rows k"]
    # sum min(p, q): probability that rejection sampling accepts the draft; no gradient
    overlap: Float32[Array, "*rows k"]
    # argmax p = argmax q
    agree: Bool[Array, "*rows k"]


Unembed = Callable[[Float[Array, "... D"]], Float32[Array, "... V"]]


def score_rows(
    trunk: Hidden,
    drafts: Float[Array, "B T k D"],
    tokens: Tokens,
    unembed_trunk: Unembed,
    unembed_drafts: Unembed,
    chunk_rows: int,
) -> RowScores:
    """Scores every row against the token behind it (the last row against nothing of meaning).

    Args:
        trunk, drafts: hidden rows, aligned as `train.unroll.align` does.
        unembed_trunk, unembed_drafts: hidden rows to logits; two, so that either may be without a gradient.
        chunk_rows: rows whose logits exist at a time.

    Raises:
        ValueError: if chunk_rows does not divide the number of rows.
    """
    batch, length = tokens.shape
    if batch * length % chunk_rows:
        raise ValueError(f"{chunk_rows=} must divide the batch's {batch * length} tokens")

    @jax.checkpoint
    def score(trunk: Array, drafts: Array, targets: Array) -> RowScores:
        with jax.named_scope("score_rows"):
            log_p = jax.nn.log_softmax(unembed_trunk(trunk))  # [rows, V]
            log_q = jax.nn.log_softmax(unembed_drafts(drafts))  # [rows, k, V]
            teacher = lax.stop_gradient(log_p)[:, None]
            p = jnp.exp(teacher)
            return RowScores(
                trunk_nll=-_pick(log_p, targets),
                draft_nll=-_pick(log_q, jnp.broadcast_to(targets[:, None], log_q.shape[:2])),
                kl=jnp.sum(p * (teacher - log_q), axis=-1),
                overlap=jnp.sum(jnp.minimum(p, jnp.exp(lax.stop_gradient(log_q))), axis=-1),
                agree=jnp.argmax(teacher, axis=-1) == jnp.argmax(log_q, axis=-1),
            )

    rows = (trunk, drafts, jnp.roll(tokens, -1, axis=1))
    chunks = jax.tree.map(lambda x: x.reshape(-1, chunk_rows, *x.shape[2:]), rows)
    scores = lax.map(lambda chunk: score(*chunk), chunks)
    return jax.tree.map(lambda x: x.reshape(batch, length, *x.shape[2:]), scores)


def _pick(log_probs: Float32[Array, "... V"], ids: Int32[Array, "..."]) -> Float32[Array, "..."]:
    return jnp.take_along_axis(log_probs, ids[..., None], axis=-1)[..., 0]


def mean_valid(x: Shaped[Array, "B T *depths"], valid: Bool[Array, "B T *depths"]) -> Float32[Array, "*depths"]:
    """Mean over the valid rows of the batch; 0 where there are none."""
    total = jnp.sum(jnp.where(valid, x.astype(jnp.float32), 0.0), axis=(0, 1))
    return total / jnp.maximum(jnp.sum(valid, axis=(0, 1)), 1).astype(jnp.float32)
