"""Speculative decoding in four verbs: draft, verify, accept, commit; and the loop around them.

`speculative_step` emits between one and k + 1 tokens a lane from one pass of the target. `decode_loop` runs many steps
on the device in one call; with k = 0 it is plain decoding, whose text every k has to reproduce.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from infer.decode import (
    HONEST,
    Emitted,
    Generation,
    Request,
    Verbs,
    emit,
    fail,
    law_of_rows,
    plain_step,
)
from infer.packed import Packed, unpack
from mtp import cache as kv
from mtp.draft_head import MTPHead, draft_rows
from mtp.kernels.sampling import WindowNoise, sample
from mtp.model import Qwen35, forward
from mtp.shapes import Array, Bool, Float, Float32, Int32, Logits, PerLane


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Proposal:
    """The drafts of a window and the laws they were drawn from."""

    tokens: Int32[Array, "B k"]
    log_probs: Float32[Array, "B k V"]
    # drafts of each lane, 0..k; those behind are unspecified
    count: PerLane


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Verification:
    """What the target says of a window's rows: row t follows draft t."""

    # raw, the law made of them, and the rows where that means something
    logits: Logits
    log_probs: Float32[Array, "B R V"]
    sound: Bool[Array, "B R"]
    # after the final norm
    hidden: Float[Array, "B R D"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Turn:
    """What the steps of one call emitted, and how the lanes stand behind them."""

    # every field has a leading axis of `max_steps`; nothing was emitted behind `num_steps`
    emitted: Emitted
    num_steps: Int32[Array, ""]
    status: PerLane
    num_tokens: PerLane

    def pack(self) -> "Packet":
        """The turn as the host fetches it."""
        emitted, lanes = self.emitted, self.status.shape[0]
        counts = jnp.stack([emitted.count, emitted.num_drafted, emitted.num_accepted], axis=-1)
        steps = jnp.concatenate([emitted.tokens, counts], axis=-1)
        after = jnp.stack([self.status, self.num_tokens, jnp.broadcast_to(self.num_steps, (lanes,))], axis=-1)
        after = jnp.pad(after, ((0, 0), (0, steps.shape[-1] - after.shape[-1])))
        log_probs = emitted.log_probs, emitted.top_tokens, emitted.top_log_probs
        return Packet(jnp.concatenate([steps, after[None]], axis=0), log_probs)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Packet:
    """A turn on its way to the host: one array for what is always read, for every array costs its own copy."""

    core: Int32[Array, "steps_and_one B F"]
    # log_probs, top_tokens and top_log_probs of `Emitted`
    log_probs: tuple[Array, Array, Array]

    def send(self, with_log_probs: bool) -> None:
        """Starts the copies to the host."""
        self.core.copy_to_host_async()
        for part in self.log_probs if with_log_probs else ():
            part.copy_to_host_async()

    def read(self, with_log_probs: bool) -> Turn:
        """The turn in numpy arrays; waits for it. Without them its log-probabilities stay where they are."""
        core = np.asarray(self.core)
        steps, after = core[:-1], core[-1]
        log_probs = jax.device_get(self.log_probs) if with_log_probs else self.log_probs
        emitted = Emitted(steps[..., :-3], steps[..., -3], steps[..., -2], steps[..., -1], *log_probs)
        return Turn(emitted, after[0, 2], after[:, 0], after[:, 1])


def draft(
    model: Qwen35,
    head: MTPHead,
    gen: Generation,
    request: Request,
    *,
    num_draft_tokens: int,
    law: str,
    verbs: Verbs = HONEST,
) -> tuple[Proposal, kv.Cache]:
    """Drafts up to k tokens a lane, after rewriting the head's newest entries from their true hidden rows.

    A lane drafts no further than one token short of its reply's end, and no further than the head's logits are finite:
    a broken head costs speed, no reply. Live lanes that draft nothing are kept primed.
    """
    cache, noise = gen.cache, WindowNoise(request.sampling, gen.cache.lengths)
    room = request.max_tokens - gen.num_tokens - 1
    wanted = jnp.minimum(request.num_draft_tokens, num_draft_tokens)
    count = jnp.where(gen.live, jnp.clip(room, 0, wanted), 0)

    tokens, hidden = cache.recent_tokens, cache.recent_hidden
    starts = cache.lengths - cache.num_recent + 1
    num_rows = jnp.where(gen.live, cache.num_recent, 0)
    drafts = jnp.zeros((count.shape[0], 0), jnp.int32)
    laws = []
    for offset in range(num_draft_tokens):
        hidden, cache = draft_rows(head, model, cache, tokens, hidden, starts, num_rows)
        if offset == 0:
            last = jnp.maximum(cache.num_recent - 1, 0)
            hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)
        logits = head.logits(model, hidden)
        law_here, sound = law_of_rows(logits, gen, request, gen.num_tokens + offset, drafts[:, None, :], verbs)
        log_probs = law_here[:, 0]
        count = jnp.where(sound[:, 0], count, jnp.minimum(count, offset))
        tokens = sample(log_probs, noise.draft(law, offset, log_probs.shape[-1]))[:, None]
        drafts = jnp.concatenate([drafts, tokens], axis=1)
        laws.append(log_probs)
        starts = cache.lengths + 1 + offset
        num_rows = (offset + 1 < count).astype(jnp.int32)
    return Proposal(drafts, jnp.stack(laws, axis=1), count), cache


