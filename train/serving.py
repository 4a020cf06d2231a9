"""How many tokens a verify step would emit while serving, from one pass over text that the target itself wrote.

A *round* is one draft and verify step. Its anchor t is the last row whose next token is known; depth d = 1..k drafts
token t + d + 1, and x_d is the text's own. Under each mode of serving a round keeps exactly a drafts with a probability
that one pass over the text tells, and the next round begins at t + a + 1. So rounds are counted by pushing the mass of
visits through the text: nothing is sampled, and rounds that serving seldom begins count seldom.

Text of the target is what makes it exact: kept drafts follow min(p, q), not p, and weights such as min(1, q / p) mend
that only for text drawn from p, under the sampling that is served.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mtp.draft_head import MTPHead
from mtp.kernels.sampling import Sampling, process_logits
from mtp.model import Qwen35, forward_documents
from mtp.shapes import Array, Bool, Float32, Int32
from train.unroll import Packing, unroll

# Greedy text: `greedy`. Sampled text: a draft that is the head's best token, or drawn from its law and judged by one of
# the laws of `mtp.acceptance`.
SAMPLED_MODES = ("argmax", "rejection", "block", "coupled")
MODES = ("greedy", *SAMPLED_MODES)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Odds:
    """What serving would make of the drafts at each anchor, by depth: [T, k]. p and q are the laws after the sampling's
    transform; what would need text behind the end is of no meaning."""

    # of the text's own token at each depth: log p, and log q
    log_p: Float32[Array, "*rows"]
    log_q: Float32[Array, "*rows"]
    # whether it is the head's best, and what p gives to the head's best
    is_best: Bool[Array, "*rows"]
    p_of_best: Float32[Array, "*rows"]
    # sum min(p, q), and sum min(w p, q) with the weight w of `block` so far
    overlap: Float32[Array, "*rows"]
    block_overlap: Float32[Array, "*rows"]
    # chance that the draft picks the text's token with the noise that made the target pick it
    coupled: Float32[Array, "*rows"]
    # -log of what the head itself gives to the text's token, before any transform
    draft_nll: Float32[Array, "*rows"]


@partial(jax.jit, static_argnames=("num_depths", "chunk_rows"))
def read_odds(
    head: MTPHead,
    model: Qwen35,
    tokens: Int32[Array, "T"],
    documents: Int32[Array, "T"],
    sampling: Sampling,
    *,
    num_depths: int,
    chunk_rows: int,
) -> Odds:
    """The odds at every row of one text.

    Args:
        documents: 0 for the text and -1 for the padding behind it.
        sampling: of one lane, as the text was drawn with.
        chunk_rows: anchors whose laws exist at a time; it must divide T.

    Raises:
        ValueError: chunk_rows does not divide the length.
    """
    length = tokens.shape[0]
    if length % chunk_rows:
        raise ValueError(f"{chunk_rows=} must divide the length of {length}")
    packing = Packing.of(documents[None])
    hidden = forward_documents(model, tokens[None], packing.starts, packing.attend)
    drafts = jnp.stack(unroll(head, model, tokens[None], hidden, packing, num_depths))[:, 0]
    pad = ((0, num_depths + 1), (0, 0))
    trunk, following = jnp.pad(hidden[0], pad), jnp.pad(tokens, pad[:1])

    def chunk(start: Array) -> Odds:
        rows = lax.dynamic_slice_in_dim(trunk, start, chunk_rows + num_depths)
        log_p = process_logits(model.unembed(rows)[None], sampling)[0]
        targets = lax.dynamic_slice_in_dim(following, start, chunk_rows + num_depths + 1)
        found = []
        log_w = jnp.zeros((chunk_rows,), jnp.float32)
        for depth in range(1, num_depths + 1):
            own = lax.dynamic_slice_in_dim(drafts[depth - 1], start, chunk_rows)
            logits, place = head.logits(model, own), targets[depth + 1 :][:chunk_rows]
            log_q = process_logits(logits[None], sampling)[0]
            nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), place[:, None], axis=1)[:, 0]
            one, log_w = _judge(log_p[depth : depth + chunk_rows], log_q, place, nll, log_w)
            found.append(one)
        return jax.tree.map(lambda *columns: jnp.stack(columns, axis=-1), *found)

    chunks = lax.map(chunk, jnp.arange(0, length, chunk_rows, dtype=jnp.int32))
    return jax.tree.map(lambda x: x.reshape(length, num_depths), chunks)


def _judge(
    log_p: Float32[Array, "T V"],
    log_q: Float32[Array, "T V"],
    targets: Int32[Array, "T"],
    draft_nll: Float32[Array, "T"],
    log_w: Float32[Array, "T"],
) -> tuple[Odds, Float32[Array, "T"]]:
    """One depth of `Odds`, fields [T], and `block`'s weight behind it."""
    p_x, q_x = (jnp.take_along_axis(x, targets[:, None], axis=1)[:, 0] for x in (log_p, log_q))
    best = jnp.argmax(log_q, axis=1)
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    impossible = (p_x == -jnp.inf) | (q_x == -jnp.inf)
    # the chance that both pick x is 1 / sum max(p / p_x, q / q_x)
    safe = lambda x: jnp.where(impossible, 0.0, x)[:, None]  # noqa: E731
    both = jnp.exp(-jax.nn.logsumexp(jnp.maximum(log_p - safe(p_x), log_q - safe(q_x)), axis=1))
    odds = Odds(
        log_p=p_x,
        log_q=q_x,
        is_best=best == targets,
        p_of_best=jnp.exp(jnp.take_along_axis(log_p, best[:, None], axis=1)[:, 0]),
        overlap=jnp.sum(jnp.minimum(p, q), axis=1),
        block_overlap=jnp.sum(jnp.minimum(jnp.exp(log_w)[:, None] * p, q), axis=1),
        coupled=jnp.where(impossible, 0.0, both / jnp.exp(p_x)),
        draft_nll=draft_nll,
    )
    ratio = jnp.where(p_x == -jnp.inf, -jnp.inf, p_x - q_x)
    return odds, jnp.minimum(log_w + ratio, 0.0)


