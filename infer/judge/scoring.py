"""The judge's own programs: what the stock model says about tokens that somebody else has chosen.

`judge_chunk` reads tokens by teacher forcing and compares each with the law it should have been drawn from;
`read_windows` reads texts as generation does, in windows that are cut short on purpose. Both take the cache and give
it back.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from infer import speculative
from infer.decode import HONEST, Generation, Request, Verbs
from mtp import cache as kv
from mtp.draft_head import MTPHead, draft_rows, prefill
from mtp.kernels.sampling import Sampling, process_logits
from mtp.model import Qwen35
from mtp.shapes import Array, Bool, Float, Float32, Int32, PerLane, Tokens

# Rows whose logits are in memory at once, a lane.
BLOCK = 16


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenScores:
    """What the target says of each token: under its own law (raw), and under the law of sampling.

    Where the law of sampling gives a token no chance at all, which only rounding can excuse, its log-probability is
    taken to be that of the least probable token with a chance, and it lies behind all of them (`below` 1, `mass` 0).
    """

    # raw, nats
    log_prob: Float32[Array, "B T"]
    # the target's first choice is another token
    not_first: Bool[Array, "B T"]
    # log-probability less its mean under the law, and its variance there
    excess: Float32[Array, "B T"]
    variance: Float32[Array, "B T"]
    # whether it is the first choice less the chance of that, and the variance
    first_excess: Float32[Array, "B T"]
    first_variance: Float32[Array, "B T"]
    # probability of all tokens more probable (at equal probability, of a smaller id), and of the token itself
    below: Float32[Array, "B T"]
    mass: Float32[Array, "B T"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftScores:
    """Whether each token is one that the head would draft too often, less the chance of that, and the variance.

    The head's law is that of a window that starts at the token. A draft that stands is any token, one that follows a
    rejection never is of this kind, so the sum shows what acceptance does to the law.
    """

    excess: Float32[Array, "B T"]
    variance: Float32[Array, "B T"]


@partial(jax.jit, donate_argnames="cache")
def judge_chunk(
    model: Qwen35, cache: kv.Cache, tokens: Tokens, num_tokens: PerLane, targets: Tokens, sampling: Sampling
) -> tuple[TokenScores, kv.Cache]:
    """Scores `targets`, the token behind each row of a chunk, and the cache after the chunk.

    Logits are made for `BLOCK` rows at a time, which must divide the chunk.
    """
    hidden, cache = prefill(model, None, cache, tokens, num_tokens)
    return _by_blocks(lambda rows, own: score_tokens(model.unembed(rows), own, sampling), hidden, targets), cache


@partial(jax.jit, donate_argnames="cache")
def judge_drafts(
    model: Qwen35,
    head: MTPHead,
    cache: kv.Cache,
    tokens: Tokens,
    num_tokens: PerLane,
    targets: Tokens,
    sampling: Sampling,
) -> tuple[DraftScores, kv.Cache]:
    """Compares `targets`, the token behind each row of a chunk, with what the head would have drafted, and the cache
    after the chunk. The first row of a chunk, whose draft comes from the row before, is left at 0."""
    hidden, after = prefill(model, head, cache, tokens, num_tokens)
    drafting, _ = draft_rows(head, model, after, targets, hidden, cache.lengths + 1, num_tokens)
    drafting = jnp.pad(drafting[:, :-1], ((0, 0), (1, 0), (0, 0)))

    def compare(rows: Array, drafting: Array, own: Array) -> DraftScores:
        law, draft_law = (process_logits(model.unembed(x), sampling) for x in (rows, drafting))
        often = draft_law > law
        chance = jnp.sum(jnp.where(often, jnp.exp(law), 0.0), axis=-1)
        is_one = jnp.take_along_axis(often, own[:, :, None], axis=-1)[:, :, 0]
        return DraftScores(is_one.astype(jnp.float32) - chance, chance * (1.0 - chance))

    scores = _by_blocks(compare, hidden, drafting, targets)
    return jax.tree.map(lambda x: x.at[:, 0].set(0.0), scores), after


def _by_blocks[S](score: Callable[..., S], *rows: Array) -> S:
    """Scores [B, T] of rows, a few at a time."""
    lanes, size = rows[0].shape[:2]

    def blocks(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(lanes, size // BLOCK, BLOCK, *x.shape[2:]), 1, 0)

    scores = lax.map(lambda block: score(*block), tuple(blocks(x) for x in rows))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(lanes, size), scores)


def score_tokens(logits: Float[Array, "B T V"], tokens: Tokens, sampling: Sampling) -> TokenScores:
    """`TokenScores` of one token a row, from raw logits."""
    law = process_logits(logits, sampling)
    chance = jnp.exp(law)
    own = _pick(law, tokens)
    floor = jnp.min(jnp.where(law > -jnp.inf, law, jnp.inf), axis=-1)
    finite = jnp.where(chance > 0, law, 0.0)
    mean = jnp.sum(chance * finite, axis=-1)
    first = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    first_chance = _pick(chance, first)
    token_id = lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    ahead = (law > own[:, :, None]) | ((law == own[:, :, None]) & (token_id < tokens[:, :, None]))
    return TokenScores(
        log_prob=_pick(logits, tokens) - jax.nn.logsumexp(logits, axis=-1),
        not_first=tokens != first,
        excess=jnp.maximum(own, floor) - mean,
        variance=jnp.sum(chance * (finite - mean[:, :, None]) ** 2, axis=-1),
        first_excess=(tokens == first).astype(jnp.float32) - first_chance,
        first_variance=first_chance * (1.0 - first_chance),
        below=jnp.sum(jnp.where(ahead, chance, 0.0), axis=-1),
        mass=jnp.exp(own),
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Windows:
    """Verify steps of all lanes whose drafts and outcome are decided beforehand."""

    drafts: Int32[Array, "windows B k"]
    # drafts of each lane
    num_drafts: Int32[Array, "windows B"]
    # the text's own token behind each row
    targets: Int32[Array, "windows B R"]
    # rows that are kept: 0 for a lane whose text has ended, else 1..k + 1
    num_committed: Int32[Array, "windows B"]


@partial(jax.jit, static_argnames="verbs", donate_argnames="gen")
def read_windows(
    model: Qwen35, gen: Generation, request: Request, windows: Windows, *, verbs: Verbs = HONEST
) -> tuple[Float32[Array, "windows B R"], Generation]:
    """Runs all windows, one after the other, through the candidate's own verify and commit.

    Returns the log-probabilities of the targets and the generation behind what was kept.
    """

    def step(gen: Generation, window: Windows) -> tuple[Generation, Array]:
        lanes, num_draft_tokens = window.drafts.shape
        laws = jnp.zeros((lanes, num_draft_tokens, model.config.vocab_size), jnp.float32)
        proposal = speculative.Proposal(window.drafts, laws, window.num_drafts)
        seen, cache = speculative.verify(model, gen, gen.cache, request, proposal, verbs=verbs)
        found = _pick(seen.logits, window.targets) - jax.nn.logsumexp(seen.logits, axis=-1)
        return replace(gen, cache=verbs.commit(cache, seen.hidden, window.targets, window.num_committed)), found

    gen, found = lax.scan(step, gen, windows)
    return found, gen


def _pick(values: Float32[Array, "B T V"], tokens: Tokens) -> Float32[Array, "B T"]:
    return jnp.take_along_axis(values, tokens[:, :, None], axis=-1)[:, :, 0]
