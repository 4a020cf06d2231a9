"""One training step: trunk and head forward over packed documents, loss, gradient, AdamW.

Parameters and moments are float32; the forward pass runs on a copy in the compute dtype, in which A_log and the gated
norms stay float32 as they do in a loaded checkpoint. The learning rate is an argument: the schedule lives on the host.
"""

import math
from dataclasses import dataclass
from functools import cache, partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from mtp.config import ModelConfig
from mtp.draft_head import MTPHead
from mtp.model import Qwen35, forward_documents
from mtp.shapes import Array, Bool, Float32, Int32
from train.data import Batch
from train.losses import RowScores, mean_valid, score_rows
from train.unroll import Packing, align, same_document, unroll


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Params:
    """The trunk and its head: in float32 what is trained, in the compute dtype what runs."""

    model: Qwen35
    head: MTPHead

    @classmethod
    def init(cls, config: ModelConfig, seed: int, dtype: DTypeLike = jnp.float32) -> "Params":
        """Fresh parameters."""
        rngs = nnx.Rngs(seed)
        return cls(Qwen35(config, rngs, dtype), MTPHead(config, rngs, dtype))

    def cast(self, dtype: DTypeLike) -> "Params":
        """Each parameter in the dtype that a model of this dtype has it in."""
        return jax.tree.map(lambda x, like: x.astype(like.dtype), self, _served(self.model.config, dtype))


@cache
def _served(config: ModelConfig, dtype: DTypeLike) -> Params:
    return jax.eval_shape(lambda: Params.init(config, 0, dtype))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All that a step changes. What else a run depends on is its config and the number of the step."""

    params: Params
    # first and second moments, and the count that corrects their bias
    moments: optax.OptState
    # steps done
    step: Int32[Array, ""]


SCHEDULES = ("cosine", "wsd")


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW and its schedule.

    Raises:
        ValueError: naming the field that is out of range.
    """

    learning_rate: float  # peak
    final_fraction: float  # of the peak, at the last step
    warmup_steps: int
    weight_decay: float  # of matrices; vectors (norms, A_log, dt_bias) have none
    beta1: float = 0.9
    beta2: float = 0.95
    clip_norm: float = 1.0
    # behind the warmup: "cosine", or "wsd", which stays at the peak and goes down linearly over the last steps
    schedule: str = "cosine"
    decay_fraction: float = 0.2  # of all steps; of wsd

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(f"optimizer.schedule={self.schedule!r} must be one of {', '.join(SCHEDULES)}")
        if not 0 < self.decay_fraction <= 1:
            raise ValueError(f"optimizer.decay_fraction={self.decay_fraction} must be in (0, 1]")

    def rate(self, step: int, total: int) -> float:
        """The learning rate of the step that follows `step` done ones of `total`: linear warmup, then the schedule."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        after = total - self.warmup_steps
        # the share of the way down that is behind this step
        if self.schedule == "wsd":
            falling = max(min(self.decay_fraction * total, after), 1)
            down = min(max((step + 1 - total + falling) / falling, 0.0), 1.0)
            left = 1.0 - down
        else:
            left = 0.5 * (1.0 + math.cos(math.pi * min((step + 1 - self.warmup_steps) / max(after, 1), 1.0)))
        return self.learning_rate * (self.final_fraction + (1.0 - self.final_fraction) * left)

    def transform(self) -> optax.GradientTransformation:
        """Gradients to the step at learning rate 1, downhill."""
        return optax.chain(
            optax.clip_by_global_norm(self.clip_norm),
            optax.scale_by_adam(self.beta1, self.beta2),
            optax.add_decayed_weights(
                self.weight_decay, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
            ),
            optax.scale(-1.0),
        )


@dataclass(frozen=True)
class LossSettings:
    """How the head is trained beside the trunk: per depth, KL to the trunk's distribution plus some likelihood."""

    num_depths: int  # k, drafts that the head learns to make
    head_weight: float  # of the head's loss (a mean over depths) beside the trunk's
    likelihood_weight: float  # of the text's likelihood beside the KL
    joint: bool  # the head's loss also shapes the trunk, the embedding and the unembedding
    chunk_rows: int  # rows whose logits exist at a time


