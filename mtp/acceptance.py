"""The law of acceptance: how many drafts of a window stand, and which token follows them.

Pure maths on log-probabilities and noise, in float32, used by generation and by evaluation alike. A lane's
row i holds the target's distribution p_i of the token after drafts x_1..x_i, and x_{i+1} was drawn from the
draft's distribution q_i; both have passed the same `process_logits`, so that greedy is the special case of
one-hot distributions. The k drafts may be fewer for some lanes (n <= k); with n = 0 the step is plain
decoding.

Why nothing is lost
-------------------
`rejection` (Leviathan et al. 2023, Chen et al. 2023). x ~ q is kept with probability min(1, p(x)/q(x)), which
emits v with probability min(p(v), q(v)). Otherwise, with probability 1 - sum min(p, q) = sum max(p - q, 0),
the token is drawn from max(p - q, 0) renormalised, which adds max(p(v) - q(v), 0). The sum is p(v). The first
failure ends the window, so each later draft is looked at only in its own context, and when all stand the
bonus token is drawn from p_n.

`block` (Sun et al. 2024, block verification). Let w_0 = 1, w_i = min(1, w_{i-1} p_{i-1}(x_i) / q_{i-1}(x_i)),
S_i = sum_v max(w_i p_i(v) - q_i(v), 0), and let coin i hold with probability h_i = S_i / (S_i + 1 - w_i) for
i < n and h_n = w_n; the drafts up to the last coin that holds stand. Claim: given x_1..x_i, at least i drafts
stand with probability w_i. For i = n that is h_n. For i < n, by induction from the end, more than i stand
with probability sum_v q_i(v) w_{i+1}(v) = sum_v min(q_i(v), w_i p_i(v)) = w_i - S_i; if not, coin i decides,
and (1 - w_i + S_i) h_i = S_i is added: w_i. So exactly i stand with probability S_i, and then v is drawn from
max(w_i p_i - q_i, 0) / S_i. Either way v follows x_1..x_i with probability min(q_i(v), w_i p_i(v)) + max(w_i
p_i(v) - q_i(v), 0) = w_i p_i(v): whenever x_1..x_i stand, the next token is distributed as p_i. Coins after
the last that holds have been looked at here, so no later window may use them again.

`coupled`. Target noise g belongs to positions; draft and target both pick argmax(log prob + g). Say the
drafts before row i equal plain decoding's tokens. Then p_i is plain decoding's distribution at that position,
and with the same g the target's pick is plain decoding's token. If the draft equals it the premise holds for
row i + 1; if not, the pick is emitted and the window ends. By induction every emitted token is plain
decoding's own, whatever the drafter does. It accepts less: the two picks agree with probability sum_v 1 /
sum_u max(p(u)/p(v), q(u)/q(v)).
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from mtp.shapes import Array, Bool, Float32, Int32, LaneMask, PerLane

LAWS = ("rejection", "block", "coupled")


@runtime_checkable
class Noise(Protocol):
    """The randomness of one window, asked for when it is known which of it is needed."""

    def coins(self, num_draft_tokens: int) -> Float32[Array, "B k"]:
        """Uniform numbers inside (0, 1)."""

    def target(self, num_rows: int, vocab_size: int) -> Float32[Array, "B R V"]:
        """Gumbel noise of the target's picks."""

    def next_token(self, row: PerLane, recovered: LaneMask, vocab_size: int) -> Float32[Array, "B V"]:
        """Gumbel noise of the one token chosen at `row`, which follows a rejection where `recovered`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Acceptance:
    """What one window emits: its first `num_accepted` drafts, then `next_token`."""

    num_accepted: PerLane
    next_token: PerLane


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Plan:
    """A window's decisions before any coin falls, under `rejection` or `block`."""

    pass_probability: Float32[Array, "B k"]  # that coin i + 1 holds; 0 past the lane's drafts
    weight: Float32[Array, "B k"]  # w of row i: the residual is max(w p_i - q_i, 0)


def make_plan(
    law: str,
    target_log_probs: Float32[Array, "B R V"],
    draft_log_probs: Float32[Array, "B k V"],
    drafts: Int32[Array, "B k"],
    num_drafts: PerLane,
) -> Plan:
    """Acceptance probabilities and residual weights of every row, by the formulas above.

    Args:
      law: "rejection" or "block".
      target_log_probs: k + 1 rows of normalised log-probabilities, -inf outside the support.
      draft_log_probs: the very distributions the drafts were drawn from; one-hot for a drafter that does not
      draw.
      drafts: tokens; those past `num_drafts` are ignored.
      num_drafts: drafts of each lane, 0..k.

    Raises:
      ValueError: `law` has no plan.
    """
    if law not in ("rejection", "block"):
        raise ValueError(f"{law=} must be 'rejection' or 'block'")
    offsets = jnp.arange(drafts.shape[1])[None, :]
    num_drafts = num_drafts[:, None]
    log_p = jnp.take_along_axis(target_log_probs[:, :-1], drafts[:, :, None], axis=2)[:, :, 0]
    log_q = jnp.take_along_axis(draft_log_probs, drafts[:, :, None], axis=2)[:, :, 0]
    # A token the target forbids is refused even if the draft, wrongly, declares it impossible as well.
    log_ratio = jnp.where(log_p == -jnp.inf, -jnp.inf, log_p - log_q)
    if law == "rejection":
        pass_probability = jnp.exp(jnp.minimum(log_ratio, 0.0))
        return Plan(jnp.where(offsets < num_drafts, pass_probability, 0.0), jnp.ones_like(log_ratio))

    log_w = [jnp.zeros_like(log_ratio[:, 0])]
    for i in range(drafts.shape[1]):
        log_w.append(jnp.minimum(log_w[-1] + log_ratio[:, i], 0.0))
    log_w = jnp.stack(log_w, axis=1)  # [B, k+1]
    w = jnp.exp(log_w)
    # S_1..S_{k-1}; there is no coin 0, and a lane's last draft is decided by its w.
    surplus = jnp.sum(_residual(target_log_probs[:, 1:-1], draft_log_probs[:, 1:], w[:, 1:-1]), axis=-1)
    denominator = surplus - jnp.expm1(log_w[:, 1:-1])
    # 0/0 means that the prefix stands (w = 1) and that the next draft cannot fail (p = q).
    h = jnp.where(denominator == 0, 1.0, surplus / jnp.where(denominator == 0, 1.0, denominator))
    h = jnp.where(offsets == num_drafts - 1, w[:, 1:], jnp.pad(h, ((0, 0), (0, 1))))
    return Plan(jnp.where(offsets < num_drafts, h, 0.0), w[:, :-1])


