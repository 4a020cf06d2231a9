"""Plain decoding, the oracle: one token a step, and the bookkeeping of replies that speculation shares.

`Request` says what each lane is asked for, `Generation` is everything that changes while it is answered. A step samples
some tokens, `emit` cuts them where the reply ends, and only what is left is committed: nothing behind an end is kept.
A lane whose logits are not finite, or leave it no token to choose, fails alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mtp import cache as kv
from mtp.acceptance import accept
from mtp.draft_head import MTPHead, write_recent
from mtp.kernels.sampling import (
    History,
    Sampling,
    adjust_logits,
    forbid_tokens,
    process_logits,
    remember,
    sample,
    target_noise,
)
from mtp.model import Qwen35, forward
from mtp.shapes import Array, Bool, Float, Float32, Int32, LaneMask, Logits, PerLane, Tokens

# what `Generation.status` says of a lane
IDLE, RUNNING, STOPPED, FULL, FAILED = range(5)


@dataclass(frozen=True)
class Verbs:
    """The parts of a step that losslessness hangs on. The judge's negative controls put wrong ones in their place."""

    process: Callable[..., Any] = process_logits
    accept: Callable[..., Any] = accept
    commit: Callable[..., Any] = kv.commit


HONEST = Verbs()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Request:
    """What each lane is asked for; constant while it is answered."""

    sampling: Sampling
    # tokens that end a reply, padded with -1
    stop_ids: Int32[Array, "B S"]
    # stop tokens can't be chosen before so many tokens
    min_tokens: PerLane
    # the reply ends at so many tokens; the lane's pages must hold prompt and reply
    max_tokens: PerLane
    # k of each lane, 0..k of the program
    num_draft_tokens: PerLane
    # of each emitted token: -1 none, 0 its own log-probability, n also the n best
    log_probs: PerLane
    # automata of allowed tokens, of all lanes together (see `mtp.kernels.sampling.adjust_logits`)
    mask_table: Int32[Array, "S V"] | None = None
    # for measuring speed with weights that can't accept: the chance that a draft stands, whatever it is
    synthetic_acceptance: Float32[Array, ""] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Emitted:
    """What one step emitted."""

    tokens: Int32[Array, "B R"]
    # the first so many stand; 0 for a lane that is not live
    count: PerLane
    num_drafted: PerLane
    # drafts that were accepted and emitted
    num_accepted: PerLane
    # log-probability of each token under the target's own law (raw logits); NaN where nobody asks
    log_probs: Float32[Array, "B R"]
    # the best tokens there and theirs
    top_tokens: Int32[Array, "B R n"]
    top_log_probs: Float32[Array, "B R n"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Generation:
    """The lanes' replies so far, and the cache behind them."""

    cache: kv.Cache
    # IDLE, RUNNING, STOPPED (a stop token, which is the reply's last), FULL (max_tokens) or FAILED (no law)
    status: PerLane
    # the reply; what lies behind `num_tokens` is unspecified
    tokens: Int32[Array, "B O"]
    num_tokens: PerLane
    # verify steps: the passes of the target that emitted tokens, the prefill not among them
    num_steps: PerLane
    # by position: steps that drafted it, and steps that emitted it as accepted
    drafted: Int32[Array, "B k"]
    accepted: Int32[Array, "B k"]
    # of the last step
    emitted: Emitted
    # None where no lane asks for penalties or masks
    history: History | None = None

    @property
    def live(self) -> LaneMask:
        """Lanes whose reply goes on."""
        return self.status == RUNNING


def begin(cache: kv.Cache, max_reply: int, *, history: History | None = None, top: int = 0) -> Generation:
    """All lanes idle around this cache; replies of up to `max_reply` tokens, log-probabilities of up to `top` a token.

    With `max_reply` 0 the replies themselves are not kept, only what each step emits.
    """
    lanes, rows = cache.recent_tokens.shape
    counts = jnp.zeros((lanes,), jnp.int32)
    by_position = jnp.zeros((lanes, rows - 1), jnp.int32)
    tokens = jnp.zeros((lanes, max_reply), jnp.int32)
    emitted = Emitted(
        tokens=jnp.zeros((lanes, rows), jnp.int32),
        count=counts,
        num_drafted=counts,
        num_accepted=counts,
        log_probs=jnp.full((lanes, rows), jnp.nan, jnp.float32),
        top_tokens=jnp.zeros((lanes, rows, top), jnp.int32),
        top_log_probs=jnp.zeros((lanes, rows, top), jnp.float32),
    )
    return Generation(cache, counts + IDLE, tokens, counts, counts, by_position, by_position, emitted, history)


def law_of_rows(
    logits: Logits,
    gen: Generation,
    request: Request,
    first: PerLane,
    before: Int32[Array, "B T J"],
    verbs: Verbs = HONEST,
) -> tuple[Logits, Bool[Array, "B T"]]:
    """The law that each row's token is drawn from, the same for plain, drafted, verified, recovered and bonus tokens.

    Args:
        logits: raw; row t chooses reply token number `first + t`.
        before: the window's tokens between the lane's last token and each row; -1 is none.

    Returns:
        Log-probabilities, and which rows are sound: finite, with a token that is not forbidden. The law of another row
        means nothing.
    """
    if gen.history is not None:
        logits = adjust_logits(logits, request.sampling, gen.history, request.mask_table, before)
    number = first[:, None] + jnp.arange(logits.shape[1], dtype=jnp.int32)[None, :]
    logits = forbid_tokens(logits, request.stop_ids, number < request.min_tokens[:, None])
    allowed = logits if request.sampling.bias is None else logits + request.sampling.bias[:, None, :]
    # a maximum is not sure to be NaN where one of many numbers is
    sound = jnp.isfinite(jnp.max(allowed, axis=-1)) & ~jnp.any(jnp.isnan(allowed), axis=-1)
    with jax.named_scope("law"):
        return verbs.process(logits, request.sampling), sound


def not_before(lanes: int, rows: int) -> Int32[Array, "B T J"]:
    """`before` of rows that directly follow the lane's last token."""
    return jnp.zeros((lanes, rows, 0), jnp.int32)


def fail(gen: Generation, lanes: LaneMask) -> Generation:
    """These lanes fail: they emit and commit nothing more."""
    return replace(gen, status=jnp.where(lanes, FAILED, gen.status))


def note_log_probs(emitted: Emitted, request: Request, logits: Logits) -> Emitted:
    """Fills in the log-probabilities that lanes ask for, from the raw logits that the tokens were chosen from."""
    rows, (all_rows, top) = logits.shape[1], emitted.top_tokens.shape[1:]

    def noted() -> tuple[Array, Array, Array]:
        norm = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, emitted.tokens[:, :rows, None], axis=-1)[:, :, 0]
        # rows of the embedding that have no text are forbidden to every lane, and not worth a mention
        bias = request.sampling.bias
        shown = logits if bias is None else jnp.where(jnp.isneginf(bias)[:, None, :], -jnp.inf, logits)
        values, tokens = lax.top_k(shown, top) if top else nobody[1:]
        return chosen - norm, values - norm[:, :, None], tokens.astype(jnp.int32)

    nobody = (
        jnp.full(logits.shape[:2], jnp.nan, jnp.float32),
        jnp.zeros((*logits.shape[:2], top), jnp.float32),
        jnp.zeros((*logits.shape[:2], top), jnp.int32),
    )
    log_probs, values, tokens = lax.cond(jnp.any(request.log_probs >= 0), noted, lambda: nobody)
    pad = ((0, 0), (0, all_rows - rows))
    return replace(
        emitted,
        log_probs=jnp.pad(log_probs, pad),
        top_tokens=jnp.pad(tokens, (*pad, (0, 0))),
        top_log_probs=jnp.pad(values, (*pad, (0, 0))),
    )


