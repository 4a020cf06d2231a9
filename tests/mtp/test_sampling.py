"""The transform of logits against a float64 twin that sorts; the counter noise, and what it depends on."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp.kernels import sampling
from mtp.kernels.sampling import (
    History,
    Sampling,
    WindowNoise,
    adjust_logits,
    forbid_tokens,
    process_logits,
    remember,
    sample,
    target_noise,
)
from tests.sampling_twin import adjusted, processed

SETTINGS = (
    dict(temperature=1.0),
    dict(temperature=0.0, top_k=3, top_p=0.5),
    dict(temperature=0.6, top_p=0.8),
    dict(temperature=1.7, top_k=5),
    dict(temperature=0.9, min_p=0.2),
    dict(temperature=1.3, top_k=12, top_p=0.7, min_p=0.15),
    dict(temperature=1.0, top_k=10_000, top_p=1.0, min_p=0.0),
    dict(temperature=2.0, top_p=1e-6),
)
process = jax.jit(process_logits)
plain_noise = jax.jit(target_noise, static_argnums=2)


@partial(jax.jit, static_argnums=1)
def all_noise(window: WindowNoise, vocab_size: int) -> dict[str, jax.Array]:
    """Everything a window of three drafts can ask for, one row of [B, V] or [B] for each offset."""
    num_lanes = window.position.shape[0]
    rows = [jnp.full(num_lanes, row, jnp.int32) for row in range(4)]
    yes, no = jnp.full(num_lanes, True), jnp.full(num_lanes, False)
    return {
        "draft": jnp.stack([window.draft("block", i, vocab_size) for i in range(3)], axis=1),
        "coupled": jnp.stack([window.draft("coupled", i, vocab_size) for i in range(3)], axis=1),
        "coins": window.coins(3),
        "synthetic": window.synthetic(3),
        "recover": jnp.stack([window.next_token(rows[i], yes, vocab_size) for i in range(3)], axis=1),
        "bonus": jnp.stack([window.next_token(row, no, vocab_size) for row in rows], axis=1),
        "target": window.target(4, vocab_size),
    }


def lanes(settings: tuple[dict, ...], bias: np.ndarray | None = None) -> Sampling:
    """One lane for each of `settings`."""
    each = [Sampling.alike(1, **s) for s in settings]
    stacked = jax.tree.map(lambda *x: jnp.concatenate(x), *each)
    return stacked if bias is None else Sampling(**(vars(stacked) | {"bias": jnp.asarray(bias)}))


@pytest.mark.parametrize("vocab_size", [1, 7, 1000])
def test_transform_equals_sorting_twin(vocab_size):
    """Support equal, probabilities within 2e-6, for eight settings in one batch, with and without a bias."""
    rng = np.random.default_rng(vocab_size)
    logits = rng.normal(0, 3, (len(SETTINGS), 3, vocab_size)).astype(np.float32)
    bias = rng.normal(0, 2, (len(SETTINGS), vocab_size)).astype(np.float32)
    bias[:, 1::3] = -np.inf
    for lane_bias in (None, bias):
        got = np.exp(np.asarray(process(jnp.asarray(logits), lanes(SETTINGS, lane_bias)), np.float64))
        for b, settings in enumerate(SETTINGS):
            for t in range(3):
                biased = logits[b, t] if lane_bias is None else logits[b, t] + lane_bias[b]
                want = processed(biased, **settings)
                np.testing.assert_array_equal(got[b, t] > 0, want > 0)
                np.testing.assert_allclose(got[b, t], want, atol=2e-6)


def rows_of_every_kind(vocab_size: int) -> np.ndarray:
    """Logits of rows that are peaked, flat, full of ties, all equal, and almost all forbidden: [5, V]."""
    rng = np.random.default_rng(vocab_size)
    rows = np.stack([rng.normal(0, scale, vocab_size) for scale in (4.0, 0.05, 2.0, 0.0, 1.0)])
    rows[2] = np.round(rows[2] * 2) / 2
    rows[4, rng.random(vocab_size) > 10 / vocab_size] = -np.inf
    rows[4, 0] = 0.5
    return rows.astype(np.float32)


@pytest.mark.parametrize("vocab_size", [50, 100, 1500, 20_000])
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(1, 1.0), (20, 0.95), (64, 0.1), (65, 0.95), (0, 0.95), (0, 0.5), (200, 1.0)]
)
def test_the_quick_search_and_the_general_one_equal_the_twin(vocab_size: int, top_k: int, top_p: float) -> None:
    """Support equal and probabilities within 2e-6, on rows that the candidates decide and rows that they don't."""
    logits = rows_of_every_kind(vocab_size)
    got = np.exp(np.asarray(process(logits[:, None], Sampling.alike(5, top_k=top_k, top_p=top_p)), np.float64))
    for row, (ours, theirs) in enumerate(zip(got[:, 0], logits, strict=True)):
        want = processed(theirs, top_k=top_k, top_p=top_p)
        np.testing.assert_array_equal(ours > 0, want > 0, err_msg=str(row))
        np.testing.assert_allclose(ours, want, atol=2e-6, err_msg=str(row))


