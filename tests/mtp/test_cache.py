"""Pages, lanes and snapshots as plain values: what is written where, what is forgotten, what is refused."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp import cache as kv
from mtp.kernels.paged_attention import paged_attention
from tests import rig

PAGES, SIZE, GROUPS, DIM = 6, 4, 2, 8


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def empty_pages(fill: float = jnp.nan) -> kv.Pages:
    pool = jnp.full((PAGES, SIZE, GROUPS, DIM), fill, jnp.float32)
    return kv.Pages(pool, pool)


def test_append_writes_each_lanes_rows_behind_its_own_start_and_nothing_else() -> None:
    """A lane across a page border, an idle lane, and a lane whose last rows have no page."""
    table = jnp.asarray([[5, 0], [1, 2], [3, PAGES]], jnp.int32)
    rows = draw(3, 5, GROUPS, DIM)
    starts, counts = jnp.asarray([2, 1, 2], jnp.int32), jnp.asarray([4, 0, 5], jnp.int32)
    pages = kv.append(empty_pages(), table, starts, counts, rows, 2 * rows)
    want = np.full((PAGES, SIZE, GROUPS, DIM), np.nan, np.float32)
    want[5, 2:], want[0, :2], want[3, 2:] = rows[0, :2], rows[0, 2:4], rows[2, :2]
    np.testing.assert_array_equal(pages.keys, want)
    np.testing.assert_array_equal(pages.values, 2 * want)


@pytest.mark.parametrize("first", [0, 1])
def test_paged_attention_equals_dense_float64(first: int) -> None:
    """Unequal lanes, one idle, one with a full last page; every other entry of the pool is NaN. Tolerance 1e-5."""
    heads, rows = 6, 3
    table = jnp.asarray([[4, 2], [0, 1], [3, 5]], jnp.int32)
    starts, counts = np.array([5, 0, 2]), np.array([3, 0, 2])
    queries, keys, values = draw(3, rows, heads, DIM), draw(3, 8, GROUPS, DIM, seed=1), draw(3, 8, GROUPS, DIM, seed=2)
    held = jnp.asarray(starts + counts, jnp.int32)
    pages = kv.append(empty_pages(), table, jnp.zeros(3, jnp.int32), held, keys, values)
    if first:
        # index 0 of the MTP layer is never written
        pages = kv.Pages(*(x.at[table[:, 0], 0].set(jnp.nan) for x in (pages.keys, pages.values)))
    got = paged_attention(
        queries,
        pages.keys,
        pages.values,
        table,
        jnp.asarray(starts, jnp.int32),
        jnp.asarray(counts, jnp.int32),
        first,
    )
    assert np.isfinite(got).all()
    for lane in (0, 2):
        for row in range(counts[lane]):
            seen = slice(first, starts[lane] + row + 1)
            for head in range(heads):
                group = head // (heads // GROUPS)
                k, v = (np.asarray(x[lane, seen, group], np.float64) for x in (keys, values))
                scores = k @ np.asarray(queries[lane, row, head], np.float64) / np.sqrt(DIM)
                odds = np.exp(scores - scores.max())
                np.testing.assert_allclose(got[lane, row, head], odds @ v / odds.sum(), rtol=0, atol=1e-5)


def filled(lengths: list[int], seed: int = 0) -> kv.Cache:
    """Lanes that have read random prompts."""
    model = rig.loaded()
    tokens, counts = rig.prompts(lengths, seed)
    return rig.prefill(model.model, model.head, rig.lanes(len(lengths), 48), tokens, counts)[1]


def test_a_released_lane_holds_nothing_of_its_request() -> None:
    cache = kv.release(filled([9, 12]), 1)
    for leaf in jax.tree.leaves((cache.delta, cache.lengths, cache.num_pending, cache.num_recent, cache.recent_hidden)):
        assert not np.asarray(leaf[1]).any()
    assert (np.asarray(cache.page_table[1]) == cache.num_pages).all()


def test_a_lane_used_again_equals_a_fresh_one_even_after_nan() -> None:
    """The old request left NaN in the state, in the pages and in the newest rows; the new one sees none of it."""
    model = rig.loaded()
    cache = filled([9, 12])
    spoil = lambda x: x.at[1].set(jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x  # noqa: E731
    mine = cache.page_table[1]
    poison = lambda pages: jax.tree.map(lambda x: x.at[mine].set(jnp.nan), pages)  # noqa: E731
    cache = replace(
        cache,
        delta=jax.tree.map(spoil, cache.delta),
        recent_hidden=spoil(cache.recent_hidden),
        attention=tuple(poison(pages) for pages in cache.attention),
        draft=poison(cache.draft),
    )
    tokens, _ = rig.prompts([12, 12], seed=7)
    counts = jnp.asarray([0, 12], jnp.int32)
    again, after = rig.prefill(model.model, model.head, kv.admit(cache, 1, mine), tokens, counts)
    fresh, alone = rig.prefill(model.model, model.head, rig.lanes(2, 48), tokens, counts)
    np.testing.assert_array_equal(again[1], fresh[1])
    np.testing.assert_array_equal(after.delta[0].state[1], alone.delta[0].state[1])


def test_a_snapshot_restored_on_another_lane_is_the_same_lane() -> None:
    cache = filled([9, 12])
    moved = kv.restore(cache, 0, kv.snapshot(cache, 1))
    for name in ("delta", "page_table", "lengths", "num_pending", "recent_hidden", "recent_tokens", "num_recent"):
        for whole, source in zip(
            jax.tree.leaves(getattr(moved, name)), jax.tree.leaves(getattr(cache, name)), strict=True
        ):
            np.testing.assert_array_equal(whole[0], source[1])
            np.testing.assert_array_equal(whole[1], source[1])


def test_inference_B15_a_snapshot_without_its_recurrent_part_is_refused() -> None:
    cache = filled([9, 12])
    kept = replace(kv.snapshot(cache, 1), delta=())
    with pytest.raises(ValueError, match="0 delta-rule layers and the model has 3"):
        kv.restore(cache, 0, kept)


def test_idle_lanes_keep_every_bit() -> None:
    """Neither a window nor a chunk of other lanes moves a lane that has no rows."""
    model = rig.loaded()
    before = filled([9, 12])
    tokens, _ = rig.prompts([12, 12], seed=3)
    _, after = rig.prefill(model.model, model.head, before, tokens, jnp.asarray([0, 5], jnp.int32))
    for name in ("delta", "lengths", "num_pending", "recent_hidden", "recent_tokens", "num_recent"):
        for x, y in zip(jax.tree.leaves(getattr(before, name)), jax.tree.leaves(getattr(after, name)), strict=True):
            np.testing.assert_array_equal(x[0], y[0], err_msg=name)