def count_accepted(law: str, plan: Plan, coins: Float32[Array, "B k"]) -> PerLane:
    """Drafts before the first coin that fails (`rejection`), or up to the last that holds (`block`)."""
    holds = coins <= plan.pass_probability
    if law == "block":
        ordinals = jnp.arange(1, coins.shape[1] + 1, dtype=jnp.int32)[None, :]
        return jnp.max(jnp.where(holds, ordinals, 0), axis=1)
    return _leading(holds)


def next_log_probs(
    plan: Plan,
    target_log_probs: Float32[Array, "B R V"],
    draft_log_probs: Float32[Array, "B k V"],
    num_accepted: PerLane,
    num_drafts: PerLane,
) -> Float32[Array, "B V"]:
    """Law of the token after the accepted drafts: the residual after a rejection, else the target's row.

    A residual that rounds to nothing belongs to a rejection of probability zero; the target's row stands in
    for it.
    """
    target = _row(target_log_probs, num_accepted)
    row = jnp.minimum(num_accepted, draft_log_probs.shape[1] - 1)
    residual = _residual(target, _row(draft_log_probs, row), _row(plan.weight, row))
    mass = jnp.sum(residual, axis=-1)
    recovered = (num_accepted < num_drafts) & (mass > 0)
    return jnp.where(recovered[:, None], jnp.log(residual) - jnp.log(mass)[:, None], target)


def accept(
    law: str,
    target_log_probs: Float32[Array, "B R V"],
    draft_log_probs: Float32[Array, "B k V"],
    drafts: Int32[Array, "B k"],
    num_drafts: PerLane,
    noise: Noise,
) -> Acceptance:
    """Decides one window of every lane.

    Args:
      law: one of `LAWS`. "coupled" does not read `draft_log_probs`; its drafts should have been picked with
        the target's noise, or few will stand.
      target_log_probs, draft_log_probs, drafts, num_drafts: as in `make_plan`; k may be 0.
      noise: of this window, such as `mtp.kernels.sampling.WindowNoise`.

    Raises:
      ValueError: unknown `law`.
    """
    if law not in LAWS:
        raise ValueError(f"{law=} must be one of {', '.join(LAWS)}")
    num_rows, vocab_size = target_log_probs.shape[1:]
    if law == "coupled" or num_rows == 1:
        picks = jnp.argmax(target_log_probs + noise.target(num_rows, vocab_size), axis=-1).astype(jnp.int32)
        live = jnp.arange(num_rows - 1)[None, :] < num_drafts[:, None]
        num_accepted = _leading(live & (drafts == picks[:, :-1]))
        return Acceptance(num_accepted, _row(picks, num_accepted))

    plan = make_plan(law, target_log_probs, draft_log_probs, drafts, num_drafts)
    num_accepted = count_accepted(law, plan, noise.coins(num_rows - 1))
    log_probs = next_log_probs(plan, target_log_probs, draft_log_probs, num_accepted, num_drafts)
    gumbel = noise.next_token(num_accepted, num_accepted < num_drafts, vocab_size)
    return Acceptance(num_accepted, jnp.argmax(log_probs + gumbel, axis=-1).astype(jnp.int32))


def acceptance_probability(
    target_log_probs: Float32[Array, "*A V"], draft_log_probs: Float32[Array, "*A V"]
) -> Float32[Array, "*A"]:
    """sum_v min(p(v), q(v)) = 1 - TV(p, q), the chance that a draft stands under `rejection`."""
    return jnp.sum(jnp.exp(jnp.minimum(target_log_probs, draft_log_probs)), axis=-1)


def _residual(target_log_probs: Array, draft_log_probs: Array, weight: Array) -> Array:
    """max(w p - q, 0) [..., V], not normalised."""
    return jnp.maximum(weight[..., None] * jnp.exp(target_log_probs) - jnp.exp(draft_log_probs), 0.0)


def _leading(holds: Bool[Array, "B k"]) -> PerLane:
    """Number of trues before the first false."""
    return jnp.sum(jnp.cumprod(holds.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def _row(x: Array, row: PerLane) -> Array:
    """x[b, row[b]] for each lane b."""
    return jax.vmap(lambda lane, i: lane[i])(x, row)