def test_a_row_has_the_same_bits_whoever_is_beside_it() -> None:
    """Lanes of all settings, which need the general search for some of them, and one of nothing but NaN, against each
    row with a copy of itself beside it."""
    settings = (dict(top_k=20, top_p=0.95), dict(top_k=300), dict(top_p=0.9), dict(temperature=0.0), dict(top_k=3))
    logits = rows_of_every_kind(1500)[:, None].repeat(2, axis=1)
    logits[4, 1] = np.nan
    together = np.asarray(process(logits, lanes(settings)))
    assert np.isnan(together[4, 1]).all() and not np.isnan(together[:4]).any() and not np.isnan(together[4, 0]).any()
    for b, one in enumerate(settings):
        alone = process(logits[b : b + 1].repeat(5, axis=0), lanes((one,) * 5))
        np.testing.assert_array_equal(together[b], np.asarray(alone)[3])


def test_lanes_of_all_settings_beside_each_other_equal_the_twin() -> None:
    """Every pair of top-k and top-p in one batch, on rows of every kind; a row of NaN stays alone in that."""
    size = 1001
    settings = tuple(dict(top_k=k, top_p=p) for k in (0, 1, 20, 64, 65, 200, size) for p in (0.1, 0.95, 1.0))
    logits = np.broadcast_to(rows_of_every_kind(size), (len(settings), 5, size)).copy()
    logits[5, 2] = np.nan
    got = np.exp(np.asarray(process(logits, lanes(settings)), np.float64))
    for b, setting in enumerate(settings):
        for t in range(5):
            want = np.full(size, np.nan) if (b, t) == (5, 2) else processed(logits[b, t], **setting)
            np.testing.assert_array_equal(got[b, t] > 0, want > 0, err_msg=f"{setting} row {t}")
            np.testing.assert_allclose(got[b, t], want, atol=2e-6, err_msg=f"{setting} row {t}")


def test_an_infinite_logit_leaves_its_row_no_law() -> None:
    """Whichever search would be asked: the row is NaN, and the row beside it is not."""
    logits = np.random.default_rng(5).normal(0, 1, (6, 2, 1001)).astype(np.float32)
    logits[:, 0, 11] = np.inf
    filters = (
        {},
        dict(top_k=20),
        dict(top_k=200),
        dict(top_p=0.9),
        dict(top_k=20, top_p=0.9),
        dict(top_k=200, top_p=0.9),
    )
    got = np.asarray(process(logits, lanes(filters)))
    assert np.isnan(got[:, 0]).all() and not np.isnan(got[:, 1]).any()


def test_a_need_of_nan_is_never_reached() -> None:
    """As without a law: nothing is cut off, however many bits a pass decides."""
    gap = np.random.default_rng(6).exponential(1.0, (1, 1, 9)).astype(np.float32)
    for bits in (1, 4):
        got = jax.jit(sampling._smallest_gap, static_argnums=3)(
            gap, np.ones_like(gap), np.full((1, 1, 1), np.nan, "f"), bits
        )
        assert np.asarray(got).ravel().tolist() == [np.inf]


def test_the_smallest_gaps_are_those_of_a_sort() -> None:
    """Bit for bit, where chunks matter and where there are fewer than are asked for."""
    rng = np.random.default_rng(3)
    for size in (7, 64, 1100, 9000):
        gap = np.round(rng.exponential(1.0, (2, 2, size)), 2).astype(np.float32)
        got = np.asarray(jax.jit(sampling._smallest_gaps)(gap))
        want = np.full((2, 2, sampling.CANDIDATES), np.inf, np.float32)
        want[..., :size] = np.sort(gap, axis=-1)[..., : sampling.CANDIDATES]
        np.testing.assert_array_equal(got, want)