def first_token(
    model: Qwen35,
    gen: Generation,
    request: Request,
    hidden: Float[Array, "B T D"],
    rows: PerLane,
    lanes: LaneMask,
    *,
    verbs: Verbs = HONEST,
) -> Generation:
    """Starts the replies of `lanes` after their prefill: the token behind the prompt, chosen from hidden row `rows`."""
    hidden = jnp.take_along_axis(hidden, rows[:, None, None], axis=1)
    fresh = jnp.where(lanes, 0, gen.num_tokens)
    logits = model.unembed(hidden)
    log_probs, sound = law_of_rows(logits, gen, request, fresh, not_before(lanes.shape[0], 1), verbs)
    noise = target_noise(request.sampling, gen.cache.lengths[:, None], log_probs.shape[-1])
    tokens = sample(log_probs, noise)
    zero = jnp.where(lanes[:, None], 0, 1)
    gen = replace(
        gen,
        status=jnp.where(lanes, RUNNING, gen.status),
        num_tokens=fresh,
        num_steps=jnp.where(lanes, 0, gen.num_steps),
        drafted=gen.drafted * zero,
        accepted=gen.accepted * zero,
    )
    gen = fail(gen, lanes & ~sound[:, 0])
    started = lanes & gen.live
    gen, _ = emit(gen, request, tokens, started.astype(jnp.int32), logits)
    return replace(gen, cache=kv.set_last_token(gen.cache, tokens[:, 0], started))


