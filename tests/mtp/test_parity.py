"""The model against transformers' stored outputs, against the float64 oracle, and against itself through the cache.

Ten tiny configs that differ in every ratio (`tests/goldens`). Seven lanes of unequal length share each call, so that
one compiled program covers every length. Everything is float32 on the CPU.
"""

from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp import draft_head
from mtp.cache import Cache, commit, init, set_last_token
from mtp.config import ModelConfig
from mtp.draft_head import MTPHead, draft_rows
from mtp.model import Qwen35, forward
from mtp.weights import from_tensors
from tests import oracle
from tests.goldens import tiny_checkpoints

NAMES = tuple(tiny_checkpoints.CONFIGS)
# Every width of convolution, with and without attention, tied and untied.
DECODED = ("published_ratios", "odd_widths", "wide_values", "linear_only", "single_layer")
LANES, PAGE_SIZE, MAX_LENGTH, NUM_DRAFT_TOKENS = 7, 16, 300, 3
# Float32 against float32 that sums in another order, through all layers; the oracle is float64.
REFERENCE, ORACLE, THROUGH_CACHE = 1e-4, 5e-6, 2e-5

# Compiling is nearly all of the time here; unoptimised code does the same arithmetic.
COMPILE = {"xla_backend_optimization_level": 0}

prefill = jax.jit(draft_head.prefill, compiler_options=COMPILE)
unembed = jax.jit(Qwen35.unembed, compiler_options=COMPILE)


@dataclass(frozen=True)
class Case:
    """One tiny model, its stored outputs, and the last row of a pass over all of its tokens."""

    text: dict[str, Any]
    tensors: dict[str, np.ndarray]
    golden: dict[str, np.ndarray]
    model: Qwen35
    head: MTPHead
    # seven lanes: the first `golden["lengths"]` tokens each, in one call
    hidden: jax.Array
    filled: Cache

    def logits(self, hidden: jax.Array | np.ndarray) -> np.ndarray:
        return np.asarray(unembed(self.model, jnp.asarray(hidden)))


