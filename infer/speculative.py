"""Speculative decoding in four verbs: draft, verify, accept, commit; and the loop around them.

`speculative_step` emits between one and k + 1 tokens a lane from one pass of the target. `decode_loop` runs many steps
on the device in one call; with k = 0 it is plain decoding, whose text every k has to reproduce.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from infer.decode import Generation, Request, choose_log_probs, emit, plain_step
from mtp import cache as kv
from mtp.acceptance import accept
from mtp.draft_head import MTPHead, draft_rows
from mtp.kernels.sampling import WindowNoise, sample
from mtp.model import Qwen35, forward
from mtp.shapes import Array, Float, Float32, Int32, PerLane


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

    log_probs: Float32[Array, "B R V"]
    # after the final norm
    hidden: Float[Array, "B R D"]


def draft(
    model: Qwen35, head: MTPHead, gen: Generation, request: Request, *, num_draft_tokens: int, law: str
) -> tuple[Proposal, kv.Cache]:
    """Drafts up to k tokens a lane, after rewriting the head's newest entries from their true hidden rows.

    A lane drafts no further than one token short of its reply's end. Live lanes that draft nothing are kept primed.
    """
    cache, noise = gen.cache, WindowNoise(request.sampling, gen.cache.lengths)
    room = request.max_tokens - gen.num_tokens - 1
    wanted = jnp.minimum(request.num_draft_tokens, num_draft_tokens)
    count = jnp.where(gen.live, jnp.clip(room, 0, wanted), 0)

    tokens, hidden = cache.recent_tokens, cache.recent_hidden
    starts = cache.lengths - cache.num_recent + 1
    num_rows = jnp.where(gen.live, cache.num_recent, 0)
    drafts, laws = [], []
    for offset in range(num_draft_tokens):
        hidden, cache = draft_rows(head, model, cache, tokens, hidden, starts, num_rows)
        if offset == 0:
            last = jnp.maximum(cache.num_recent - 1, 0)
            hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)
        log_probs = choose_log_probs(model, hidden, request, gen.num_tokens + offset)[:, 0]
        drafts.append(sample(log_probs, noise.draft(law, offset, log_probs.shape[-1])))
        laws.append(log_probs)
        tokens = drafts[-1][:, None]
        starts = cache.lengths + 1 + offset
        num_rows = (offset + 1 < count).astype(jnp.int32)
    return Proposal(jnp.stack(drafts, axis=1), jnp.stack(laws, axis=1), count), cache


def verify(
    model: Qwen35, gen: Generation, cache: kv.Cache, request: Request, proposal: Proposal
) -> tuple[Verification, kv.Cache]:
    """One pass of the target over each lane's last token and its drafts; nothing is committed yet."""
    window = jnp.concatenate([cache.last_token[:, None], proposal.tokens], axis=1)
    num_rows = jnp.where(gen.live, proposal.count + 1, 0)
    hidden, cache = forward(model, cache, window, num_rows, keep=False)
    return Verification(choose_log_probs(model, hidden, request, gen.num_tokens), hidden), cache


def accept_and_commit(
    gen: Generation, cache: kv.Cache, request: Request, proposal: Proposal, verification: Verification, *, law: str
) -> Generation:
    """Decides the window, emits what stands and the target's own token behind it, and keeps just that."""
    outcome = accept(
        law,
        verification.log_probs,
        proposal.log_probs,
        proposal.tokens,
        proposal.count,
        WindowNoise(request.sampling, cache.lengths),
    )
    row = jnp.arange(proposal.tokens.shape[1] + 1, dtype=jnp.int32)[None, :]
    drafts = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
    tokens = jnp.where(row < outcome.num_accepted[:, None], drafts, outcome.next_token[:, None])
    live = gen.live
    gen, kept = emit(gen, request, tokens, jnp.where(live, outcome.num_accepted + 1, 0))

    position = row[:, :-1]
    drafted = live[:, None] & (position < proposal.count[:, None])
    accepted = live[:, None] & (position < jnp.minimum(outcome.num_accepted, kept)[:, None])
    gap = ((0, 0), (0, gen.drafted.shape[1] - position.shape[1]))
    return replace(
        gen,
        cache=kv.commit(cache, verification.hidden, tokens, kept),
        num_steps=gen.num_steps + live.astype(jnp.int32),
        drafted=gen.drafted + jnp.pad(drafted.astype(jnp.int32), gap),
        accepted=gen.accepted + jnp.pad(accepted.astype(jnp.int32), gap),
    )


def speculative_step(
    model: Qwen35, head: MTPHead, gen: Generation, request: Request, *, num_draft_tokens: int, law: str
) -> Generation:
    """Draft, verify, accept, commit: one pass of the target over every live lane."""
    with jax.named_scope("draft"):
        proposal, cache = draft(model, head, gen, request, num_draft_tokens=num_draft_tokens, law=law)
    with jax.named_scope("verify"):
        verification, cache = verify(model, gen, cache, request, proposal)
    with jax.named_scope("accept_and_commit"):
        return accept_and_commit(gen, cache, request, proposal, verification, law=law)


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

    Raises:
        ValueError: k > 0 without a head, or k above what the cache was made for.
    """
    if num_draft_tokens > gen.cache.window_rows - 1:
        raise ValueError(f"{num_draft_tokens=} exceeds the {gen.cache.window_rows - 1} that the cache was made for")
    if num_draft_tokens > 0 and head is None:
        raise ValueError(f"{num_draft_tokens=} needs an MTP head and this model has none: use num_draft_tokens=0")

    def step(gen: Generation) -> Generation:
        if num_draft_tokens == 0:
            return plain_step(model, head, gen, request)
        assert head is not None
        return speculative_step(model, head, gen, request, num_draft_tokens=num_draft_tokens, law=law)

    def unfinished(carry: tuple[Array, Generation]) -> Array:
        done, gen = carry
        return (done < num_steps) & jnp.any(gen.live)

    return lax.while_loop(unfinished, lambda carry: (carry[0] + 1, step(carry[1])), (jnp.int32(0), gen))[1]
