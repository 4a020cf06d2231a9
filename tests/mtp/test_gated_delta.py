"""The delta rule's three forms against a float64 serial recurrence: serial window, fold plus window, chunks.

Tolerance: float32 against float64 over up to 130 tokens, 2e-5 absolute on outputs of order one.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp.kernels import gated_delta, gated_delta_mgpu
from mtp.kernels.gated_delta import DeltaRows
from tests import oracle

HEADS, KEY_HEADS, KEY, VALUE, TAPS = 6, 2, 8, 12, 4
CHANNELS = 2 * KEY_HEADS * KEY + HEADS * VALUE
TOLERANCE = 2e-5

chunked = jax.jit(gated_delta.delta_rule_chunked)
serial = jax.jit(gated_delta.delta_rule_serial)


def draw(length: int, seed: int = 0, decay: float = 1.0) -> dict[str, np.ndarray]:
    """Random rows of two lanes, float32: unit keys, scaled unit queries, gentle decays times `decay`."""
    rng = np.random.default_rng(seed)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)  # noqa: E731
    rows = dict(
        q=unit(rng.normal(size=(2, length, HEADS, KEY))) * KEY**-0.5,
        k=unit(rng.normal(size=(2, length, HEADS, KEY))),
        v=rng.normal(size=(2, length, HEADS, VALUE)),
        log_decay=-decay * rng.exponential(0.3, size=(2, length, HEADS)),
        write_strength=rng.uniform(size=(2, length, HEADS)),
    )
    return {name: x.astype(np.float32) for name, x in rows.items()}


def draw_state(seed: int = 9) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(2, HEADS, VALUE, KEY)).astype(np.float32)


def exact(rows: dict[str, np.ndarray], state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Float64: the last state [B, U, Z, Y] and outputs [B, T, U, Z]."""
    states, outputs = [], []
    for lane in range(2):
        arrays = [rows[name][lane].astype(np.float64) for name in ("q", "k", "v", "log_decay", "write_strength")]
        out, last = oracle.gated_delta_rule(*arrays, state=np.swapaxes(state[lane], -1, -2))
        states.append(np.swapaxes(last, -1, -2))
        outputs.append(out)
    return np.stack(states), np.stack(outputs)


def assert_near(got: tuple[jax.Array, jax.Array], want: tuple[np.ndarray, np.ndarray]) -> None:
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("length", [1, 3, 63, 64, 65, 130])
def test_chunked_equals_serial_recurrence(length: int) -> None:
    rows, state = draw(length, seed=length), draw_state()
    assert_near(chunked(state, **rows), exact(rows, state))


def test_serial_window_equals_recurrence() -> None:
    rows, state = draw(5), draw_state()
    assert_near(serial(state, **rows), exact(rows, state))


@pytest.mark.parametrize("decay", [0.0, 50.0, 1000.0])
def test_extreme_decay_stays_finite(decay: float) -> None:
    """Log decays of up to some -2000 in one chunk: exp(-G) alone would overflow."""
    rows, state = draw(128, decay=decay), draw_state()
    assert_near(chunked(state, **rows), exact(rows, state))


def test_equal_keys_do_not_break_the_triangular_inverse() -> None:
    """One key throughout, written at full strength: powers of the matrix explode, substitution does not."""
    rows, state = draw(64), draw_state()
    rows["k"][:] = rows["k"][:, :1]
    rows["write_strength"][:] = 1.0
    rows["log_decay"][:] = 0.0
    assert_near(chunked(state, **rows), exact(rows, state))


def test_neutral_rows_change_nothing() -> None:
    """Padding a chunk is exact: the state after padding has the very bits of the state before it."""
    rows, state = draw(7), draw_state()
    padded = {name: np.pad(x, [(0, 0), (0, 1)] + [(0, 0)] * (x.ndim - 2)) for name, x in rows.items()}
    for ours, theirs in zip(serial(state, **padded), serial(state, **rows), strict=True):
        size = theirs.shape[1]
        np.testing.assert_array_equal(ours[:, :size], theirs)