@cache
def stored(name: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The weights and golden arrays of a config; the weights are those the arrays were made with."""
    with np.load(Path(tiny_checkpoints.__file__).parent / f"{name}.npz") as file:
        golden = dict(file)
    tensors = tiny_checkpoints.tensors(tiny_checkpoints.CONFIGS[name], int(golden["seed"]))
    np.testing.assert_allclose(tiny_checkpoints.checksums(tensors), golden["weight_checksums"], rtol=1e-6, atol=1e-6)
    return tensors, golden


def empty_cache(config: ModelConfig) -> Cache:
    """Seven lanes with room for every token, their pages dealt out in no order."""
    per_lane = -(-(MAX_LENGTH + NUM_DRAFT_TOKENS + 1) // PAGE_SIZE)
    empty = init(
        config,
        num_lanes=LANES,
        num_pages=LANES * per_lane,
        page_size=PAGE_SIZE,
        pages_per_lane=per_lane,
        num_draft_tokens=NUM_DRAFT_TOKENS,
        dtype=jnp.float32,
    )
    pages = np.random.default_rng(3).permutation(LANES * per_lane).astype(np.int32)
    return replace(empty, page_table=jnp.asarray(pages.reshape(LANES, per_lane)))


@cache
def load(name: str) -> Case:
    tensors, golden = stored(name)
    loaded = from_tensors(ModelConfig.from_hf(tiny_checkpoints.CONFIGS[name]), tensors, dtype=jnp.float32)
    assert loaded.head is not None
    tokens = jnp.asarray(np.tile(golden["token_ids"], (LANES, 1)))
    lengths = jnp.asarray(golden["lengths"].astype(np.int32))
    hidden, filled = prefill(loaded.model, loaded.head, empty_cache(loaded.config), tokens, lengths)
    text = tiny_checkpoints.CONFIGS[name]["text_config"]
    return Case(text, tensors, golden, loaded.model, loaded.head, hidden, filled)


def assert_close(ours: np.ndarray, theirs: np.ndarray, tolerance: float) -> None:
    """Largest absolute difference within the tolerance; a NaN is not."""
    assert ours.shape == theirs.shape
    difference = np.abs(np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)).max()
    assert difference <= tolerance, f"{difference:.3g} > {tolerance}"


@pytest.mark.parametrize("name", NAMES)
def test_oracle_matches_goldens(name: str) -> None:
    tensors, golden = stored(name)
    text, token_ids = tiny_checkpoints.CONFIGS[name]["text_config"], golden["token_ids"]
    hidden = oracle.trunk(token_ids, tensors, text)
    logits = oracle.unembed(hidden, tensors)
    assert_close(hidden[golden["positions"]], golden["hidden"], ORACLE)
    assert_close(logits[golden["positions"]], golden["logits"], ORACLE)
    assert_close(hidden[golden["lengths"] - 1], golden["last_hidden"], ORACLE)
    assert_close(logits[golden["lengths"] - 1], golden["last_logits"], ORACLE)

    drafted = oracle.mtp(np.roll(token_ids, -1), hidden, tensors, text)
    assert_close(drafted[golden["positions"]], golden["mtp_hidden"], ORACLE)
    length, steps = int(golden["prompt_length"]), len(golden["draft_hidden"])
    fed = token_ids[length : length + steps]
    _, _, outputs = oracle.draft(token_ids[:length], steps, tensors, text, fed=fed)
    assert_close(outputs, golden["draft_hidden"], ORACLE)


@pytest.mark.parametrize("name", NAMES)
def test_logits_match_transformers(name: str) -> None:
    case = load(name)
    golden = case.golden
    logits = case.logits(case.hidden)
    assert golden["lengths"][-1] == MAX_LENGTH
    assert_close(logits[-1, golden["positions"]], golden["logits"], REFERENCE)
    assert_close(np.asarray(case.hidden)[-1, golden["positions"]], golden["hidden"], REFERENCE)
    # A lane of its own for each length: 1, 5, and both sides of one and two chunks.
    assert_close(logits[np.arange(LANES), golden["lengths"] - 1], golden["last_logits"], REFERENCE)


@partial(jax.jit, compiler_options=COMPILE)
def draft_step(
    head: MTPHead, model: Qwen35, cache: Cache, tokens: jax.Array, hidden: jax.Array, starts: jax.Array
) -> tuple[jax.Array, Cache]:
    """One drafting step in every lane: the head's output [B, D] for the row (token, hidden before it)."""
    ones = jnp.ones_like(starts)
    outputs, cache = draft_rows(head, model, cache, tokens[:, None], hidden[:, None], starts, ones)
    return outputs[:, 0], cache


def draft(case: Case, cache: Cache, fed: np.ndarray) -> np.ndarray:
    """The head's outputs [B, k, D] behind a prefill, when its steps read `fed` [B, k]."""
    hidden, outputs = cache.recent_hidden[:, 0], []
    for step in range(fed.shape[1]):
        starts = cache.lengths + jnp.int32(step)
        hidden, cache = draft_step(case.head, case.model, cache, jnp.asarray(fed[:, step]), hidden, starts)
        outputs.append(np.asarray(hidden))
    return np.stack(outputs, axis=1)


@pytest.mark.parametrize("name", NAMES)
def test_head_recursion_matches_the_oracle(name: str) -> None:
    case = load(name)
    token_ids, lengths = case.golden["token_ids"], case.golden["lengths"]
    rng = np.random.default_rng(11)
    fed = rng.integers(0, case.text["vocab_size"], (LANES, NUM_DRAFT_TOKENS), dtype=np.int32)
    # As after a real prefill, the first token fed is the lane's last token.
    filled = set_last_token(case.filled, jnp.asarray(fed[:, 0]), jnp.ones(LANES, bool))
    np.testing.assert_array_equal(filled.last_token, fed[:, 0])
    ours = draft(case, filled, fed)
    for lane, length in enumerate(lengths):
        _, drafts, theirs = oracle.draft(token_ids[:length], NUM_DRAFT_TOKENS, case.tensors, case.text, fed=fed[lane])
        assert_close(ours[lane], theirs, THROUGH_CACHE)
        logits = case.logits(ours[lane])
        assert_close(logits, oracle.unembed(theirs, case.tensors), THROUGH_CACHE)
        np.testing.assert_array_equal(logits.argmax(axis=-1), drafts)


@pytest.mark.parametrize("name", NAMES)
def test_head_matches_transformers_parts(name: str) -> None:
    case = load(name)
    token_ids, golden = case.golden["token_ids"], case.golden
    lane = int(np.flatnonzero(golden["lengths"] == golden["prompt_length"])[0])
    length, steps = int(golden["prompt_length"]), len(golden["draft_hidden"])
    fed = np.tile(token_ids[length : length + steps], (LANES, 1))
    assert_close(draft(case, case.filled, fed)[lane], golden["draft_hidden"], REFERENCE)


RAGGED = -1  # a lane whose chunk length is drawn for each call, 0 included


@pytest.mark.parametrize(
    ("name", "sizes", "total"),
    [
        ("odd_widths", (1, 1, 1, 1, 1, 1, 1), 20),
        ("published_ratios", (1, 2, 3, 4, 7, 8, RAGGED), 70),
        ("published_ratios", (63, 64, 65, 100, 128, 130, RAGGED), 300),
        ("odd_widths", (63, 64, 65, 100, 128, 130, RAGGED), 300),
    ],
)
def test_prefill_in_chunks_equals_one_pass(name: str, sizes: tuple[int, ...], total: int) -> None:
    case = load(name)
    rng = np.random.default_rng(total)
    token_ids, lanes, rows = case.golden["token_ids"], np.arange(LANES), max(sizes)
    cache, done = empty_cache(case.model.config), np.zeros(LANES, np.int32)
    hidden = np.full((LANES, total, case.text["hidden_size"]), np.nan, np.float32)
    while (done < total).any():
        wanted = np.where(np.equal(sizes, RAGGED), rng.integers(0, rows + 1, LANES), sizes)
        count = np.minimum(wanted, total - done).astype(np.int32)
        # Rows behind `count` hold tokens that must not matter.
        tokens = rng.integers(0, case.text["vocab_size"], (LANES, rows), dtype=np.int32)
        for lane in lanes:
            tokens[lane, : count[lane]] = token_ids[done[lane] :][: count[lane]]
        chunk, cache = prefill(case.model, case.head, cache, jnp.asarray(tokens), jnp.asarray(count))
        for lane in lanes:
            hidden[lane, done[lane] :][: count[lane]] = np.asarray(chunk)[lane, : count[lane]]
        done += count
    np.testing.assert_array_equal(cache.lengths, done)
    whole = np.asarray(case.hidden)[-1:, :total]
    assert_close(hidden, np.broadcast_to(whole, hidden.shape), THROUGH_CACHE)
    logits = case.logits(hidden)
    assert_close(logits, np.broadcast_to(case.logits(whole), logits.shape), THROUGH_CACHE)

    # The head was primed across the chunk edges as in one pass.
    tokens = jnp.asarray(np.tile(token_ids, (LANES, 1)))
    count = jnp.full((LANES,), total, jnp.int32)
    _, once = prefill(case.model, case.head, empty_cache(case.model.config), tokens, count)
    fed = rng.integers(0, case.text["vocab_size"], (LANES, NUM_DRAFT_TOKENS), dtype=np.int32)
    assert_close(draft(case, cache, fed), draft(case, once, fed), THROUGH_CACHE)


@partial(jax.jit, compiler_options=COMPILE)
def decode_step(
    model: Qwen35, cache: Cache, token: jax.Array, next_token: jax.Array, live: jax.Array
) -> tuple[jax.Array, Cache]:
    """One token in each live lane: its hidden row [B, D]."""
    count = live.astype(jnp.int32)
    hidden, cache = forward(model, cache, token[:, None], count, keep=False)
    return hidden[:, 0], commit(cache, hidden, next_token[:, None], count)


@pytest.mark.parametrize("name", DECODED)
def test_decoding_equals_one_pass(name: str) -> None:
    case = load(name)
    token_ids, whole = case.golden["token_ids"], case.logits(case.hidden[-1])
    cache, start = case.filled, case.golden["lengths"].astype(np.int32)
    # The lanes start at 1, 5, 63, 64, 65, 130 and 300; the last has no token left and stays idle.
    steps = 70
    for step in range(steps):
        position = start + step
        live = position < MAX_LENGTH - 1
        at = np.minimum(position, MAX_LENGTH - 2)
        hidden, cache = decode_step(
            case.model, cache, jnp.asarray(token_ids[at]), jnp.asarray(token_ids[at + 1]), jnp.asarray(live)
        )
        assert_close(case.logits(hidden)[live], whole[position[live]], THROUGH_CACHE)
    np.testing.assert_array_equal(cache.lengths, start + np.minimum(steps, np.maximum(MAX_LENGTH - 1 - start, 0)))
