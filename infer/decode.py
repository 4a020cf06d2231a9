"""Plain decoding, the oracle: one token a step, and the bookkeeping of replies that speculation shares.

`Request` says what each lane is asked for, `Generation` is everything that changes while it is answered. A step samples
some tokens, `emit` cuts them where the reply ends, and only what is left is committed: nothing behind an end is kept.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from mtp import cache as kv
from mtp.draft_head import MTPHead, write_recent
from mtp.kernels.sampling import Sampling, forbid_tokens, process_logits, sample, target_noise
from mtp.model import Qwen35, forward
from mtp.shapes import Array, Float, Int32, LaneMask, Logits, PerLane, Tokens

# what `Generation.status` says of a lane
IDLE, RUNNING, STOPPED, FULL = range(4)


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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Generation:
    """The lanes' replies so far, and the cache behind them."""

    cache: kv.Cache
    # IDLE, RUNNING, STOPPED (a stop token, which is the reply's last) or FULL (max_tokens)
    status: PerLane
    # the reply; what lies behind `num_tokens` is unspecified
    tokens: Int32[Array, "B O"]
    num_tokens: PerLane
    # verify steps: the passes of the target that emitted tokens, the prefill not among them
    num_steps: PerLane
    # by position: steps that drafted it, and steps that emitted it as accepted
    drafted: Int32[Array, "B k"]
    accepted: Int32[Array, "B k"]

    @property
    def live(self) -> LaneMask:
        """Lanes whose reply goes on."""
        return self.status == RUNNING


def begin(cache: kv.Cache, max_reply: int) -> Generation:
    """All lanes idle around this cache; replies of up to `max_reply` tokens."""
    lanes, rows = cache.recent_tokens.shape
    counts = jnp.zeros((lanes,), jnp.int32)
    by_position = jnp.zeros((lanes, rows - 1), jnp.int32)
    tokens = jnp.zeros((lanes, max_reply), jnp.int32)
    return Generation(cache, counts + IDLE, tokens, counts, counts, by_position, by_position)


def choose_log_probs(model: Qwen35, hidden: Float[Array, "B T D"], request: Request, produced: PerLane) -> Logits:
    """The law each row's token is drawn from; row t chooses reply token number `produced + t`."""
    logits = model.unembed(hidden)
    number = produced[:, None] + jnp.arange(hidden.shape[1], dtype=jnp.int32)[None, :]
    logits = forbid_tokens(logits, request.stop_ids, number < request.min_tokens[:, None])
    return process_logits(logits, request.sampling)


def first_token(
    model: Qwen35, gen: Generation, request: Request, hidden: Float[Array, "B T D"], rows: PerLane, lanes: LaneMask
) -> Generation:
    """Starts the replies of `lanes` after their prefill: the token behind the prompt, chosen from hidden row `rows`."""
    hidden = jnp.take_along_axis(hidden, rows[:, None, None], axis=1)
    fresh = jnp.where(lanes, 0, gen.num_tokens)
    log_probs = choose_log_probs(model, hidden, request, fresh)
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
    gen, _ = emit(gen, request, tokens, lanes.astype(jnp.int32))
    return replace(gen, cache=kv.set_last_token(gen.cache, tokens[:, 0], lanes))


def emit(gen: Generation, request: Request, tokens: Tokens, count: PerLane) -> tuple[Generation, PerLane]:
    """Appends the first `count` tokens of each lane to its reply, up to where the reply ends.

    Returns the generation and how many tokens were kept.
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
    gen = replace(
        gen,
        tokens=gen.tokens.at[lane, place].set(tokens, mode="drop"),
        num_tokens=total,
        status=jnp.where(count > 0, ended, gen.status),
    )
    return gen, kept


def plain_step(model: Qwen35, head: MTPHead | None, gen: Generation, request: Request) -> Generation:
    """One token for every live lane. The head, if there is one, is kept primed: it may be asked to draft later."""
    live = gen.live
    cache = gen.cache if head is None else write_recent(head, model, gen.cache, live)
    hidden, cache = forward(model, cache, cache.last_token[:, None], live.astype(jnp.int32), keep=False)
    log_probs = choose_log_probs(model, hidden, request, gen.num_tokens)
    noise = target_noise(request.sampling, cache.lengths[:, None] + 1, log_probs.shape[-1])
    tokens = sample(log_probs, noise)
    gen, kept = emit(gen, request, tokens, live.astype(jnp.int32))
    return replace(gen, cache=kv.commit(cache, hidden, tokens, kept), num_steps=gen.num_steps + live.astype(jnp.int32))
