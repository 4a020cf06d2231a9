"""From logits to tokens: one transform of logits into log-probabilities, counter noise, the Gumbel pick.

Plain, drafted, verified, recovered and bonus tokens all pass through `process_logits`, and every random
number is a function of (seed, sample index, stream, position, offset) alone: not of the lane, the batch,
the window's width or the vocabulary's padding. This is the jnp reference; nothing here sorts.
"""

from dataclasses import dataclass
from typing import Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from mtp.shapes import Array, Bool, Float32, Int32, LaneMask, Logits, PerLane, Tokens, UInt32

# Streams share no key. TARGET is counted by the position of the token being chosen; the others by the
# window's first row and the offset in the window, because under `block` a coin that one window has looked at
# would bias the next.
# SYNTHETIC decides measurements with weights that can't accept.
TARGET, DRAFT, ACCEPT, RECOVER, SYNTHETIC = range(5)
NUM_STREAMS = 5
# The largest top-k that is found without passes over the whole vocabulary, and how rows are cut up for it.
CANDIDATES = 64
CHUNKS = (128, 16)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampling:
    """How each lane chooses its tokens.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1, `min_p` 0 and penalties of 0 (`repetition_penalty`: 1) are
    off; `bias` is added to the raw logits, -inf forbids a token, and at least one token of each row must stay
    allowed.
    """

    temperature: Float32[Array, "B"]
    top_k: PerLane
    top_p: Float32[Array, "B"]
    min_p: Float32[Array, "B"]
    seed: UInt32[Array, "B"]
    sample_index: UInt32[Array, "B"]  # which of the replies drawn with this seed
    presence_penalty: Float32[Array, "B"]
    frequency_penalty: Float32[Array, "B"]
    repetition_penalty: Float32[Array, "B"]
    bias: Float32[Array, "B V"] | None = None

    @classmethod
    def alike(
        cls,
        num_lanes: int,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        sample_index: int = 0,
    ) -> Self:
        """The same settings and the same seed for every lane, without a bias."""

        def lanes(value: float, dtype: DTypeLike) -> Array:
            return jnp.full((num_lanes,), value, dtype)

        return cls(
            temperature=lanes(temperature, jnp.float32),
            top_k=lanes(top_k, jnp.int32),
            top_p=lanes(top_p, jnp.float32),
            min_p=lanes(min_p, jnp.float32),
            seed=lanes(seed, jnp.uint32),
            sample_index=lanes(sample_index, jnp.uint32),
            presence_penalty=lanes(0.0, jnp.float32),
            frequency_penalty=lanes(0.0, jnp.float32),
            repetition_penalty=lanes(1.0, jnp.float32),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class History:
    """What penalties and token masks look back on, up to each lane's last token."""

    prompt: Bool[Array, "B V"]  # tokens that occur in the prompt
    counts: Int32[Array, "B V"]  # how often each occurs in the reply
    mask_state: PerLane  # row of the mask table that the next token has to obey; row 0 allows everything


def remember(history: History, mask_table: Int32[Array, "S V"] | None, tokens: Tokens, count: PerLane) -> History:
    """The history after the first `count` of these tokens of each lane."""
    row = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    lane = jnp.broadcast_to(jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None], tokens.shape)
    kept = row < count[:, None]
    counts = history.counts.at[lane, jnp.where(kept, tokens, history.counts.shape[1])].add(1, mode="drop")
    state = history.mask_state
    if mask_table is not None:
        state = _mask_states(mask_table, state, jnp.where(kept, tokens, -1))
    return History(history.prompt, counts, state)


def _mask_states(mask_table: Int32[Array, "S V"], state: PerLane, tokens: Tokens) -> PerLane:
    """The automaton's state after these tokens; -1 is none. A forbidden token, which nobody draws, leaves it."""
    for t in range(tokens.shape[1]):
        token = tokens[:, t]
        following = mask_table[state, jnp.maximum(token, 0)]
        state = jnp.where((token < 0) | (following < 0), state, following)
    return state