def test_one_bit_a_pass_and_four_find_the_same_gap() -> None:
    """Bit for bit, on ties, on flat rows, and where not enough is held."""
    rng = np.random.default_rng(4)
    gap = rng.exponential(1.0, (3, 2, 700)).astype(np.float32)
    gap[1] = np.round(gap[1], 1)
    gap[2, 1, 5:] = np.inf
    search = jax.jit(sampling._smallest_gap, static_argnums=3)
    for need in (1.0, 5.0, 150.0, 701.0):
        found = [np.asarray(search(gap, np.ones_like(gap), np.full((3, 1, 1), need), bits)) for bits in (1, 4)]
        np.testing.assert_array_equal(*found)
        order = np.sort(np.concatenate([gap, np.full((3, 2, 1), np.inf, np.float32)], axis=-1), axis=-1)
        np.testing.assert_array_equal(found[0], order[..., int(need) - 1 :][..., :1])


def test_every_order_of_the_filters_differs_from_ours():
    """On one row where each exchange of two neighbouring steps changes the support, ours is as documented."""
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    cases = (
        # top-p of the heated row needs three tokens, of the raw row two.
        (dict(temperature=2.0, top_p=0.65), 3),
        # top-k first leaves 4/7 >= 0.5 with one token; top-p first would leave two.
        (dict(temperature=1.0, top_k=2, top_p=0.5), 1),
        # min-p of the heated row: 0.1/0.4 -> 0.5.
        (dict(temperature=2.0, min_p=0.45), 4),
        # top-p 0.8 keeps three, min-p 0.6 then two of them.
        (dict(temperature=1.0, top_p=0.8, min_p=0.6), 2),
    )
    got = process(jnp.asarray(np.tile(logits, (len(cases), 1, 1))), lanes(tuple(c for c, _ in cases)))
    assert np.isfinite(np.asarray(got)).sum(-1).ravel().tolist() == [size for _, size in cases]


def test_ties_stay_or_go_together():
    """Equal logits across the border of top-k and top-p are all kept; greedy takes the first."""
    logits = jnp.asarray(np.tile(np.array([1.0, 3.0, 2.0, 2.0, 3.0, 2.0], np.float32), (4, 1, 1)))
    got = np.isfinite(
        np.asarray(process(logits, lanes((dict(top_k=1), dict(top_k=3), dict(top_p=0.6), dict(temperature=0.0)))))
    )[:, 0]
    best = [False, True, False, False, True, False]
    assert got.tolist() == [best, [False] + [True] * 5, best, [False, True] + [False] * 4]


def test_extremes_stay_finite_and_nan_stays_in_its_row():
    """Huge logits, forbidden tokens, a tiny temperature give proper rows; NaN touches no row nearby."""
    logits = np.zeros((4, 2, 5), np.float32)
    logits[0, 0] = [3e38, -3e38, 0.0, -np.inf, 1.0]
    logits[1, 1, 2] = np.nan
    logits[2] = [2.0, 2.0, 1.0, 0.0, -np.inf]
    settings = (dict(top_p=0.9), dict(top_k=2), dict(temperature=1e-6), dict(temperature=0.0))
    got = np.exp(np.asarray(process(jnp.asarray(logits), lanes(settings))))
    assert np.isnan(got[1, 1]).all()
    got[1, 1] = 0.2
    np.testing.assert_allclose(got.sum(-1), 1.0, atol=1e-6)
    assert got[0, 0].tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]
    np.testing.assert_allclose(got[2, 0], [0.5, 0.5, 0.0, 0.0, 0.0], atol=1e-6)
    assert got[3].tolist() == [[1.0, 0.0, 0.0, 0.0, 0.0]] * 2


def test_forbidden_tokens_only_on_the_rows_asked_for():
    """-1 pads, also a whole lane; repeated ids are harmless; -1 does not hit the last token."""
    logits = jnp.zeros((2, 3, 5), jnp.float32)
    ids = jnp.asarray([[4, 1, -1, 1], [-1, -1, -1, -1]], jnp.int32)
    rows = jnp.asarray([[True, False, True], [True, True, True]])
    got = np.isfinite(np.asarray(jax.jit(forbid_tokens)(logits, ids, rows)))
    assert got[1].all() and got[0, 1].all()
    assert got[0, 0].tolist() == got[0, 2].tolist() == [True, False, True, True, False]