@dataclass(frozen=True)
class Rounds:
    """What one text says of one mode of serving."""

    # of the reply, its first aside: that comes with the prompt
    num_tokens: int
    # expected
    num_rounds: float
    # by depth, over all anchors of the reply: sum of the chances that so many drafts stand, and anchors
    stands: tuple[float, ...]
    num_anchors: tuple[int, ...]
    # by depth: sum of the head's -log of the text's token
    draft_nll: tuple[float, ...]


def replay(odds: Odds, mode: str, prompt_tokens: int, reply_tokens: int) -> Rounds:
    """Expected rounds of one reply, and how its drafts would stand.

    Args:
        odds: numpy arrays of `read_odds` over prompt and reply.
        mode: one of `MODES`; `greedy` for text that is the target's own best at each place.

    Raises:
        ValueError: unknown mode.
    """
    if mode not in MODES:
        raise ValueError(f"{mode=} must be one of {', '.join(MODES)}")
    first, depths = prompt_tokens - 1, odds.log_p.shape[1]
    # anchors of the reply, and the tokens that are still to come at each
    left = np.arange(reply_tokens - 1, 0, -1)
    here = slice(first, first + len(left))
    columns = {one.name: np.asarray(getattr(odds, one.name), np.float64)[here] for one in fields(odds)}
    nll = columns.pop("draft_nll")
    reached, exactly = _chances(mode, **columns)
    # a round that emits all that is left is the last
    exactly = np.where(np.arange(1, depths + 2) < left[:, None], exactly, 0.0)
    visits = np.zeros(len(left) + depths + 1)
    visits[:1] = min(len(left), 1)
    for place in range(len(left)):
        visits[place + 1 : place + depths + 2] += visits[place] * exactly[place]
    whole = [left >= depth for depth in range(1, depths + 1)]
    return Rounds(
        num_tokens=len(left),
        num_rounds=float(visits[: len(left)].sum()),
        stands=tuple(float(reached[inside, depth].sum()) for depth, inside in enumerate(whole)),
        num_anchors=tuple(int(inside.sum()) for inside in whole),
        draft_nll=tuple(float(nll[inside, depth].sum()) for depth, inside in enumerate(whole)),
    )