def adjust_logits(
    logits: Logits,
    sampling: Sampling,
    history: History,
    mask_table: Int32[Array, "S V"] | None,
    before: Int32[Array, "B T J"],
) -> Logits:
    """Logits after penalties and token masks, the first part of the transform that `process_logits` goes on with.

    The repetition penalty divides positive logits of tokens in prompt or reply and multiplies negative ones (Keskar et
    al. 2019); frequency and presence penalties are subtracted for tokens in the reply, once an occurrence and once in
    all. Lanes that ask for nothing cost nothing.

    Args:
      history: up to the lane's last token.
      mask_table: the state after (state, token), -1 where the token is forbidden; row 0 is all zeros. None: no masks.
      before: the window's tokens between the last token and each row, in order; -1 is none.
    """
    vocab_size = logits.shape[-1]

    def penalise(logits: Logits) -> Logits:
        column = jnp.arange(vocab_size, dtype=jnp.int32)[None, None, :]
        counts = history.counts[:, None, :]
        for j in range(before.shape[2]):
            counts = counts + (before[:, :, j, None] == column).astype(jnp.int32)
        seen = history.prompt[:, None, :] | (counts > 0)
        repeat = sampling.repetition_penalty[:, None, None]
        logits = jnp.where(seen, jnp.where(logits > 0, logits / repeat, logits * repeat), logits)
        logits = logits - sampling.frequency_penalty[:, None, None] * counts.astype(jnp.float32)
        return logits - jnp.where(counts > 0, sampling.presence_penalty[:, None, None], 0.0)

    def mask(logits: Logits) -> Logits:
        assert mask_table is not None
        rows = [_mask_states(mask_table, history.mask_state, before[:, t]) for t in range(logits.shape[1])]
        return jnp.where(mask_table[jnp.stack(rows, axis=1)] < 0, -jnp.inf, logits)

    off = (sampling.presence_penalty == 0) & (sampling.frequency_penalty == 0) & (sampling.repetition_penalty == 1)
    # one condition for both: each costs a GPU 15 us
    if mask_table is None:
        return lax.cond(jnp.all(off), lambda x: x, penalise, logits)
    off &= history.mask_state == 0
    return lax.cond(jnp.all(off), lambda x: x, lambda x: mask(penalise(x)), logits)


def forbid_tokens(logits: Logits, token_ids: Int32[Array, "B S"], rows: Bool[Array, "B T"]) -> Logits:
    """Sets the logits of some tokens to -inf on some rows, such as stop tokens before `min_tokens`.

    Args:
      logits: of B lanes and T rows.
      token_ids: the lane's forbidden tokens, padded with -1.
      rows: where they are forbidden.
    """
    num_lanes, _, vocab_size = logits.shape
    # A negative index would wrap around; an index past the end is dropped.
    columns = jnp.where(token_ids < 0, vocab_size, token_ids)
    lanes = jnp.broadcast_to(jnp.arange(num_lanes)[:, None], columns.shape)
    forbidden = jnp.zeros((num_lanes, vocab_size), bool).at[lanes, columns].set(True, mode="drop")
    return jnp.where(rows[:, :, None] & forbidden[:, None, :], -jnp.inf, logits)