# What `adjust_logits` can do, one feature a lane; the last lane does everything.
PENALTIES: tuple[dict[str, float], ...] = (
    {},
    {"presence": 1.5},
    {"frequency": -0.7},
    {"repetition": 1.6},
    {"repetition": 0.5},
    {"presence": -2.0, "frequency": 2.0},
    {},
    {"presence": 0.8, "frequency": 0.6, "repetition": 1.3},
)
# Lanes that obey a token mask, and the state each is in.
MASK_STATES = (0, 0, 0, 0, 0, 0, 2, 3)
FORBIDDING = (2, 7)


@jax.jit
def whole_transform(
    logits: jax.Array, sampling: Sampling, history: History, table: jax.Array, before: jax.Array, stops: jax.Array
) -> jax.Array:
    """All of it, as decoding puts it together; `stops` are forbidden on the first two rows."""
    logits = adjust_logits(logits, sampling, history, table, before)
    early = jnp.broadcast_to(jnp.arange(logits.shape[1])[None, :] < 2, logits.shape[:2])
    return process_logits(forbid_tokens(logits, stops, early), sampling)


def history_case(seed: int, vocab_size: int) -> dict[str, Any]:
    """Random prompts, replies, window tokens, automaton, bias and logits for the lanes of `PENALTIES`."""
    rng = np.random.default_rng(seed)
    lane_count = len(PENALTIES)
    replies = [rng.integers(0, vocab_size, n).tolist() for n in rng.integers(0, 9, lane_count)]
    prompts = [rng.integers(0, vocab_size, n).tolist() for n in rng.integers(1, 6, lane_count)]
    table = rng.integers(1, 5, (5, vocab_size)).astype(np.int32)
    table[rng.random(table.shape) < 0.6] = -1
    table[:, 3], table[0] = 1, 0
    bias = rng.normal(0, 2, (lane_count, vocab_size)).astype(np.float32)
    bias[:6] = 0
    # what row t of a window of three drafts has before it: the first t of them
    drafts = rng.integers(0, vocab_size, (lane_count, 3))
    drafts[:, 1] = drafts[:, 0]
    state = MASK_STATES
    for lane in (6, 7):
        at = state[lane]
        for j in range(3):
            drafts[lane, j] = rng.choice(np.flatnonzero(table[at] >= 0))
            at = table[at, drafts[lane, j]]
    before = np.where(np.arange(3)[None, None, :] < np.arange(4)[None, :, None], drafts[:, None, :], -1)
    logits = rng.normal(0, 3, (lane_count, 4, vocab_size)).astype(np.float32)
    stops = np.full((lane_count, 2), -1, np.int32)
    stops[list(FORBIDDING), 0] = [int(np.argmax(logits[2, 0])), 5]
    return dict(
        logits=logits, prompts=prompts, replies=replies, drafts=drafts, before=before.astype(np.int32), table=table,
        bias=bias, stops=stops,
    )  # fmt: skip


def history_of(case: dict[str, Any]) -> History:
    size = case["logits"].shape[-1]
    seen = np.stack([np.bincount(tokens, minlength=size) > 0 for tokens in case["prompts"]])
    counts = np.stack([np.bincount(np.asarray(tokens, np.int64), minlength=size) for tokens in case["replies"]])
    return History(jnp.asarray(seen), jnp.asarray(counts, jnp.int32), jnp.asarray(MASK_STATES, jnp.int32))


def penalised_lanes(case: dict[str, Any], temperature: float, **filters: float) -> Sampling:
    """The lanes of `PENALTIES`, all with one temperature and one set of filters."""
    alike = Sampling.alike(len(PENALTIES), temperature=temperature, **filters)
    values = {
        f"{name}_penalty": jnp.asarray([p.get(name, off) for p in PENALTIES], jnp.float32)
        for name, off in (("presence", 0.0), ("frequency", 0.0), ("repetition", 1.0))
    }
    return Sampling(**(vars(alike) | values | {"bias": jnp.asarray(case["bias"])}))


