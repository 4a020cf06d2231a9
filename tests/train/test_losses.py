"""The head's losses against their formulas in float64, and their gradients against finite differences of those."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp.model import unembed
from train.losses import KINDS, HeadLoss, RowScores, score_rows, score_rows_within

BATCH, LENGTH, DEPTHS, WIDTH, VOCABULARY = 2, 7, 3, 4, 9
ACCEPTANCE = np.array([0.9, 0.5, 0.2], np.float32)


def draw(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    valid = rng.random((BATCH, LENGTH, DEPTHS)) < 0.7
    # two anchors with a whole chain, and one whose chain leaves the row
    for row, anchor in ((0, 1), (1, 2)):
        valid[row, anchor + np.arange(1, DEPTHS + 1), np.arange(DEPTHS)] = True
    valid[1, LENGTH - 1], valid[1, 0, 2], valid[1, 1, 2] = True, True, True
    return dict(
        table=rng.normal(size=(VOCABULARY, WIDTH)),
        trunk=rng.normal(size=(BATCH, LENGTH, WIDTH)),
        drafts=rng.normal(size=(BATCH, LENGTH, DEPTHS, WIDTH)),
        tokens=rng.integers(0, VOCABULARY, (BATCH, LENGTH)),
        valid=valid,
    )


def expected(loss: HeadLoss, data: dict[str, np.ndarray]) -> tuple[float, float]:
    """Total and weight, an anchor or a prediction at a time, in float64."""

    def law(hidden: np.ndarray) -> np.ndarray:
        logits = data["table"] @ hidden
        return np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()

    total = weight = 0.0
    alpha, nll = np.zeros((BATCH, LENGTH, DEPTHS)), np.zeros((BATCH, LENGTH, DEPTHS))
    for b in range(BATCH):
        for t in range(LENGTH):
            p = law(data["trunk"][b, t])
            for d in range(DEPTHS):
                if not data["valid"][b, t, d]:
                    continue
                q = law(data["drafts"][b, t, d])
                alpha[b, t, d] = np.minimum(p, q).sum()
                nll[b, t, d] = -np.log(q[data["tokens"][b, (t + 1) % LENGTH]])
                kl = (p * np.log(p / q)).sum()
                share = np.exp(-loss.eta * ACCEPTANCE[d])
                tv = 0.5 * np.abs(p - q).sum()
                one = {"ce": nll[b, t, d], "kl": kl, "tv": tv, "lk": share * kl + (1 - share) * tv}.get(loss.kind, 0.0)
                if loss.kind != "ce":
                    one += loss.likelihood_weight * nll[b, t, d]
                total += loss.depth_decay**d * one
                weight += loss.depth_decay**d
    if loss.kind != "e2e":
        return total, weight
    total = weight = 0.0
    for b in range(BATCH):
        for t in range(LENGTH - DEPTHS):
            chain = [(b, t + d + 1, d) for d in range(DEPTHS)]
            if all(data["valid"][place] for place in chain):
                alphas = np.array([alpha[place] for place in chain])
                total += 1 - np.cumprod(alphas).mean()
                total += loss.likelihood_weight * np.mean([nll[place] for place in chain])
                weight += 1
    return total, weight


def ours(loss: HeadLoss, data: dict[str, np.ndarray], drafts: Any) -> tuple[jax.Array, jax.Array]:
    table = jnp.asarray(data["table"], jnp.float32)
    unembed = lambda x: jnp.matmul(x, table.T, precision="highest")  # noqa: E731
    trunk, tokens = jnp.asarray(data["trunk"], jnp.float32), jnp.asarray(data["tokens"], jnp.int32)
    scores = score_rows(trunk, drafts, tokens, unembed, unembed, chunk_rows=7)
    return loss.total(scores, jnp.asarray(data["valid"]), jnp.asarray(ACCEPTANCE))


@pytest.mark.parametrize("kind", KINDS)
def test_each_loss_and_its_gradient(kind: str) -> None:
    """Value within 1e-5, gradient within 1e-4 of central differences in float64. No p equals its q within 1e-3 in this
    draw: min(p, q) has no gradient there."""
    loss, data = HeadLoss(kind, eta=2.0, likelihood_weight=0.3, depth_decay=0.8), draw(9)
    drafts = jnp.asarray(data["drafts"], jnp.float32)

    @jax.jit
    def run(drafts: jax.Array) -> tuple[Any, jax.Array]:
        value = lambda x: ours(loss, data, x)  # noqa: E731
        return value(drafts), jax.grad(lambda x: value(x)[0])(drafts)

    (total, weight), gradient = run(drafts)
    want, count = expected(loss, data)
    assert count > 1 and float(weight) == pytest.approx(count, rel=1e-6)
    assert float(total) == pytest.approx(want, abs=1e-5 * count)
    rng = np.random.default_rng(1)
    for _ in range(4):
        direction = rng.normal(size=data["drafts"].shape)
        ends = [expected(loss, data | {"drafts": data["drafts"] + sign * 1e-5 * direction})[0] for sign in (1, -1)]
        slope = (ends[0] - ends[1]) / 2e-5
        assert float(np.sum(np.asarray(gradient) * direction)) == pytest.approx(slope, abs=1e-4, rel=1e-4)
    unused = ~data["valid"]
    assert (np.asarray(gradient)[unused] == 0).all() and np.isfinite(gradient).all()


@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_joined_by_adding_totals_and_weights(kind: str) -> None:
    """Rows of one batch, each a batch of its own, add up to it: accumulation weighs by what counts."""
    loss, data = HeadLoss(kind, likelihood_weight=0.1), draw(3)
    whole = ours(loss, data, jnp.asarray(data["drafts"], jnp.float32))
    parts = []
    for row in range(BATCH):
        part = {name: x if name == "table" else x[row : row + 1] for name, x in data.items()}
        parts.append(ours(loss, part, jnp.asarray(part["drafts"], jnp.float32)))
    for number in (0, 1):
        assert float(parts[0][number] + parts[1][number]) == pytest.approx(float(whole[number]), rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_count_may_be_anything(kind: str) -> None:
    """Nothing counts: total, weight and gradient are zero, though every score is NaN."""
    nan = jnp.full((1, 4, DEPTHS), jnp.nan)
    valid, late = jnp.zeros((1, 4, DEPTHS), bool), jnp.asarray(ACCEPTANCE)
    make = lambda x: RowScores(x[..., 0], x, x, x, jnp.zeros(x.shape, bool))  # noqa: E731
    total, weight = HeadLoss(kind).total(make(nan), valid, late)
    assert float(total) == float(weight) == 0
    gradient = jax.grad(lambda x: HeadLoss(kind).total(make(x), valid, late)[0])(nan)
    assert (np.asarray(gradient) == 0).all()


def test_lk_turns_from_kl_to_tv_with_acceptance() -> None:
    """Twelve predictions of KL 5 and TV 1/4."""
    everywhere = jnp.ones((1, 4, DEPTHS), bool)
    scores = RowScores(jnp.ones((1, 4)), *(jnp.full((1, 4, DEPTHS), x) for x in (2.0, 5.0, 0.75)), everywhere)

    def total(loss: HeadLoss, late: float) -> float:
        return float(loss.total(scores, everywhere, jnp.full((DEPTHS,), late))[0])

    assert total(HeadLoss("lk"), 0.0) == total(HeadLoss("kl"), 0.0) == 60.0
    assert total(HeadLoss("lk", eta=100.0), 1.0) == total(HeadLoss("tv"), 1.0) == 3.0
    assert 3.0 < total(HeadLoss("lk", eta=2.0), 0.5) < 60.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "mse"}, "loss.kind='mse' must be one of ce, kl, tv, lk, e2e"),
        ({"kind": "lk", "eta": -1.0}, "loss.eta=-1.0 must be from 0 to 100"),
        ({"kind": "kl", "depth_decay": 1.5}, "loss.depth_decay=1.5 must be from 0 to 1"),
    ],
)
def test_a_setting_out_of_range_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HeadLoss(**fields)


# Among few tokens

ROWS, MANY = 16, 64


def peaked(seed: int) -> tuple[dict[str, jax.Array], jax.Array]:
    """Rows whose laws lie on a few tokens, and which of them are counted."""
    rng = np.random.default_rng(seed)
    table = rng.normal(size=(MANY, 8))
    trunk = 3.0 * table[rng.integers(0, 10, (2, ROWS // 2))] + 0.1 * rng.normal(size=(2, ROWS // 2, 8))
    drafts = trunk[:, :, None] + rng.normal(size=(2, ROWS // 2, DEPTHS, 8))
    rows = {"trunk": trunk, "drafts": drafts, "table": table}
    tokens = jnp.asarray(rng.integers(0, MANY, (2, ROWS // 2)), jnp.int32)
    made = {name: jnp.asarray(value, jnp.float32) for name, value in rows.items()} | {"tokens": tokens}
    return made, jnp.asarray(rng.random((2, ROWS // 2)) < 0.8)


def exact_scores(data: dict[str, jax.Array], drafts: jax.Array) -> RowScores:
    logits = lambda rows: unembed(data["table"], rows)  # noqa: E731
    return score_rows(data["trunk"], drafts, data["tokens"], logits, logits, 4)


def scores_within(data: dict[str, jax.Array], counted: jax.Array, num_ids: int, drafts: jax.Array) -> Any:
    return score_rows_within(data["trunk"], drafts, data["tokens"], counted, data["table"], num_ids, 4)


def test_scores_within_the_whole_vocabulary_are_exact(seed: int = 11) -> None:
    data, counted = peaked(seed)
    ours, inside = scores_within(data, counted, MANY, data["drafts"])
    np.testing.assert_allclose(inside, 1.0, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), ours, exact_scores(data, data["drafts"]))
    total = lambda score: jax.grad(lambda drafts: jnp.sum(score(drafts).kl + score(drafts).overlap))(data["drafts"])  # noqa: E731
    expected = total(lambda drafts: exact_scores(data, drafts))
    np.testing.assert_allclose(total(lambda x: scores_within(data, counted, MANY, x)[0]), expected, atol=1e-5)


@pytest.mark.parametrize("num_ids", [ROWS, 40])
def test_scores_within_few_tokens_are_those_of_laws_cut_to_them(num_ids: int) -> None:
    """In float64: the tokens with most mass over the counted rows, and the text's; what they cover; both laws there."""
    data, counted = peaked(num_ids)
    ours, inside = scores_within(data, counted, num_ids, data["drafts"])
    wide = {name: np.asarray(value, np.float64) for name, value in data.items()}

    def law(rows: np.ndarray) -> np.ndarray:
        logits = rows @ wide["table"].T
        exp = np.exp(logits - logits.max(-1, keepdims=True))
        return exp / exp.sum(-1, keepdims=True)

    p, q = law(wide["trunk"]), law(wide["drafts"])
    targets = np.roll(np.asarray(data["tokens"]), -1, axis=1)
    mass = (p * np.asarray(counted)[..., None]).sum((0, 1))
    mass[targets.reshape(-1)] = np.inf
    few = np.sort(np.argsort(-mass)[:num_ids])
    np.testing.assert_allclose(inside, p[..., few].sum(-1), atol=1e-5)
    cut = lambda x: x[..., few] / x[..., few].sum(-1, keepdims=True)  # noqa: E731
    p, q = cut(p)[:, :, None], cut(q)
    np.testing.assert_allclose(ours.overlap, np.minimum(p, q).sum(-1), atol=1e-5)
    np.testing.assert_allclose(ours.kl, (p * np.log(p / q)).sum(-1), atol=2e-5)
    place = np.searchsorted(few, targets)
    picked = np.take_along_axis(q, np.broadcast_to(place[..., None, None], (*q.shape[:3], 1)), -1)[..., 0]
    np.testing.assert_allclose(ours.draft_nll, -np.log(picked), atol=2e-5)


def test_a_number_of_tokens_that_can_not_do_is_refused() -> None:
    data, counted = peaked(0)
    for wrong in (ROWS - 1, MANY + 1):
        with pytest.raises(ValueError, match=f"num_ids={wrong} must be from the 16 tokens .* vocabulary's 64"):
            scores_within(data, counted, wrong, data["drafts"])
