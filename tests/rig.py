"""The small model that the decoding tests share: four layers, random weights of gain 0.5, float32, and its lanes."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from infer import decode
from infer.decode import Generation, Request
from mtp import cache as kv
from mtp import draft_head, weights
from mtp.config import ModelConfig
from mtp.kernels.sampling import Sampling
from tests.goldens import tiny_checkpoints

CONFIG = ModelConfig.tiny()
NUM_DRAFT_TOKENS = 3
PAGE_SIZE = 16

prefill = jax.jit(draft_head.prefill)
first_token = jax.jit(decode.first_token)
plain_step = jax.jit(decode.plain_step)


@cache
def loaded() -> weights.Loaded:
    """The model and its head."""
    return weights.from_tensors(CONFIG, tensors(), jnp.float32)


def tensors() -> dict[str, np.ndarray]:
    """The checkpoint it is made of."""
    return tiny_checkpoints.tensors(CONFIG.to_hf(), seed=5)


def lanes(num_lanes: int, capacity: int, dtype: DTypeLike = jnp.float32) -> kv.Cache:
    """Empty lanes that hold `capacity` tokens each, their pages dealt out in no order."""
    per_lane = -(-capacity // PAGE_SIZE)
    empty = kv.init(
        CONFIG,
        num_lanes=num_lanes,
        num_pages=num_lanes * per_lane,
        page_size=PAGE_SIZE,
        pages_per_lane=per_lane,
        num_draft_tokens=NUM_DRAFT_TOKENS,
        dtype=dtype,
    )
    deal = np.random.default_rng(1).permutation(num_lanes * per_lane).astype(np.int32)
    return replace(empty, page_table=jnp.asarray(deal.reshape(num_lanes, per_lane)))


def request(
    num_lanes: int,
    max_tokens: int | list[int],
    *,
    stop_ids: list[list[int]] | None = None,
    min_tokens: int = 0,
    num_draft_tokens: int | list[int] = NUM_DRAFT_TOKENS,
    sampling: Sampling | None = None,
) -> Request:
    """What the lanes are asked for: greedy replies unless `sampling` is given."""
    each = lambda value: jnp.broadcast_to(jnp.asarray(value, jnp.int32), (num_lanes,))  # noqa: E731
    stops = np.full((num_lanes, 4), -1, np.int32)
    for lane, ids in enumerate(stop_ids or []):
        stops[lane, : len(ids)] = ids
    return Request(
        sampling=Sampling.alike(num_lanes, temperature=0.0) if sampling is None else sampling,
        stop_ids=jnp.asarray(stops),
        min_tokens=each(min_tokens),
        max_tokens=each(max_tokens),
        num_draft_tokens=each(num_draft_tokens),
        log_probs=each(-1),
    )


def prompts(lengths: list[int], seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """Random prompts of these lengths, padded to a common one: tokens [B, T] and lengths [B]."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, CONFIG.vocab_size, (len(lengths), max(lengths))).astype(np.int32)
    return jnp.asarray(tokens), jnp.asarray(lengths, jnp.int32)


def started(asked: Request, tokens: jax.Array, lengths: jax.Array, capacity: int, max_reply: int) -> Generation:
    """Lanes that have read their prompts and chosen their first token."""
    model = loaded()
    hidden, filled = prefill(model.model, model.head, lanes(len(lengths), capacity), tokens, lengths)
    everyone = jnp.ones(lengths.shape, bool)
    gen = decode.begin(filled, max_reply)
    return first_token(model.model, gen, asked, hidden, lengths - 1, everyone)


def replies(gen: Generation) -> list[list[int]]:
    """Each lane's reply so far."""
    return [row[:count].tolist() for row, count in zip(np.asarray(gen.tokens), np.asarray(gen.num_tokens), strict=True)]