@pytest.mark.parametrize("filters", [dict(temperature=0.8), dict(temperature=1.3, top_k=20, top_p=0.9, min_p=0.05)])
def test_whole_transform_equals_float64_twin(filters):
    """Support equal, probabilities within 5e-6, on every row of a window: each sees the drafts before it."""
    for seed in range(3):
        case = history_case(seed, 60)
        given = (case["table"], case["before"], case["stops"])
        sampling = penalised_lanes(case, **filters)
        got = whole_transform(jnp.asarray(case["logits"]), sampling, history_of(case), *(jnp.asarray(x) for x in given))
        got = np.exp(np.asarray(got, np.float64))
        for b, penalties in enumerate(PENALTIES):
            state = MASK_STATES[b]
            for t in range(4):
                if t:
                    state = case["table"][state, case["drafts"][b, t - 1]]
                stops = [s for s in case["stops"][b] if s >= 0 and t < 2]
                row = adjusted(
                    case["logits"][b, t],
                    case["prompts"][b],
                    [*case["replies"][b], *case["drafts"][b, :t].tolist()],
                    bias=case["bias"][b],
                    forbidden=[*stops, *np.flatnonzero(case["table"][state] < 0)],
                    **penalties,
                )
                want = processed(row, **filters)
                np.testing.assert_array_equal(got[b, t] > 0, want > 0, err_msg=f"{seed=} lane {b} row {t}")
                np.testing.assert_allclose(got[b, t], want, atol=5e-6, err_msg=f"{seed=} lane {b} row {t}")


def test_lanes_that_ask_for_nothing_keep_their_bits():
    """A lane without penalties or mask is the same beside lanes that have them, and alone."""
    case = history_case(3, 60)
    given = [jnp.asarray(case[name]) for name in ("table", "before", "stops")]
    beside = np.asarray(
        whole_transform(jnp.asarray(case["logits"]), penalised_lanes(case, 0.9), history_of(case), *given)
    )
    plain = Sampling(**(vars(Sampling.alike(len(PENALTIES), temperature=0.9)) | {"bias": jnp.asarray(case["bias"])}))
    blank = History(history_of(case).prompt, history_of(case).counts, jnp.zeros((len(PENALTIES),), jnp.int32))
    alone = np.asarray(whole_transform(jnp.asarray(case["logits"]), plain, blank, *given))
    np.testing.assert_array_equal(beside[0], alone[0])
    assert all((beside[b] != alone[b]).any() for b in range(1, len(PENALTIES)))


def test_history_remembers_kept_tokens_only():
    """The first `count` tokens of each lane are counted, repeated ones too, and the automaton takes those steps."""
    table = np.array([[0, 0, 0, 0], [2, -1, 1, -1], [-1, 1, 2, -1]], np.int32)
    tokens = jnp.asarray([[0, 1, 2, 0], [0, 1, 2, 0], [2, 2, 3, 0], [3, 3, 3, 3]], jnp.int32)
    start = History(jnp.zeros((4, 4), bool), jnp.ones((4, 4), jnp.int32), jnp.asarray([1, 1, 1, 0], jnp.int32))
    after = jax.jit(remember)(start, jnp.asarray(table), tokens, jnp.asarray([4, 1, 2, 3], jnp.int32))
    assert (np.asarray(after.counts) - 1).tolist() == [[2, 1, 1, 0], [1, 0, 0, 0], [0, 0, 2, 0], [0, 0, 0, 3]]
    # 1 -0-> 2 -1-> 1 -2-> 1 -0-> 2; 1 -0-> 2; 1 -2-> 1 -2-> 1; no mask stays no mask
    assert after.mask_state.tolist() == [2, 2, 1, 0]
    unmasked = jax.jit(remember)(start, None, tokens, jnp.zeros((4,), jnp.int32))
    assert unmasked.mask_state.tolist() == [1, 1, 1, 0] and (np.asarray(unmasked.counts) == 1).all()


def test_sample_never_leaves_the_support():
    """A token at -inf is not picked, however unlikely the one token left."""
    log_probs = jnp.full((1000, 50), -jnp.inf).at[:, 31].set(0.0)
    noise = plain_noise(Sampling.alike(1000), jnp.arange(1000, dtype=jnp.int32)[:, None], 50)[:, 0]
    assert np.isfinite(np.asarray(noise)).all()
    assert np.unique(np.asarray(sample(log_probs, noise))).tolist() == [31]


def test_noise_has_the_gumbel_law():
    """Mean and variance of 400k draws within five standard errors, and the far tail has small steps."""
    positions = jnp.arange(4, dtype=jnp.int32)[:, None]
    noise = np.asarray(plain_noise(Sampling.alike(4), positions, 100_000), np.float64)
    assert abs(noise.mean() - np.euler_gamma) < 5 * np.sqrt(np.pi**2 / 6 / noise.size)
    # The fourth central moment of a Gumbel variable is 5.4 var^2.
    assert abs(noise.var() - np.pi**2 / 6) < 5 * np.pi**2 / 6 * np.sqrt(4.4 / noise.size)
    # Of the 4,000 largest, 24-bit uniforms would repeat many.
    tail = np.sort(noise.ravel())[-4000:]
    assert tail[-1] > 11 and np.unique(tail).size >= 3999