def verify(
    model: Qwen35,
    gen: Generation,
    cache: kv.Cache,
    request: Request,
    proposal: Proposal,
    *,
    verbs: Verbs = HONEST,
) -> tuple[Verification, kv.Cache]:
    """One pass of the target over each lane's last token and its drafts; nothing is committed yet."""
    window = jnp.concatenate([cache.last_token[:, None], proposal.tokens], axis=1)
    num_rows = jnp.where(gen.live, proposal.count + 1, 0)
    hidden, cache = forward(model, cache, window, num_rows, keep=False)
    logits = model.unembed(hidden)
    # row t has the drafts before it behind it
    row = jnp.arange(window.shape[1], dtype=jnp.int32)
    seen = row[None, :-1] < row[:, None]
    before = jnp.where(seen[None], proposal.tokens[:, None, :], -1)
    log_probs, sound = law_of_rows(logits, gen, request, gen.num_tokens, before, verbs)
    return Verification(logits, log_probs, sound, hidden), cache


def accept_and_commit(
    gen: Generation,
    cache: kv.Cache,
    request: Request,
    proposal: Proposal,
    verification: Verification,
    *,
    law: str,
    verbs: Verbs = HONEST,
) -> Generation:
    """Decides the window, emits what stands and the target's own token behind it, and keeps just that."""
    noise = WindowNoise(request.sampling, cache.lengths)
    outcome = verbs.accept(law, verification.log_probs, proposal.log_probs, proposal.tokens, proposal.count, noise)
    position = jnp.arange(proposal.tokens.shape[1], dtype=jnp.int32)[None, :]
    num_accepted = outcome.num_accepted
    if request.synthetic_acceptance is not None:
        stands = noise.synthetic(position.shape[1]) < request.synthetic_acceptance
        stands &= position < proposal.count[:, None]
        num_accepted = jnp.sum(jnp.cumprod(stands.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    row = jnp.arange(proposal.tokens.shape[1] + 1, dtype=jnp.int32)[None, :]
    drafts = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
    tokens = jnp.where(row < num_accepted[:, None], drafts, outcome.next_token[:, None])

    live = gen.live
    # the first row that chooses a token and has no law: what comes before it stands, as in plain decoding
    unsound = ~verification.sound & (row <= num_accepted[:, None])
    first_unsound = jnp.min(jnp.where(unsound, row, row.shape[1]), axis=1)
    count = jnp.where(live, jnp.minimum(num_accepted + 1, first_unsound), 0)
    num_drafted = jnp.where(live, proposal.count, 0)
    gen, kept = emit(gen, request, tokens, count, verification.logits, num_drafted, num_accepted)
    gen = fail(gen, gen.live & (first_unsound <= num_accepted))

    drafted = position < num_drafted[:, None]
    accepted = position < gen.emitted.num_accepted[:, None]
    gap = ((0, 0), (0, gen.drafted.shape[1] - position.shape[1]))
    return replace(
        gen,
        cache=verbs.commit(cache, verification.hidden, tokens, kept),
        num_steps=gen.num_steps + live.astype(jnp.int32),
        drafted=gen.drafted + jnp.pad(drafted.astype(jnp.int32), gap),
        accepted=gen.accepted + jnp.pad(accepted.astype(jnp.int32), gap),
    )


def speculative_step(
    model: Qwen35,
    head: MTPHead,
    gen: Generation,
    request: Request,
    *,
    num_draft_tokens: int,
    law: str,
    verbs: Verbs = HONEST,
) -> Generation:
    """Draft, verify, accept, commit: one pass of the target over every live lane."""
    with jax.named_scope("draft"):
        proposal, cache = draft(model, head, gen, request, num_draft_tokens=num_draft_tokens, law=law, verbs=verbs)
    with jax.named_scope("verify"):
        verification, cache = verify(model, gen, cache, request, proposal, verbs=verbs)
    with jax.named_scope("accept_and_commit"):
        return accept_and_commit(gen, cache, request, proposal, verification, law=law, verbs=verbs)


def step(
    model: Qwen35,
    head: MTPHead | None,
    gen: Generation,
    request: Request,
    *,
    num_draft_tokens: int,
    law: str,
    verbs: Verbs = HONEST,
) -> Generation:
    """One step of every live lane: plain with k = 0, speculative otherwise.

    Raises:
        ValueError: k > 0 without a head, or k above what the cache was made for.
    """
    if num_draft_tokens > gen.cache.window_rows - 1:
        raise ValueError(f"{num_draft_tokens=} exceeds the {gen.cache.window_rows - 1} that the cache was made for")
    if num_draft_tokens == 0:
        return plain_step(model, head, gen, request, verbs=verbs)
    if head is None:
        raise ValueError(f"{num_draft_tokens=} needs an MTP head and this model has none: use num_draft_tokens=0")
    return speculative_step(model, head, gen, request, num_draft_tokens=num_draft_tokens, law=law, verbs=verbs)


def stands_with(acceptance_length: float) -> float:
    """The chance p of each draft that makes verify steps emit so many tokens on average with three drafts: the root of
    1 + p + p^2 + p^3 = L. It is the same p for every k, as if the head were the same.

    Raises:
        ValueError: L is not from 1 to 4.
    """
    if not 1 <= acceptance_length <= 4:
        raise ValueError(f"{acceptance_length=} must be from 1 to 4 tokens a step, as of three drafts")
    low, high = 0.0, 1.0
    for _ in range(60):
        p = (low + high) / 2
        low, high = (p, high) if 1 + p + p**2 + p**3 < acceptance_length else (low, p)
    return high


@partial(jax.jit, static_argnames=("num_draft_tokens", "law"), donate_argnames="gen")
def decode_loop(
    model: Qwen35,
    head: MTPHead | None,
    gen: Generation,
    request: Request,
    num_steps: Int32[Array, ""],
    *,
    num_draft_tokens: int,
    law: str = "rejection",
) -> Generation:
    """Runs up to `num_steps` steps on the device, fewer when every reply has ended. `gen` is donated.

    Args:
        num_draft_tokens: k of the program, at most the window of the cache less one; lanes may ask for less.
        law: one of `mtp.acceptance.LAWS`.
    """

    def unfinished(carry: tuple[Array, Generation]) -> Array:
        done, gen = carry
        return (done < num_steps) & jnp.any(gen.live)

    def turn(carry: tuple[Array, Generation]) -> tuple[Array, Generation]:
        done, gen = carry
        return done + 1, step(model, head, gen, request, num_draft_tokens=num_draft_tokens, law=law)

    return lax.while_loop(unfinished, turn, (jnp.int32(0), gen))[1]


@partial(jax.jit, static_argnames=("num_draft_tokens", "law", "max_steps", "verbs"), donate_argnames="gen")
def decode_turn(
    model: Qwen35 | Packed[Qwen35],
    head: MTPHead | None | Packed[MTPHead | None],
    gen: Generation,
    request: Request,
    page_table: Int32[Array, "B M"],
    num_steps: Int32[Array, ""],
    *,
    num_draft_tokens: int,
    law: str,
    max_steps: int,
    verbs: Verbs = HONEST,
) -> tuple[Generation, Packet]:
    """`decode_loop` for the engine: the lanes' pages come with the call, and what each step emits goes out with it.

    Args:
        num_steps: at most `max_steps`.
    """
    model, head = unpack(model), unpack(head)
    gen = replace(gen, cache=replace(gen.cache, page_table=page_table))
    nothing = replace(gen.emitted, count=jnp.zeros_like(gen.emitted.count))
    record = jax.tree.map(lambda x: jnp.broadcast_to(x[None], (max_steps, *x.shape)), nothing)

    def unfinished(carry: tuple[Array, Generation, Emitted]) -> Array:
        done, gen, _ = carry
        return (done < num_steps) & jnp.any(gen.live)

    def turn(carry: tuple[Array, Generation, Emitted]) -> tuple[Array, Generation, Emitted]:
        done, gen, record = carry
        gen = step(model, head, gen, request, num_draft_tokens=num_draft_tokens, law=law, verbs=verbs)
        return done + 1, gen, jax.tree.map(lambda whole, one: whole.at[done].set(one), record, gen.emitted)

    done, gen, record = lax.while_loop(unfinished, turn, (jnp.int32(0), gen, record))
    return gen, Turn(record, done, gen.status, gen.num_tokens).pack()
