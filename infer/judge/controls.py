"""Negative controls: steps that are wrong in a known way, for showing that the judge's tests would notice.

Each is a `Verbs` in place of the honest one; engine, loop and cache are the same. They are made of module-level
functions, so that equal controls are equal values and share their compiled program.
"""

import math
from dataclasses import dataclass, replace

import jax.numpy as jnp

from infer.decode import Verbs
from infer.judge import gates, plan
from mtp import cache as kv
from mtp.acceptance import Acceptance, Noise, accept
from mtp.kernels.sampling import Sampling, WindowNoise, process_logits
from mtp.shapes import Array, Float32, Hidden, Int32, Logits, PerLane, Tokens

# Windows that start within so many positions share their coins.
SHARED_POSITIONS = 8
# For computing beforehand how many tokens a control needs: rejections and steps a token of the demo model at the
# self-test's sampling, and the events at which an exact test that sees each of them misses all once in a thousand runs.
REJECTIONS_A_TOKEN, STEPS_A_TOKEN, EVENTS = 0.27, 0.4, 7
# Standard deviations by which sharing coins shifts a window start behind a single token, and how many tokens there are
# to one such start (measured on 8,305 tokens of the demo model).
SHARED_SHIFT, TOKENS_A_START = 0.11, 6.4
# Share of tokens that top-p before the temperature adds or takes away, and what it has to add to a chi-square.
TOP_P_SHARE, PIT_DISTANCE = 0.05, 50
# Tests of an arm, about.
NUM_TESTS = 16


@dataclass(frozen=True)
class Control:
    """One way of being wrong."""

    name: str
    # the share of decisions or steps that are wrong; 1 where all are, 0 for the honest arm
    strength: float
    verbs: Verbs
    # the test that should notice first, and how many tokens it should need
    caught_by: str
    num_tokens: int


def controls(leak: float, stale_every: int) -> tuple[Control, ...]:
    """All controls.

    Args:
        leak: share of rejected drafts that are accepted anyway.
        stale_every: one commit out of so many leaves the recurrent state a token behind.
    """
    leaky = math.ceil(EVENTS / (REJECTIONS_A_TOKEN * leak))
    # a chi-square of 19 degrees of freedom, grown by so much a token in the last of 20 bins
    misplaced = math.ceil(max(PIT_DISTANCE * 0.05 / TOP_P_SHARE**2, gates.MIN_SLOT_TOKENS) / STEPS_A_TOKEN)
    shared = math.ceil(plan.tokens_to_catch(SHARED_SHIFT, 1.0, NUM_TESTS) * TOKENS_A_START)
    stale = math.ceil(EVENTS * stale_every / STEPS_A_TOKEN)
    return (
        Control("lossy acceptance", leak, Verbs(accept=LossyAccept(leak)), "coupled equality", leaky),
        Control("top-p before temperature", 1.0, Verbs(process=top_p_first), "PIT, slot 0", misplaced),
        Control("shared coins", 1.0, Verbs(accept=accept_with_shared_coins), "draft preference", shared),
        Control(
            "stale state", 1 / stale_every, Verbs(commit=StaleCommit(stale_every)), "texts and coupled equality", stale
        ),
    )


@dataclass(frozen=True)
class LossyAccept:
    """`mtp.acceptance.accept`, but the draft that is rejected first is accepted with probability `leak`."""

    leak: float

    def __call__(
        self,
        law: str,
        target_log_probs: Float32[Array, "B R V"],
        draft_log_probs: Float32[Array, "B k V"],
        drafts: Int32[Array, "B k"],
        num_drafts: PerLane,
        noise: Noise,
    ) -> Acceptance:
        """The arguments of `accept`."""
        honest = accept(law, target_log_probs, draft_log_probs, drafts, num_drafts, noise)
        num_rows, vocab_size = target_log_probs.shape[1:]
        last = jnp.minimum(honest.num_accepted, num_rows - 2)[:, None]
        coin = jnp.take_along_axis(noise.coins(num_rows - 1), last, axis=1)[:, 0]
        # the coin's low bits, which the honest decision hardly depends on
        leaks = (honest.num_accepted < num_drafts) & (jnp.modf(coin * 4096.0)[0] < self.leak)
        picks = jnp.argmax(target_log_probs + noise.target(num_rows, vocab_size), axis=-1).astype(jnp.int32)
        behind = jnp.take_along_axis(picks, last + 1, axis=1)[:, 0]
        return Acceptance(honest.num_accepted + leaks.astype(jnp.int32), jnp.where(leaks, behind, honest.next_token))


def top_p_first(logits: Logits, sampling: Sampling) -> Logits:
    """`process_logits`, but top-p chooses its tokens before the temperature is applied."""
    raw = replace(
        sampling,
        temperature=jnp.where(sampling.temperature == 0, 0.0, 1.0),
        top_k=jnp.zeros_like(sampling.top_k),
        min_p=jnp.zeros_like(sampling.min_p),
    )
    kept = process_logits(logits, raw)
    return process_logits(kept, replace(sampling, top_p=jnp.ones_like(sampling.top_p), bias=None))


def accept_with_shared_coins(
    law: str,
    target_log_probs: Float32[Array, "B R V"],
    draft_log_probs: Float32[Array, "B k V"],
    drafts: Int32[Array, "B k"],
    num_drafts: PerLane,
    noise: WindowNoise,
) -> Acceptance:
    """`mtp.acceptance.accept`, but its noise is keyed so coarsely that neighbouring windows toss the same coins, and
    recover from a rejection at the same row with the same noise."""
    return accept(law, target_log_probs, draft_log_probs, drafts, num_drafts, _SharedNoise(noise))


@dataclass(frozen=True)
class _SharedNoise:
    """The noise of a window, except that what its acceptance looks at does not know where the window starts."""

    inner: WindowNoise

    def coins(self, num_draft_tokens: int) -> Float32[Array, "B k"]:
        """The same for all windows that start within `SHARED_POSITIONS`."""
        return replace(self.inner, position=self._coarse).coins(num_draft_tokens)

    def target(self, num_rows: int, vocab_size: int) -> Float32[Array, "B R V"]:
        """As it should be."""
        return self.inner.target(num_rows, vocab_size)

    def next_token(self, row: PerLane, recovered: Array, vocab_size: int) -> Float32[Array, "B V"]:
        """As it should be for a bonus token."""
        position = jnp.where(recovered, self._coarse, self.inner.position)
        return replace(self.inner, position=position).next_token(row, recovered, vocab_size)

    @property
    def _coarse(self) -> PerLane:
        return self.inner.position // SHARED_POSITIONS * SHARED_POSITIONS


@dataclass(frozen=True)
class StaleCommit:
    """`mtp.cache.commit`, but one commit in `every` forgets to fold the last row into the recurrent state."""

    every: int

    def __call__(self, cache: kv.Cache, hidden: Hidden, tokens: Tokens, num_committed: PerLane) -> kv.Cache:
        """The arguments of `commit`."""
        kept = kv.commit(cache, hidden, tokens, num_committed)
        # which commits is as good as drawn: by position and token
        mixed = (cache.lengths * 40503 + tokens[:, 0] * 30011).astype(jnp.uint32) * jnp.uint32(2654435761)
        stale = (num_committed > 0) & ((mixed >> 8) % jnp.uint32(self.every) == 0)
        return replace(kept, num_pending=kept.num_pending - stale.astype(jnp.int32))