def test_noise_depends_on_its_counters_only():
    """Not on the lane, the batch, the width of the window or the size of the vocabulary."""
    settings = lanes((dict(seed=2**32 - 1), dict(seed=7), dict(seed=7, sample_index=1)))
    wide = all_noise(WindowNoise(settings, jnp.asarray([5, 100, 100], jnp.int32)), 30)
    alone = all_noise(WindowNoise(Sampling.alike(1, seed=7), jnp.asarray([100], jnp.int32)), 17)
    for name, noise in alone.items():
        np.testing.assert_array_equal(noise[0], wide[name][1][..., :17], err_msg=name)
        assert not np.any(np.asarray(noise[0]) == wide[name][2][..., :17]), name


def test_target_noise_belongs_to_the_absolute_position():
    """Bonus, `coupled` and plain picks of one position share noise, whichever window they are made in."""
    window = WindowNoise(Sampling.alike(3, seed=3), jnp.asarray([9, 10, 11], jnp.int32))
    plain = plain_noise(window.sampling, window.position[:, None] + jnp.arange(1, 5, dtype=jnp.int32)[None, :], 30)
    noise = all_noise(window, 30)
    np.testing.assert_array_equal(plain, noise["target"])
    np.testing.assert_array_equal(plain, noise["bonus"])
    np.testing.assert_array_equal(plain[:, :3], noise["coupled"])
    np.testing.assert_array_equal(plain[0, 1:], plain[1, :3])


def test_streams_and_counters_are_disjoint():
    """No two of 2,600 first words agree over seeds, sample indices, streams, positions and offsets."""
    settings = [dict(seed=seed, sample_index=index) for seed in (0, 1) for index in (0, 1) for _ in range(50)]
    positions = jnp.asarray(np.tile(np.arange(50), 4), jnp.int32)
    noise = all_noise(WindowNoise(lanes(tuple(settings)), positions), 1)
    coins = [-np.log(-np.log1p(-np.asarray(noise[name]))).ravel() for name in ("coins", "synthetic")]
    seen = [*coins, noise["draft"].ravel(), noise["recover"].ravel(), noise["bonus"][:, 0].ravel()]
    # Different words differ as floats but for one pair in 2^23 or so; the seeds are fixed.
    words = np.sort(np.concatenate([np.asarray(x, np.float32) for x in seen]))
    assert words.size == 2600 and np.diff(words).min() > 0


def test_inference_C32_first_token_has_the_entropy_of_its_law():
    """Over 20,000 seeds the plug-in entropy lies within 0.02 nats of the law's (standard error 0.004)."""
    probs = np.array([0.5, 0.25, 0.15, 0.1], np.float32)
    seeds = Sampling(**(vars(Sampling.alike(20_000)) | {"seed": jnp.arange(20_000, dtype=jnp.uint32)}))
    log_probs = process(jnp.broadcast_to(jnp.log(jnp.asarray(probs)), (20_000, 1, 4)), seeds)
    tokens = sample(log_probs, plain_noise(seeds, jnp.full((20_000, 1), 9, jnp.int32), 4))
    shares = np.bincount(np.asarray(tokens).ravel(), minlength=4) / 20_000
    assert abs(-(shares * np.log(shares)).sum() + (probs * np.log(probs)).sum()) < 0.02


def test_inference_C40_a_seed_gives_the_same_tokens_alone_and_in_a_batch():
    """Tokens of one seed are equal alone and as lane 2 of 4; other seeds and indices give other tokens."""
    settings = (dict(seed=5), dict(seed=6), dict(seed=11), dict(seed=11, sample_index=3))
    positions = jnp.arange(64, dtype=jnp.int32)[None, :]
    logits = jnp.asarray(np.random.default_rng(0).normal(0, 1, (1, 64, 50)).astype(np.float32))

    def tokens(sampling: Sampling) -> np.ndarray:
        num_lanes = sampling.seed.shape[0]
        rows = jnp.broadcast_to(logits, (num_lanes, 64, 50))
        noise = plain_noise(sampling, jnp.broadcast_to(positions, (num_lanes, 64)), 50)
        return np.asarray(sample(process(rows, sampling), noise))

    batch = tokens(lanes(settings))
    np.testing.assert_array_equal(batch[2], tokens(Sampling.alike(1, seed=11))[0])
    assert all((batch[a] != batch[b]).mean() > 0.5 for a, b in ((0, 1), (0, 2), (2, 3)))