def process_logits(logits: Logits, sampling: Sampling) -> Logits:
    """Log-probabilities that the lane's tokens are drawn from; -inf outside the support.

    In this order: bias, temperature, top-k, top-p, min-p, each on what the one before left, and a softmax.
    Tokens that are exactly equally probable stay or go together, so that nothing depends on their order in
    the vocabulary:

    - top-k keeps every token at least as probable as the k-th;
    - top-p keeps the smallest set of most probable tokens, closed under ties, whose share of the mass left
      by top-k reaches `top_p`; it is never empty;
    - min-p keeps the tokens with at least `min_p` times the probability of the best.

    A greedy lane gets probability 1 at the first maximum of its biased logits. Rows are independent of each
    other: a NaN, or nothing but -inf, makes its own row of a sampled lane NaN and touches no other.
    """
    if sampling.bias is not None:
        logits = logits + sampling.bias[:, None, :]
    best = jnp.max(logits, axis=-1, keepdims=True)
    temperature = jnp.where(sampling.temperature == 0, 1.0, sampling.temperature)[:, None, None]
    # How far a token lies below the best: 0 for the best, inf for a forbidden one, never negative.
    gap = (best - logits) / temperature
    cutoff = jnp.minimum(_cutoff(gap, sampling), -jnp.log(sampling.min_p)[:, None, None])
    # the gap of a row that has no law is NaN, and stays
    outside = gap > cutoff
    norm = jnp.log(jnp.sum(jnp.where(outside, 0.0, jnp.exp(-gap)), axis=-1, keepdims=True))
    sampled = jnp.where(outside, -jnp.inf, -gap - norm)
    first_best = jnp.argmax(logits, axis=-1, keepdims=True)
    chosen = lax.broadcasted_iota(first_best.dtype, logits.shape, 2) == first_best
    return jnp.where((sampling.temperature == 0)[:, None, None], jnp.where(chosen, 0.0, -jnp.inf), sampled)


def _cutoff(gap: Logits, sampling: Sampling) -> Float32[Array, "B T 1"]:
    """The largest gap that top-k and then top-p leave."""
    top_k, top_p = sampling.top_k[:, None, None], sampling.top_p[:, None, None]
    greedy = (sampling.temperature == 0)[:, None, None]
    everything = jnp.full_like(gap[:, :, :1], jnp.inf)

    def search() -> Array:
        """Among each row's `CANDIDATES` smallest gaps: exact where it finds something."""
        least = _smallest_gaps(gap)
        place = jnp.broadcast_to(jnp.clip(top_k, 1, CANDIDATES) - 1, (*gap.shape[:2], 1))
        within_k = jnp.where(top_k == 0, jnp.inf, jnp.take_along_axis(least, place, axis=-1))
        need = top_p * jnp.sum(jnp.where(gap > within_k, 0.0, jnp.exp(-gap)), axis=-1, keepdims=True)
        # what the tokens at least as probable as each candidate hold: all of them are candidates but for the last one's
        # ties, so that it holds at least this; the first to reach the need is the row's, and else, with top-k, top-k's
        together = least[..., None, :] <= least[..., :, None]
        held = jnp.sum(jnp.where(together, jnp.exp(-least)[..., None, :], 0.0), axis=-1)
        reached = held >= need
        within_p = jnp.min(jnp.where(reached, least, jnp.inf), axis=-1, keepdims=True)
        limited = (top_k > 0) & (top_k <= CANDIDATES)
        off = greedy | ((top_k == 0) & (top_p >= 1)) | jnp.isnan(gap[..., :1])
        found = off | limited | ((top_k == 0) & jnp.isfinite(within_p))
        cutoff = jnp.where(top_p >= 1, within_k, jnp.minimum(within_k, within_p))
        # by row, so that no row depends on what its neighbours need
        return lax.cond(jnp.all(found), lambda: cutoff, lambda: jnp.where(found, cutoff, search_all(~found)))

    def search_all(wanted: Array) -> Array:
        """For the wanted rows; a search costs passes over V, so top-k's and top-p's each run only if one wants it."""

        def search_k() -> Array:
            least = _smallest_gap(gap, jnp.ones_like(everything), top_k.astype(jnp.float32))
            return jnp.where(top_k == 0, jnp.inf, least)

        def search_p(within_k: Array) -> Array:
            mass = jnp.where(gap > within_k, 0.0, jnp.exp(-gap))
            need = top_p * jnp.sum(mass, axis=-1, keepdims=True)
            return jnp.where(top_p >= 1, within_k, jnp.minimum(within_k, _smallest_gap(gap, mass, need)))

        within_k = lax.cond(jnp.any(wanted & (top_k > 0)), search_k, lambda: everything)
        return lax.cond(jnp.any(wanted & (top_p < 1)), search_p, lambda within_k: within_k, within_k)

    active = ((top_k > 0) | (top_p < 1)) & ~greedy
    return lax.cond(jnp.any(active), search, lambda: everything)


