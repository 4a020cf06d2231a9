"""One step of training a head beside a frozen trunk: trunk forward, exact unroll, loss, gradient of the head alone.

The trunk is an argument without a gradient: its bits cannot change. The head's parameters and moments are float32, and
the forward pass runs on a copy in the trunk's dtype. A batch comes in parts, and parts may be shared by devices; the
totals are added up, so that a step does not depend on how many there are of either.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mtp.draft_head import MTPHead
from mtp.model import Qwen35, forward_documents
from mtp.shapes import Array, Bool, Float32, Hidden, Int32
from mtp.sharding import make_mesh
from train.head_data import HeadBatch
from train.losses import HeadLoss, RowScores, score_rows, score_rows_within
from train.step import OptimizerSettings
from train.unroll import Packing, align, same_document, unroll

SPREAD = PartitionSpec(None, "data")
# Of the acceptance that `lk` weighs with.
MEMORY = 0.95


@dataclass(frozen=True)
class HeadSettings:
    """The static half of a step."""

    optimizer: OptimizerSettings
    loss: HeadLoss
    # k, drafts that the head learns to make
    num_depths: int
    # rows whose logits exist at a time
    chunk_rows: int
    # tokens that the losses look at, chosen anew for each part; 0 for the whole vocabulary
    teacher_ids: int
    # recompute each depth in the backward pass
    remat: bool
    # rows of a part are spread over so many, each of which has the whole model
    devices: int

    @property
    def mesh(self) -> Mesh:
        """The devices."""
        return make_mesh(data=self.devices)

    def place[X](self, whole: X) -> X:
        """The value on every device."""
        return jax.device_put(whole, NamedSharding(self.mesh, PartitionSpec()))

    def spread(self, batch: HeadBatch) -> HeadBatch:
        """A batch [parts, B, T], its rows over the devices."""
        return jax.device_put(batch, NamedSharding(self.mesh, SPREAD))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadState:
    """All that a step changes."""

    # float32
    head: MTPHead
    moments: optax.OptState
    # by depth, a fading mean of sum min(p, q)
    acceptance: Float32[Array, "k"]
    # steps done
    step: Int32[Array, ""]

    @classmethod
    def start(cls, head: MTPHead, settings: HeadSettings) -> "HeadState":
        """Before the first step."""
        head = jax.tree.map(lambda x: x.astype(jnp.float32), head)
        moments = settings.optimizer.transform().init(head)
        return cls(head, moments, jnp.zeros((settings.num_depths,), jnp.float32), jnp.zeros((), jnp.int32))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sums:
    """What a batch adds up to, by depth; means are over `count` or `anchors`."""

    count: Float32[Array, "k"]
    nll: Float32[Array, "k"]
    kl: Float32[Array, "k"]
    overlap: Float32[Array, "k"]
    agree: Float32[Array, "k"]
    # tokens that a verify step at each anchor would emit, by the product of its depths' overlaps
    length: Float32[Array, ""]
    # those whose whole chain counts
    anchors: Float32[Array, ""]
    # of the trunk's law, what lies inside the tokens looked at; over the rows of depth 1
    mass: Float32[Array, ""]

    def figures(self) -> dict[str, Array]:
        """Means worth logging; 0 where nothing counts."""
        each = {name: getattr(self, name) / jnp.maximum(self.count, 1.0) for name in ("nll", "kl", "overlap", "agree")}
        each["mass_covered"] = self.mass / jnp.maximum(self.count[0], 1.0)
        return each | {"expected_length": self.length / jnp.maximum(self.anchors, 1.0), "count": self.count}


@jax.jit
def hidden_rows(model: Qwen35, batch: HeadBatch) -> Hidden:
    """The trunk's rows of a part [B, T], after the final norm."""
    packing = Packing.of(batch.documents)
    return forward_documents(model, batch.tokens, packing.starts, packing.attend)


def score_part(
    head: MTPHead, model: Qwen35, batch: HeadBatch, settings: HeadSettings
) -> tuple[RowScores, Bool[Array, "B T k"], Float32[Array, "B T"]]:
    """Every prediction of one part [B, T] at the row of its target, which of them count, and how much of the trunk's
    law lies inside the tokens looked at."""
    dtype = model.embed_tokens.weight.dtype
    run = jax.tree.map(lambda x: x.astype(dtype), head)
    packing = Packing.of(batch.documents)
    hidden = lax.stop_gradient(hidden_rows(model, batch) if batch.hidden is None else batch.hidden)
    outputs = unroll(run, model, batch.tokens, hidden, packing, settings.num_depths, settings.remat)
    targets = jnp.roll(batch.learned, -1, axis=1)
    valid = same_document(batch.documents, settings.num_depths)[..., 1:] & targets[..., None]
    rows = hidden, align(outputs), batch.tokens
    if settings.teacher_ids:
        scores, mass = score_rows_within(
            *rows, valid[..., 0], model.unembedding, settings.teacher_ids, settings.chunk_rows
        )
        return scores, valid, mass
    scores = score_rows(*rows, model.unembed, lambda rows: run.logits(model, rows), settings.chunk_rows)
    return scores, valid, jnp.ones(valid.shape[:2], jnp.float32)