@dataclass(frozen=True)
class ComputeSettings:
    """How the forward pass is computed."""

    dtype: str  # of activations and matmuls: "bfloat16" or "float32"
    precision: str  # of the chunked delta rule's float32 matmuls: "default" (TF32 on GPUs) or "highest"
    remat: bool  # recompute layers in the backward pass; slower, and less memory


@dataclass(frozen=True)
class StepSettings:
    """The static half of a step."""

    optimizer: OptimizerSettings
    loss: LossSettings
    compute: ComputeSettings


@partial(jax.jit, static_argnames=("config", "settings", "seed"))
def init_state(config: ModelConfig, settings: StepSettings, seed: int) -> TrainState:
    """A state before its first step."""
    params = Params.init(config, seed)
    return TrainState(params, settings.optimizer.transform().init(params), jnp.zeros((), jnp.int32))


def score_batch(
    params: Params, batch: Batch, loss: LossSettings, compute: ComputeSettings
) -> tuple[RowScores, Bool[Array, "B T R"]]:
    """Every prediction of the trunk and of each depth, scored at the row of its target, and which of them count."""
    dtype = jnp.dtype(compute.dtype)
    # without `joint` the head sees a trunk that is a constant, as when it is trained on a frozen one
    seen = (lambda x: x) if loss.joint else lax.stop_gradient
    packing = Packing.of(batch.documents)
    run = params.cast(dtype)
    precision = lax.Precision[compute.precision.upper()]
    hidden = forward_documents(run.model, batch.tokens, packing.starts, packing.attend, precision, compute.remat)
    outputs = unroll(run.head, seen(run.model), batch.tokens, seen(hidden), packing, loss.num_depths, compute.remat)
    scores = score_rows(
        hidden,
        align(outputs),
        batch.tokens,
        # the cast is inside the chunk, so that the chunks' gradients meet in float32
        lambda rows: params.cast(dtype).model.unembed(rows),
        lambda rows: seen(params).cast(dtype).model.unembed(rows),
        loss.chunk_rows,
    )
    return scores, same_document(batch.documents, loss.num_depths)


def objective(
    params: Params, batch: Batch, loss: LossSettings, compute: ComputeSettings
) -> tuple[Float32[Array, ""], dict[str, Array]]:
    """The loss, each depth and the trunk a mean over its own valid rows, and the figures worth logging."""
    scores, valid = score_batch(params, batch, loss, compute)
    trunk = mean_valid(scores.trunk_nll, valid[..., 0])
    kl = mean_valid(scores.kl, valid[..., 1:])
    nll = mean_valid(scores.draft_nll, valid[..., 1:])
    head = jnp.mean(kl + loss.likelihood_weight * nll)
    figures = {
        "trunk_nll": trunk,
        "draft_nll": nll,
        "kl": kl,
        "overlap": mean_valid(scores.overlap, valid[..., 1:]),
        "agree": mean_valid(scores.agree, valid[..., 1:]),
    }
    return trunk + loss.head_weight * head, figures


@partial(jax.jit, static_argnames=("settings",), donate_argnames=("state",))
def train_step(
    state: TrainState, batch: Batch, learning_rate: Float32[Array, ""], settings: StepSettings
) -> tuple[TrainState, dict[str, Array]]:
    """The state after one step, and the step's figures (scalars, and one value a depth)."""
    gradient = jax.value_and_grad(objective, has_aux=True)
    (loss, figures), grads = gradient(state.params, batch, settings.loss, settings.compute)
    # optax raises a Python float to the power of an integer array, which strict promotion refuses
    with jax.numpy_dtype_promotion("standard"):
        updates, moments = settings.optimizer.transform().update(grads, state.moments, state.params)
    params = jax.tree.map(lambda x, u: x + learning_rate * u, state.params, updates)
    figures |= {"loss": loss, "gradient_norm": jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))}
    return TrainState(params, moments, state.step + 1), figures


@partial(jax.jit, static_argnames=("loss", "compute"))
def eval_step(
    params: Params, batch: Batch, loss: LossSettings, compute: ComputeSettings
) -> tuple[RowScores, Bool[Array, "B T R"]]:
    """`score_batch` without a gradient."""
    return score_batch(params, batch, loss, compute)