def _smallest_gaps(gap: Logits) -> Float32[Array, "B T n"]:
    """The `CANDIDATES` smallest gaps of each row, ascending; inf behind the last.

    Of the chunks of a row only those with the smallest minima are looked at: the n-th smallest minimum is no less than
    the n-th smallest gap, and a smaller gap lies in a chunk of a smaller minimum, of which there are fewer than n.
    """
    for size in CHUNKS:
        count = -(-gap.shape[-1] // size)
        if count > CANDIDATES:
            pad = ((0, 0), (0, 0), (0, count * size - gap.shape[-1]))
            chunks = jnp.pad(gap, pad, constant_values=jnp.inf).reshape(*gap.shape[:2], count, size)
            _, chosen = lax.top_k(-jnp.min(chunks, axis=-1), CANDIDATES)
            gap = jnp.take_along_axis(chunks, chosen[..., None], axis=2).reshape(*gap.shape[:2], -1)
    pad = ((0, 0), (0, 0), (0, max(0, CANDIDATES - gap.shape[-1])))
    return -lax.top_k(-jnp.pad(gap, pad, constant_values=jnp.inf), CANDIDATES)[0]


def _smallest_gap(
    gap: Logits, mass: Float32[Array, "B T #V"], need: Float32[Array, "B #T 1"], bits: int | None = None
) -> Float32[Array, "B T 1"]:
    """The smallest gap g such that the tokens with gap <= g hold at least `need` of `mass`; inf if all of them do not.

    Floats that are not negative are ordered like their bits, so g is found exactly, some bits a pass from the top:
    reductions over V instead of a sort, which at 248k tokens costs more and whose running sum rounds worse. A GPU is
    busy with reading, so that it sums for all values of four bits at once; a CPU is not.
    """
    bits = bits or (1 if jax.default_backend() == "cpu" else 4)
    passes = -(-31 // bits)
    order = lax.bitcast_convert_type(gap, jnp.uint32)

    def decide_bits(i: Array, bound: Array) -> Array:
        shift = (bits * (passes - 1 - i)).astype(jnp.uint32)
        short = jnp.zeros_like(bound)
        for digit in range(1, 1 << bits):
            below = bound + (jnp.uint32(digit) << shift)
            held = jnp.sum(jnp.where(order < below, mass, 0.0), axis=-1, keepdims=True)
            # a need of NaN is never reached
            short = short + (~(held >= need)).astype(jnp.uint32)
        return bound + (short << shift)

    bound = lax.fori_loop(0, passes, decide_bits, jnp.zeros_like(order[:, :, :1]))
    found = lax.bitcast_convert_type(bound, jnp.float32)
    return jnp.where(found <= jnp.inf, found, jnp.inf)


def target_noise(sampling: Sampling, positions: Tokens, vocab_size: int) -> Logits:
    """Gumbel noise of the target's own picks: plain and bonus tokens, and both sides under `coupled`.

    `positions` are the absolute positions of the tokens being chosen: a prompt of n tokens is followed by
    number n.
    """
    return _gumbel(sampling, TARGET, positions, 0, vocab_size)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WindowNoise:
    """All noise of one speculative window, made where it is used: V numbers a token, not (k+1) V.

    Row r of the window, fed with the token at `position + r`, chooses the token at `position + r + 1`.
    """

    sampling: Sampling
    position: PerLane  # of the window's first row, which holds the lane's last token

    def draft(self, law: str, offset: int | Int32[Array, ""], vocab_size: int) -> Float32[Array, "B V"]:
        """Gumbel noise that draft `offset` (0..k-1) is picked with; the target's under `coupled`."""
        if law == "coupled":
            return target_noise(self.sampling, self.position[:, None] + 1 + offset, vocab_size)[:, 0]
        return _gumbel(self.sampling, DRAFT, self.position[:, None], offset, vocab_size)[:, 0]

    def coins(self, num_draft_tokens: int) -> Float32[Array, "B k"]:
        """Uniform numbers inside (0, 1), one for each draft."""
        shape = (self.position.shape[0], num_draft_tokens)
        position = jnp.broadcast_to(self.position[:, None], shape)
        offset = lax.broadcasted_iota(jnp.int32, shape, 1)
        return _uniform(self.sampling, ACCEPT, position, offset, 1)[:, :, 0]

    def target(self, num_rows: int, vocab_size: int) -> Float32[Array, "B R V"]:
        """Gumbel noise of the target's picks at all rows."""
        positions = self.position[:, None] + 1 + jnp.arange(num_rows, dtype=jnp.int32)[None, :]
        return target_noise(self.sampling, positions, vocab_size)

    def synthetic(self, num_draft_tokens: int) -> Float32[Array, "B k"]:
        """Uniform numbers of a stream that no decision of the real law reads."""
        shape = (self.position.shape[0], num_draft_tokens)
        position = jnp.broadcast_to(self.position[:, None], shape)
        return _uniform(self.sampling, SYNTHETIC, position, lax.broadcasted_iota(jnp.int32, shape, 1), 1)[:, :, 0]

    def next_token(self, row: PerLane, recovered: LaneMask, vocab_size: int) -> Float32[Array, "B V"]:
        """Gumbel noise of the token chosen at `row`: stream RECOVER where `recovered`, else TARGET."""
        stream = jnp.where(recovered, RECOVER, TARGET)
        position = jnp.where(recovered, self.position, self.position + 1 + row)
        offset = jnp.where(recovered, row, 0)
        return _gumbel(self.sampling, stream[:, None], position[:, None], offset[:, None], vocab_size)[:, 0]


def sample(log_probs: Float32[Array, "*A V"], gumbel: Float32[Array, "*A V"]) -> Int32[Array, "*A"]:
    """Tokens drawn from log-probabilities with finite Gumbel noise; never one of -inf."""
    return jnp.argmax(log_probs + gumbel, axis=-1).astype(jnp.int32)


def _gumbel(sampling: Sampling, stream: int | Array, position: Tokens, offset: int | Array, size: int) -> Logits:
    """Standard Gumbel noise, all finite; zeros, and no work, when every lane is greedy."""

    def draw() -> Logits:
        # E = -log(1 - u) is exponential. Large noise means small E, and small u has all 32 bits of it.
        return -jnp.log(-jnp.log1p(-_uniform(sampling, stream, position, offset, size)))

    zeros = jnp.zeros((*position.shape, size), jnp.float32)
    return lax.cond(jnp.all(sampling.temperature == 0), lambda: zeros, draw)


def _uniform(sampling: Sampling, stream: int | Array, position: Tokens, offset: int | Array, size: int) -> Logits:
    """Uniform numbers between 2^-33 and 1 - 2^-24: neither end is ever reached.

    (seed, sample index) is the lane's threefry key, into which position and (offset, stream) are folded;
    `stream` and `offset` are scalars or shaped like `position`. Number v of a row does not depend on `size`
    (JAX's partitionable threefry, its default).
    """

    def row(seed: Array, sample_index: Array, position: Array, branch: Array) -> Array:
        key = jax.random.wrap_key_data(jnp.stack([seed, sample_index]), impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, position), branch)
        return jax.random.bits(key, (size,), jnp.uint32)

    branch = jnp.broadcast_to(jnp.asarray(offset * NUM_STREAMS + stream, jnp.int32), position.shape)
    lane = jax.vmap(row, in_axes=(None, None, 0, 0))
    bits = jax.vmap(lane)(sampling.seed, sampling.sample_index, position, branch)
    return jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
