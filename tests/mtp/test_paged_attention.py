"""The paged attention kernel against its definition: in interpret mode or, where there is a GPU, for real.

Tolerance: bf16 outputs of order one against the float32 reference on the same bf16 inputs, 2e-2 absolute (seen: 8e-3).
Every entry of the pool that no lane has written is NaN, and so are the pages of idle lanes.
"""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp.kernels import paged_attention as op
from mtp.kernels import paged_attention_mgpu as mgpu

ON_GPU = jax.default_backend() == "gpu"
TOLERANCE = 2e-2
GROUPS, CAPACITY = 2, 200
# (first row's cache index, rows): empty, length one, idle, page and tile borders, two tiles, three; a page borrower
LANES = ((0, 3), (1, 1), (40, 0), (16, 2), (61, 3), (63, 3), (125, 3), (189, 3), (150, 3))
OWNER, BORROWER = 7, 8
TWO_SPLITS = mgpu.Tiles(programs=1, min_splits=2)


class Case:
    """Lanes in a pool that is NaN elsewhere; the borrower's first pages are the owner's."""

    def __init__(
        self,
        seed: int = 0,
        lanes: tuple[tuple[int, int], ...] = LANES,
        rows: int = 3,
        heads: int = 4,
        dim: int = 64,
        page: int = 16,
        first: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        draw = lambda *shape: rng.normal(size=shape).astype(np.float32).astype(jnp.bfloat16)  # noqa: E731
        self.page, pages = page, -(-CAPACITY // page)
        pool = len(lanes) * pages
        self.queries = draw(len(lanes), rows, heads, dim)
        self.keys, self.values = (draw(pool, page, GROUPS, dim) for _ in range(2))
        self.starts, self.counts = np.array(lanes, np.int32).T
        self.table = rng.permutation(pool).reshape(len(lanes), pages).astype(np.int32)
        if lanes is LANES:
            shared = self.starts[BORROWER] // page
            self.table[BORROWER, :shared] = self.table[OWNER, :shared]
        written = np.zeros((pool, page), bool)
        for lane, (start, count) in enumerate(lanes):
            end = start + count if count else 0
            for index in range(first, end):
                written[self.at(lane, index)] = True
            self.table[lane, -(-end // page) :] = pool
        for x in (self.keys, self.values):
            x[~written] = np.nan

    def at(self, lane: int, index: int) -> tuple[int, int]:
        """Where a cache index of a lane lies in the pool."""
        return int(self.table[lane, index // self.page]), index % self.page

    def arrays(self) -> tuple[jax.Array, ...]:
        names = ("queries", "keys", "values", "table", "starts", "counts")
        return tuple(jnp.asarray(getattr(self, name)) for name in names)

    def live(self, x: jax.Array) -> np.ndarray:
        """The rows that a lane really has, [rows, N, H] in float32."""
        return np.asarray(x, np.float32)[np.arange(x.shape[1])[None, :] < self.counts[:, None]]


@partial(jax.jit, static_argnames=("first", "tiles"))
def kernel(arrays: tuple[jax.Array, ...], first: int = 0, tiles: mgpu.Tiles = TWO_SPLITS) -> jax.Array:
    return mgpu.paged_attention(*arrays, first, tiles=tiles, interpret=not ON_GPU)


@partial(jax.jit, static_argnames="first")
def reference(arrays: tuple[jax.Array, ...], first: int = 0) -> jax.Array:
    queries, keys, values, *rest = arrays
    return op.reference(*(x.astype(jnp.float32) for x in (queries, keys, values)), *rest, first)


@pytest.fixture(autouse=True)
def no_races(capfd: pytest.CaptureFixture) -> Iterator[None]:
    """Interpret mode prints the races that it finds."""
    yield
    assert "RACE" not in capfd.readouterr().out


def assert_near(case: Case, got: jax.Array, want: jax.Array) -> None:
    assert np.isfinite(case.live(want)).all()
    np.testing.assert_allclose(case.live(got), case.live(want), rtol=0, atol=TOLERANCE)


def test_kernel_equals_reference_and_a_lane_does_not_depend_on_its_neighbours() -> None:
    case = Case()
    together = kernel(case.arrays())
    assert_near(case, together, reference(case.arrays()))
    assert not np.asarray(together, np.float32)[case.counts == 0].any()
    case.counts[[lane for lane in range(len(LANES)) if lane not in (3, OWNER)]] = 0
    np.testing.assert_array_equal(case.live(kernel(case.arrays())), case.live(together))


def test_index_0_is_not_read_where_the_first_is_1() -> None:
    """It was never written; a lane of one entry sits right behind it."""
    case = Case(1, ((1, 3), (64, 3), (2, 1)), first=1)
    assert_near(case, kernel(case.arrays(), 1), reference(case.arrays(), 1))


def test_one_split_equals_two() -> None:
    """Within rounding: 1e-2, a bf16 step of outputs of order one."""
    case = Case(2)
    one = kernel(case.arrays(), tiles=mgpu.Tiles(stages=2, programs=1, min_splits=1))
    np.testing.assert_allclose(case.live(one), case.live(kernel(case.arrays())), rtol=0, atol=1e-2)


def test_what_is_not_finite_spoils_the_rows_that_see_it_and_no_others() -> None:
    """NaN and infinite values and a NaN key of later drafts, an old value, and a value in a page of both neighbours."""
    case = Case(3)
    case.values[(*case.at(4, 62), 1, 5)] = np.nan
    case.values[(*case.at(5, 65), 0, 0)] = -np.inf
    case.keys[case.at(6, 126)] = np.nan
    case.values[(*case.at(OWNER, 190), 0, 7)] = np.nan
    case.values[(*case.at(BORROWER, 149), 0, 7)] = np.inf
    got, want = kernel(case.arrays()), reference(case.arrays())
    spoilt = np.zeros((len(LANES), 3), bool)
    spoilt[4, 1:] = spoilt[5, 2:] = spoilt[6, 1:] = spoilt[OWNER, 1:] = spoilt[BORROWER] = True
    for x in (got, want):
        nan = np.isnan(case.live(x))
        np.testing.assert_array_equal(nan, np.broadcast_to(case.live(spoilt)[:, None, None] > 0, nan.shape))
    np.testing.assert_allclose(case.live(got), case.live(want), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("page, dim, heads, rows", [(8, 64, 2, 1), (64, 256, 12, 4), (128, 128, 6, 2)])
def test_other_shapes(page: int, dim: int, heads: int, rows: int) -> None:
    case = Case(page, ((130, rows), (0, 0), (63, 1)), rows, heads, dim, page)
    assert_near(case, kernel(case.arrays()), reference(case.arrays()))


def test_a_prefill_is_cut_into_windows() -> None:
    """70 rows of 4 heads over 2 KV heads are three windows of 32."""
    case = Case(7, ((90, 70), (0, 33), (5, 0)), rows=70)
    assert_near(case, kernel(case.arrays()), reference(case.arrays()))


@pytest.mark.parametrize("lanes, first", [(1, 0), (16, 1)])
def test_full_size_lowers_for_a_gpu(lanes: int, first: int) -> None:
    """24 query and 4 KV heads of 256, four rows, 32k tokens a lane: layouts, copies and shared memory are accepted."""
    bf16 = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    int32 = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    pages = bf16((4096, 64, 4, 256))
    arguments = bf16((lanes, 4, 24, 256)), pages, pages, int32((lanes, 512)), int32((lanes,)), int32((lanes,))
    traced = jax.jit(partial(mgpu.paged_attention, first=first)).trace(*arguments)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_shapes_that_do_not_fit_are_refused_by_name() -> None:
    queries, keys, values, table, *rest = Case().arrays()
    assert mgpu.unfit(queries, keys, values, table) is None
    wide = [x.astype(jnp.float32) for x in (queries, keys, values)]
    for arrays, reason in (
        ((*wide, table), "float32"),
        ((queries[..., :32], keys[..., :32], values[..., :32], table), "head dim 32"),
        ((queries, keys[:, :12], values[:, :12], table), "page size 12"),
        ((jnp.repeat(queries, 40, axis=2), keys, values, table), "no groups of up to 64"),
    ):
        with pytest.raises(ValueError, match=reason):
            op.paged_attention(*arrays, *rest, implementation="mosaic")


def test_splits_follow_from_shapes() -> None:
    """Enough programs for a few lanes, never more splits than tiles."""
    assert [mgpu.Tiles().splits(lanes * 4, 512 * 64) for lanes in (1, 16, 64, 160)] == [64, 4, 2, 2]
    assert mgpu.Tiles().splits(4, 100) == 2
