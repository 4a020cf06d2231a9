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

from mtp.model import unembed
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
    # sum min(p, q): probability that rejection sampling accepts the draft
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
        ValueError: chunk_rows does not divide the number of rows.
    """

    @jax.checkpoint
    def score(trunk: Array, drafts: Array, targets: Array) -> RowScores:
        with jax.named_scope("score_rows"):
            return _scores(unembed_trunk(trunk), unembed_drafts(drafts), targets)

    return _in_chunks(score, (trunk, drafts, jnp.roll(tokens, -1, axis=1)), chunk_rows)


def score_rows_within(
    trunk: Hidden,
    drafts: Float[Array, "B T k D"],
    tokens: Tokens,
    counted: Bool[Array, "B T"],
    table: Float[Array, "V D"],
    num_ids: int,
    chunk_rows: int,
) -> tuple[RowScores, Float32[Array, "B T"]]:
    """`score_rows` among few tokens only, which spares most of the drafts' unembedding: those to which the trunk gives
    most in these rows, and the text's own. Both laws are made to add up to 1 there, so that scores are near the exact
    ones as far as the laws lie inside; how much of the trunk's does comes back beside them.

    Args:
        counted: rows that have a say in which tokens are taken.
        table: the unembedding; no gradient flows into it.
        num_ids: tokens that are taken.

    Raises:
        ValueError: chunk_rows does not divide the number of rows, or num_ids is less than that, so that a token of the
            text might be left out, or more than the vocabulary.
    """
    batch, length = tokens.shape
    if not batch * length <= num_ids <= table.shape[0]:
        raise ValueError(
            f"{num_ids=} must be from the {batch * length} tokens of a batch, which all are among them, to the "
            f"vocabulary's {table.shape[0]}"
        )
    table, trunk = lax.stop_gradient((table, trunk))
    targets = jnp.roll(tokens, -1, axis=1)

    def add(mass: Array, chunk: tuple[Array, Array]) -> tuple[Array, Array]:
        rows, counted = chunk
        logits = unembed(table, rows)
        whole = jax.nn.logsumexp(logits, axis=-1)
        law = jnp.exp(logits - whole[:, None])
        return mass + jnp.sum(law * counted[:, None].astype(jnp.float32), axis=0), whole

    # the trunk's logits of the whole vocabulary are made here alone
    mass, whole = lax.scan(add, jnp.zeros(table.shape[:1], jnp.float32), _chunked((trunk, counted), chunk_rows))
    _, ids = lax.top_k(mass.at[targets.reshape(-1)].set(jnp.inf), num_ids)
    few = table[ids]
    place = jnp.zeros(table.shape[:1], jnp.int32).at[ids].set(jnp.arange(num_ids, dtype=jnp.int32))

    @jax.checkpoint
    def score(trunk: Array, drafts: Array, targets: Array, whole: Array) -> tuple[RowScores, Array]:
        with jax.named_scope("score_rows_within"):
            logits = unembed(few, trunk)
            inside = jnp.exp(jax.nn.logsumexp(logits, axis=-1) - whole)
            return _scores(logits, unembed(few, drafts), place[targets]), inside

    return _in_chunks(score, (trunk, drafts, targets, whole.reshape(batch, length)), chunk_rows)


def _scores(
    trunk_logits: Float32[Array, "rows V"], draft_logits: Float32[Array, "rows k V"], targets: Int32[Array, "rows"]
) -> RowScores:
    log_p = jax.nn.log_softmax(trunk_logits)
    log_q = jax.nn.log_softmax(draft_logits)
    teacher = lax.stop_gradient(log_p)[:, None]
    p = jnp.exp(teacher)
    return RowScores(
        trunk_nll=-_pick(log_p, targets),
        draft_nll=-_pick(log_q, jnp.broadcast_to(targets[:, None], log_q.shape[:2])),
        kl=jnp.sum(p * (teacher - log_q), axis=-1),
        overlap=jnp.sum(jnp.minimum(p, jnp.exp(log_q)), axis=-1),
        agree=jnp.argmax(teacher, axis=-1) == jnp.argmax(log_q, axis=-1),
    )


def _chunked[X](rows: X, chunk_rows: int) -> X:
    """[B, T, ...] to [chunks, chunk_rows, ...]."""
    batch, length = jax.tree.leaves(rows)[0].shape[:2]
    if batch * length % chunk_rows:
        raise ValueError(f"{chunk_rows=} must divide the batch's {batch * length} tokens")
    return jax.tree.map(lambda x: x.reshape(-1, chunk_rows, *x.shape[2:]), rows)


def _in_chunks[X](score: Callable[..., X], rows: tuple[Array, ...], chunk_rows: int) -> X:
    """`score` of so many rows at a time, put together again."""
    scores = lax.map(lambda chunk: score(*chunk), _chunked(rows, chunk_rows))
    return jax.tree.map(lambda x: x.reshape(*rows[0].shape[:2], *x.shape[2:]), scores)


def _pick(log_probs: Float32[Array, "... V"], ids: Int32[Array, "..."]) -> Float32[Array, "..."]:
    return jnp.take_along_axis(log_probs, ids[..., None], axis=-1)[..., 0]


def mean_valid(x: Shaped[Array, "B T *depths"], valid: Bool[Array, "B T *depths"]) -> Float32[Array, "*depths"]:
    """Mean over the valid rows of the batch; 0 where there are none."""
    total = jnp.sum(jnp.where(valid, x.astype(jnp.float32), 0.0), axis=(0, 1))
    return total / jnp.maximum(jnp.sum(valid, axis=(0, 1)), 1).astype(jnp.float32)


KINDS = ("ce", "kl", "tv", "lk", "e2e")


@dataclass(frozen=True)
class HeadLoss:
    """What a head is trained to minimise. Of depth d, with alpha_d = sum min(p, q) and K depths:

    - `ce`: -log q of the text's token;
    - `kl`: sum p (log p - log q);
    - `tv`: 1 - alpha_d, what rejection sampling loses; its gradient vanishes far from the target;
    - `lk`: lambda_d kl + (1 - lambda_d) tv with lambda_d = exp(-eta a_d), a_d the acceptance of late: KL while the head
      is bad, TV once it is good (LK losses);
    - `e2e`: 1 - mean over d of alpha_1 ... alpha_d, an anchor: the share of the drafts that a step would lose. Each
      depth weighs as much as it is reached.

    Raises:
        ValueError: naming the field that is out of range.
    """

    kind: str
    # of `lk`
    eta: float = 3.0
    # of `ce` beside the others
    likelihood_weight: float = 0.0
    # depth d weighs depth_decay ** (d - 1); not in `e2e`
    depth_decay: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"loss.kind={self.kind!r} must be one of {', '.join(KINDS)}")
        for name, low, high in (("eta", 0.0, 100.0), ("likelihood_weight", 0.0, 100.0), ("depth_decay", 0.0, 1.0)):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"loss.{name}={value} must be from {low:g} to {high:g}")

    def total(
        self, scores: RowScores, valid: Bool[Array, "B T k"], acceptance: Float32[Array, "k"]
    ) -> tuple[Float32[Array, ""], Float32[Array, ""]]:
        """The loss summed over what counts, and the weight of that: batches are joined by adding both.

        Args:
            scores: rows at their targets, as `score_rows` has them.
            valid: which of them count: anchor, chain and target in one document, the target not masked.
            acceptance: mean alpha_d of earlier steps, which `lk` weighs with; no gradient flows into it.
        """
        weights = self.depth_decay ** jnp.arange(valid.shape[-1], dtype=jnp.float32)
        weights = jnp.where(valid, weights[None, None, :], 0.0)
        # what does not count may be NaN, and so may its gradient
        safe = lambda x: jnp.where(valid, x, 0.0)  # noqa: E731
        tv = safe(1.0 - scores.overlap)
        if self.kind == "e2e":
            return self._end_to_end(scores, valid)
        each = {"ce": safe(scores.draft_nll), "kl": safe(scores.kl), "tv": tv}
        if self.kind == "lk":
            share = jnp.exp(-self.eta * lax.stop_gradient(acceptance))[None, None, :]
            each["lk"] = share * each["kl"] + (1.0 - share) * tv
        loss = each[self.kind]
        if self.kind != "ce":
            loss += self.likelihood_weight * each["ce"]
        return jnp.sum(weights * loss), jnp.sum(weights)

    def _end_to_end(
        self, scores: RowScores, valid: Bool[Array, "B T k"]
    ) -> tuple[Float32[Array, ""], Float32[Array, ""]]:
        """Over the anchors whose whole chain counts."""
        length, depths = valid.shape[1:]
        index = jnp.arange(length)[None, :]

        def at_anchor(x: Array) -> Array:
            """Back from the rows of the targets."""
            return jnp.stack([jnp.roll(x[..., d - 1], -d, axis=1) for d in range(1, depths + 1)], axis=-1)

        whole = jnp.all(at_anchor(valid), axis=-1) & (index + depths < length)
        alphas, nll = (at_anchor(jnp.where(valid, x, 0.0)) for x in (scores.overlap, scores.draft_nll))
        lost = 1.0 - jnp.mean(jnp.cumprod(alphas, axis=-1), axis=-1)
        loss = lost + self.likelihood_weight * jnp.mean(nll, axis=-1)
        return jnp.sum(jnp.where(whole, loss, 0.0)), jnp.sum(whole, dtype=jnp.float32)