def _chances(
    mode: str,
    *,
    log_p: np.ndarray,
    log_q: np.ndarray,
    is_best: np.ndarray,
    p_of_best: np.ndarray,
    overlap: np.ndarray,
    block_overlap: np.ndarray,
    coupled: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """At each anchor: that at least d drafts stand, [T, k], the d-th whatever it is; and that exactly a do and the text
    follows, [T, k + 1]."""
    one = np.ones((len(log_p), 1))
    # a token that either law excludes is not kept as a draft
    possible = np.isfinite(log_p) & np.isfinite(log_q)
    ratio = np.exp(np.where(possible, log_q, -np.inf) - np.where(possible, log_p, 0.0))
    if mode == "block":
        # q / p of the drafts so far, and the law's weight behind them
        drafted = np.cumprod(np.hstack([one, ratio]), axis=1)
        weight = np.ones_like(drafted)
        for depth in range(ratio.shape[1]):
            shrunk = weight[:, depth] / np.where(possible[:, depth], ratio[:, depth], 1.0)
            weight[:, depth + 1] = np.minimum(1.0, shrunk)
        ends = drafted[:, :-1] * np.maximum(weight[:, :-1] - ratio, 0.0)
        return drafted[:, :-1] * block_overlap, np.hstack([ends, drafted[:, -1:] * weight[:, -1:]])
    keeps, summed = {
        "greedy": (is_best, is_best),
        "argmax": (is_best, p_of_best),
        "rejection": (np.minimum(1.0, ratio), overlap),
        "coupled": (coupled, coupled),
    }[mode]
    so_far = np.cumprod(np.hstack([one, keeps]), axis=1)
    return so_far[:, :-1] * summed, so_far * np.hstack([1.0 - keeps, one])


def serving_length(rounds: Sequence[Rounds]) -> float:
    """Tokens a round, over all texts together."""
    return sum(one.num_tokens for one in rounds) / sum(one.num_rounds for one in rounds)


def interval(
    rounds: Sequence[Rounds], *, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Bootstrap interval of `serving_length`, texts drawn anew with replacement."""
    tokens, counts = (np.array([getattr(one, name) for one in rounds]) for name in ("num_tokens", "num_rounds"))
    drawn = np.random.default_rng(seed).integers(0, len(rounds), (resamples, len(rounds)))
    lengths = tokens[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    low, high = np.quantile(lengths, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def mean_nll(rounds: Sequence[Rounds]) -> tuple[float, ...]:
    """By depth: nats of the text's token under the head."""
    return _mean([one.draft_nll for one in rounds], rounds)


def standing(rounds: Sequence[Rounds]) -> tuple[float, ...]:
    """By depth: the share of all anchors at which so many drafts would stand."""
    return _mean([one.stands for one in rounds], rounds)


def _mean(sums: Sequence[tuple[float, ...]], rounds: Sequence[Rounds]) -> tuple[float, ...]:
    anchors = np.sum([one.num_anchors for one in rounds], axis=0)
    return tuple((np.sum(sums, axis=0) / np.maximum(anchors, 1)).tolist())


def padded(token_ids: Sequence[int], length: int) -> tuple[Int32[Array, "T"], Int32[Array, "T"]]:
    """A text and its padding as `read_odds` takes them."""
    tokens, documents = np.zeros((length,), np.int32), np.full((length,), -1, np.int32)
    tokens[: len(token_ids)], documents[: len(token_ids)] = token_ids, 0
    return jnp.asarray(tokens), jnp.asarray(documents)