def add_up(scores: RowScores, valid: Bool[Array, "B T k"], mass: Float32[Array, "B T"]) -> Sums:
    """The sums of one part."""
    total = lambda x: jnp.sum(jnp.where(valid, x.astype(jnp.float32), 0.0), axis=(0, 1))  # noqa: E731
    depths = valid.shape[-1]
    lost, anchors = HeadLoss("e2e").total(scores, valid, jnp.zeros((depths,), jnp.float32))
    return Sums(
        count=total(valid),
        nll=total(scores.draft_nll),
        kl=total(scores.kl),
        overlap=total(scores.overlap),
        agree=total(scores.agree),
        length=(1 + depths) * anchors - depths * lost,
        anchors=anchors,
        mass=total(mass[..., None])[0],
    )


@partial(jax.jit, static_argnames=("settings",), donate_argnames=("state",))
def head_step(
    state: HeadState, model: Qwen35, batch: HeadBatch, learning_rate: Float32[Array, ""], settings: HeadSettings
) -> tuple[HeadState, dict[str, Array]]:
    """The state after one step, and its figures.

    Args:
        batch: [parts, B, T].

    Raises:
        ValueError: fewer devices than the settings name.
    """

    def objective(head: MTPHead, model: Qwen35, acceptance: Array, part: HeadBatch) -> tuple[Array, tuple[Array, Sums]]:
        scores, valid, mass = score_part(head, model, part, settings)
        total, weight = settings.loss.total(scores, valid, acceptance)
        return total, (weight, add_up(scores, valid, mass))

    def one_part(head: MTPHead, model: Qwen35, acceptance: Array, part: HeadBatch) -> tuple:
        (total, (weight, sums)), grads = jax.value_and_grad(objective, has_aux=True)(head, model, acceptance, part)
        return grads, total, weight, sums

    added = over_parts(one_part, settings)
    grads, total, weight, sums = added(state.head, model, state.acceptance, batch)
    # a batch without anything to learn changes nothing but the count of steps
    scale = jnp.where(weight > 0, 1.0 / jnp.maximum(weight, 1e-9), 0.0)
    grads = jax.tree.map(lambda g: scale * g, grads)
    with jax.numpy_dtype_promotion("standard"):
        updates, moments = settings.optimizer.transform().update(grads, state.moments, state.head)
    head = jax.tree.map(lambda x, u: x + learning_rate * u, state.head, updates)
    figures = sums.figures() | {"loss": scale * total}
    figures["gradient_norm"] = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    seen = MEMORY * state.acceptance + (1.0 - MEMORY) * figures["overlap"]
    acceptance = jnp.where(state.step == 0, figures["overlap"], seen)
    keep = lambda new, old: jnp.where(weight > 0, new, old)  # noqa: E731
    head, moments, acceptance = jax.tree.map(
        keep, (head, moments, acceptance), (state.head, state.moments, state.acceptance)
    )
    return HeadState(head, moments, acceptance, state.step + 1), figures


@partial(jax.jit, static_argnames=("settings",))
def head_sums(head: MTPHead, model: Qwen35, batch: HeadBatch, settings: HeadSettings) -> Sums:
    """The sums of a batch [parts, B, T], without a gradient and over the whole vocabulary."""
    exact = replace(settings, teacher_ids=0)
    added = over_parts(lambda head, model, part: add_up(*score_part(head, model, part, exact)), settings)
    return added(head, model, batch)


def over_parts[X](one_part: Callable[..., X], settings: HeadSettings) -> Callable[..., X]:
    """What is added up over the parts of a batch, one after the other, and over the devices that share their rows.

    Args:
        one_part: its last argument is a part [B, T].

    Returns:
        A function whose last argument is a batch [parts, B, T].
    """

    def local(*args: Any) -> X:
        *whole, batch = args
        shapes = jax.eval_shape(one_part, *whole, jax.tree.map(lambda x: x[0], batch))
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        add = lambda done, part: (jax.tree.map(jnp.add, done, one_part(*whole, part)), None)  # noqa: E731
        return lax.psum(lax.scan(add, nothing, batch)[0], "data")

    def shared(*args: Any) -> X:
        specs = *(PartitionSpec(),) * (len(args) - 1), SPREAD
        # unchecked: the loops in the model begin with constants, which the checker takes for another kind of value
        each = jax.shard_map(local, mesh=settings.mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
        return each(*args)

    return shared