def test_documents_are_separate() -> None:
    """Three documents packed into one sequence give what each gives alone."""
    cuts = (0, 37, 64, 100)
    rows = draw(100)
    starts = np.zeros((2, 100), bool)
    starts[:, cuts[:-1]] = True
    zero = np.zeros((2, HEADS, VALUE, KEY), np.float32)
    state, outputs = chunked(zero, **rows, starts=jnp.asarray(starts))
    for begin, end in zip(cuts, cuts[1:], strict=False):
        alone = exact({name: x[:, begin:end] for name, x in rows.items()}, zero)
        np.testing.assert_allclose(outputs[:, begin:end], alone[1], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(state, alone[0], rtol=0, atol=TOLERANCE)


def test_chunked_gradients_equal_serial() -> None:
    """Gradients of a random projection of state and outputs, by the chunked form and through the recurrence."""
    rows, state = draw(19), draw_state()
    rng = np.random.default_rng(2)
    weights = [rng.normal(size=shape).astype(np.float32) for shape in (state.shape, (2, 19, HEADS, VALUE))]

    def loss(form, state, rows):  # noqa: ANN001, ANN202
        return sum(jnp.sum(w * x) for w, x in zip(weights, form(state, **rows), strict=True))

    ours, theirs = (jax.jit(jax.grad(partial(loss, f), argnums=(0, 1)))(state, rows) for f in (chunked, serial))
    for path, value in jax.tree_util.tree_leaves_with_path(ours):
        want = theirs[0] if path[0].idx == 0 else theirs[1][path[1].key]
        np.testing.assert_allclose(value, want, rtol=0, atol=1e-4 * float(np.abs(want).max()), err_msg=str(path))


@pytest.mark.parametrize("fold", [(0, 4), (1, 2), (3, 1)])
def test_fold_then_window_equals_recurrence(fold: tuple[int, int]) -> None:
    """Any count of pending rows a lane: folded state, moved convolution rows, and the window's outputs."""
    rng = np.random.default_rng(sum(fold))
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    weight, conv, state = normal(CHANNELS, TAPS), normal(2, TAPS - 1, CHANNELS), draw_state()

    def delta_rows(length: int) -> DeltaRows:
        gates = draw(length, seed=length)
        return DeltaRows(*map(jnp.asarray, (normal(2, length, CHANNELS), gates["log_decay"], gates["write_strength"])))

    pending, window = delta_rows(4), delta_rows(3)
    got = gated_delta.gated_delta_window(
        *map(jnp.asarray, (state, conv)),
        pending,
        jnp.asarray(fold, jnp.int32),
        window,
        jnp.asarray([3, 3], jnp.int32),
        jnp.asarray(weight),
    )
    for lane, count in enumerate(fold):
        joined = [
            np.concatenate([getattr(pending, f)[lane, :count], getattr(window, f)[lane]]).astype(np.float64)
            for f in ("qkv", "log_decay", "write_strength")
        ]
        mixed = oracle.silu(oracle.causal_conv(joined[0], weight.astype(np.float64), conv[lane].astype(np.float64)))
        q, k, v = np.split(mixed, [KEY_HEADS * KEY, 2 * KEY_HEADS * KEY], axis=-1)
        q, k = (np.repeat(oracle.unit(x.reshape(-1, KEY_HEADS, KEY)), HEADS // KEY_HEADS, axis=1) for x in (q, k))
        v = v.reshape(-1, HEADS, VALUE)
        before = np.swapaxes(state[lane], -1, -2).astype(np.float64)
        part = lambda a, b: [x[a:b] for x in (q * KEY**-0.5, k, v, *joined[1:])]  # noqa: B023, E731
        _, folded = oracle.gated_delta_rule(*part(0, count), state=before)
        outputs, _ = oracle.gated_delta_rule(*part(count, None), state=folded)
        np.testing.assert_allclose(got[0][lane], np.swapaxes(folded, -1, -2), rtol=0, atol=TOLERANCE)
        history = np.concatenate([conv[lane], pending.qkv[lane]])[count : count + TAPS - 1]
        np.testing.assert_array_equal(got[1][lane], history)
        np.testing.assert_allclose(got[2][lane], outputs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("rows", "limit", "heads", "blocks"), [(4, 4, 3, 264), (1, 4, 2, 264), (2, 2, 6, 3), (1, 1, 3, 1)]
)
def test_kernel_equals_its_definition(
    rows: int, limit: int, heads: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mosaic on a GPU, else its body interpreted, races looked for; with few blocks each takes several items. An idle
    lane keeps its state bit for bit, and what lies in rows that do not count is not looked at.

    Tolerance: 1e-5 on numbers of order one, float32 throughout. (With bfloat16 rows the two exponentials may round the
    convolution to different neighbours.)"""
    monkeypatch.setattr(gated_delta_mgpu, "BLOCKS", blocks)
    gated_delta_mgpu.gated_delta_window.clear_cache()
    rng = np.random.default_rng(rows)
    key_heads, lanes, dtype = heads // 3 or 1, 3, "float32"
    channels = 2 * key_heads * 128 + heads * 128
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731

    def delta_rows(length: int, count: np.ndarray) -> DeltaRows:
        made = DeltaRows(
            normal(lanes, length, channels).astype(dtype),
            -jnp.abs(normal(lanes, length, heads)),
            jax.nn.sigmoid(normal(lanes, length, heads)),
        )
        behind = jnp.asarray(np.arange(length)[None, :] >= count[:, None])
        return jax.tree.map(lambda x: jnp.where(behind[:, :, None], jnp.asarray(jnp.nan, x.dtype), x), made)

    folds, live = np.array([limit, 0, limit - 1], np.int32), np.array([rows, rows, 0], np.int32)
    arguments = (
        normal(lanes, heads, 128, 128),
        normal(lanes, 3, channels).astype(dtype),
        delta_rows(limit, folds),
        jnp.asarray(folds),
        delta_rows(rows, live),
        jnp.asarray(live),
        normal(channels, 4).astype(dtype),
    )
    kernel = "mosaic" if jax.default_backend() == "gpu" else "interpret"
    want, got = (
        jax.jit(partial(gated_delta.gated_delta_window, implementation=name))(*arguments) for name in ("xla", kernel)
    )
    for name, ours, theirs, tolerance in zip(("state", "conv", "outputs"), got, want, (1e-5, 0, 1e-5), strict=True):
        ours, theirs = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
        if name == "outputs":
            ours, theirs = ours[:2], theirs[:2]
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance, err_msg=name)
    np.testing.assert_array_equal(got[0][2], arguments[0][2])