def emit(
    gen: Generation,
    request: Request,
    tokens: Tokens,
    count: PerLane,
    logits: Logits,
    num_drafted: PerLane | None = None,
    num_accepted: PerLane | None = None,
) -> tuple[Generation, PerLane]:
    """Appends the first `count` tokens of each lane to its reply, up to where the reply ends.

    Args:
        logits: raw, of the rows that chose the tokens.
        num_drafted, num_accepted: of this step; none where it drafts nothing.

    Returns:
        The generation, and how many tokens were kept.
    """
    row = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    stops = jnp.any(tokens[:, :, None] == request.stop_ids[:, None, :], axis=-1) & (row < count[:, None])
    first_stop = jnp.min(jnp.where(stops, row, tokens.shape[1]), axis=1)
    room = request.max_tokens - gen.num_tokens
    kept = jnp.minimum(jnp.minimum(count, first_stop + 1), room)
    total = gen.num_tokens + kept
    ended = jnp.where(first_stop < kept, STOPPED, jnp.where(total >= request.max_tokens, FULL, gen.status))

    lane = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
    place = jnp.where(row < kept[:, None], gen.num_tokens[:, None] + row, gen.tokens.shape[1])
    none = jnp.zeros_like(kept)
    emitted = replace(
        gen.emitted,
        tokens=jnp.pad(tokens, ((0, 0), (0, gen.emitted.tokens.shape[1] - tokens.shape[1]))),
        count=kept,
        num_drafted=none if num_drafted is None else num_drafted,
        num_accepted=none if num_accepted is None else jnp.minimum(num_accepted, kept),
    )
    gen = replace(
        gen,
        tokens=gen.tokens.at[lane, place].set(tokens, mode="drop"),
        num_tokens=total,
        status=jnp.where(count > 0, ended, gen.status),
        emitted=note_log_probs(emitted, request, logits),
    )
    if gen.history is not None:
        gen = replace(gen, history=remember(gen.history, request.mask_table, tokens, kept))
    return gen, kept


def plain_step(
    model: Qwen35, head: MTPHead | None, gen: Generation, request: Request, *, verbs: Verbs = HONEST
) -> Generation:
    """One token for every live lane. The head, if there is one, is kept primed: it may be asked to draft later."""
    live = gen.live
    cache = gen.cache if head is None else write_recent(head, model, gen.cache, live)
    hidden, cache = forward(model, cache, cache.last_token[:, None], live.astype(jnp.int32), keep=False)
    logits = model.unembed(hidden)
    log_probs, sound = law_of_rows(logits, gen, request, gen.num_tokens, not_before(live.shape[0], 1), verbs)
    noise = target_noise(request.sampling, cache.lengths[:, None] + 1, log_probs.shape[-1])
    tokens = sample(log_probs, noise)
    gen = fail(gen, live & ~sound[:, 0])
    gen, kept = emit(gen, request, tokens, gen.live.astype(jnp.int32), logits)
    return replace(
        gen, cache=verbs.commit(cache, hidden, tokens, kept), num_steps=gen.num_steps + live.astype(jnp.int32)
    )
