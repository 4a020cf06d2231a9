"""Losslessness by exact enumeration through the shipped functions: every draft, every coin, every next token.

Each batch holds all draft sequences of all lengths 0..k, for greedy and sampled lanes at once, over models
whose distributions depend on the whole context. What the window emits, continued by the target, must have the
target's law, computed apart in float64; slips of kinds that others shipped must fail the same comparison.
"""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp import acceptance
from mtp.acceptance import Plan, accept, acceptance_probability, count_accepted, make_plan, next_log_probs
from mtp.kernels.sampling import Sampling, WindowNoise, process_logits, sample, target_noise

SETTINGS = (
    dict(temperature=0.0),
    dict(temperature=0.6, top_p=0.8),
    dict(temperature=1.3, top_p=0.9, top_k=4),
    dict(temperature=1.7, min_p=0.1),
)
SIZES = ((2, 3), (6, 2), (5, 3))

process = jax.jit(process_logits)
plan_of = jax.jit(make_plan, static_argnums=0)
count_of = jax.jit(count_accepted, static_argnums=0)
next_of = jax.jit(next_log_probs)


def probabilities(logits: np.ndarray, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """Float64 law of each row of [..., V] without ties: temperature, top-k, top-p, min-p, by rank."""
    logits = np.asarray(logits, np.float64)
    order = np.argsort(-logits, axis=-1)
    if temperature == 0:
        return (np.arange(logits.shape[-1]) == order[..., :1]).astype(np.float64)
    p = np.exp((np.take_along_axis(logits, order, -1) - logits.max(-1, keepdims=True)) / temperature)
    if top_k:
        p[..., top_k:] = 0
    p /= p.sum(-1, keepdims=True)
    p = np.where(np.cumsum(p, -1) - p < top_p, p, 0) if top_p < 1 else p
    p = np.where(p >= min_p * p[..., :1], p, 0)
    p /= p.sum(-1, keepdims=True)
    return np.take_along_axis(p, np.argsort(order, axis=-1), -1)


class Tree:
    """Random target and draft logits for each context of 0..k tokens; all lanes that enumerate a window."""

    def __init__(self, vocab_size: int, k: int, seed: int, draft_error: float = 1.0):
        rng = np.random.default_rng(seed)
        self.vocab_size, self.k = vocab_size, k
        shape = [(vocab_size,) * (depth + 1) for depth in range(k + 1)]
        self.target = [rng.normal(0, 1.5, s).astype(np.float32) for s in shape]
        self.draft = [(x + draft_error * rng.normal(0, 1, x.shape)).astype(np.float32) for x in self.target[:k]]
        self.lanes = [
            (setting, drafts)
            for setting in range(len(SETTINGS))
            for n in range(k + 1)
            for drafts in itertools.product(range(vocab_size), repeat=n)
        ]
        self.num_drafts = jnp.asarray([len(drafts) for _, drafts in self.lanes], jnp.int32)
        # Past its drafts a lane holds junk: NaN logits and token V - 1.
        self.drafts = np.full((len(self.lanes), k), vocab_size - 1, np.int32)
        rows = np.full((2, len(self.lanes), k + 1, vocab_size), np.nan, np.float32)
        for b, (_, drafts) in enumerate(self.lanes):
            self.drafts[b, : len(drafts)] = drafts
            for i in range(len(drafts) + 1):
                rows[0, b, i] = self.target[i][drafts[:i]]
                if i < len(drafts):
                    rows[1, b, i] = self.draft[i][drafts[:i]]
        self.target_rows, self.draft_rows = jnp.asarray(rows[0]), jnp.asarray(rows[1, :, :k])
        each = [Sampling.alike(1, **SETTINGS[setting]) for setting, _ in self.lanes]
        self.sampling = jax.tree.map(lambda *x: jnp.concatenate(x), *each)

    def laws(self, setting: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """(p, q) by depth, in float64, of one setting."""
        return tuple([probabilities(x, **SETTINGS[setting]) for x in tree] for tree in (self.target, self.draft))

    def continuation(self, p: list[np.ndarray], depth: int) -> np.ndarray:
        """The target's probability of tokens depth..k given those before, for all sequences of k + 1."""
        law = np.ones((self.vocab_size,) * (self.k + 1))
        for i in range(depth, self.k + 1):
            law = law * p[i].reshape(p[i].shape + (1,) * (self.k - i))
        return law


def emitted(tree: Tree, law: str, target=None, target_rows=None, plan_draft=None, next_token=next_of):
    """Law of the first k + 1 emitted tokens and expected acceptance: {(setting, n): ([V] * (k + 1), float)}.

    `target`, `plan_draft` and `next_token` replace what the verifier works with; drafts come from q.
    """
    if target is None:
        target = process(tree.target_rows if target_rows is None else target_rows, tree.sampling)
    draft = process(tree.draft_rows, tree.sampling) if plan_draft is None else plan_draft
    plan = plan_of(law, target, draft, jnp.asarray(tree.drafts), tree.num_drafts)
    passes = np.asarray(plan.pass_probability, np.float64)
    chance = np.zeros((len(tree.lanes), tree.k + 1))
    for coins in itertools.product((0.0, 2.0), repeat=tree.k):
        # A coin of 0 always holds and a coin of 2 never; each outcome has its probability.
        held = np.asarray(coins) == 0
        probability = np.prod(np.where(held[None, :], passes, 1 - passes), axis=1)
        held_coins = jnp.broadcast_to(jnp.asarray(coins, jnp.float32)[None, :], tree.drafts.shape)
        count = np.asarray(count_of(law, plan, held_coins))
        chance[np.arange(len(chance)), count] += probability
    follow = [
        np.exp(np.asarray(next_token(plan, target, draft, jnp.full(len(chance), a, jnp.int32), tree.num_drafts)))
        for a in range(tree.k + 1)
    ]
    result = {}
    by_setting = {s: tree.laws(s) for s in range(len(SETTINGS))}
    rest = {s: [tree.continuation(p, d) for d in range(1, tree.k + 2)] for s, (p, _) in by_setting.items()}
    for b, (setting, drafts) in enumerate(tree.lanes):
        q = by_setting[setting][1]
        weight = np.prod([q[i][drafts[: i + 1]] for i in range(len(drafts))])
        if weight == 0:
            continue
        table, length = result.get((setting, len(drafts)), (np.zeros((tree.vocab_size,) * (tree.k + 1)), 0.0))
        for a in range(len(drafts) + 1):
            if chance[b, a] > 0:
                tail = follow[a][b].astype(np.float64).reshape((-1,) + (1,) * (tree.k - a))
                table[drafts[:a]] += weight * chance[b, a] * tail * rest[setting][a][drafts[:a]]
                length += weight * chance[b, a] * a
        result[setting, len(drafts)] = (table, length)
    return result


def worst(tree: Tree, result: dict) -> float:
    """Largest difference from the target's law, over prefixes, settings and numbers of drafts."""
    gaps = []
    for (setting, _), (table, _) in result.items():
        want = tree.continuation(tree.laws(setting)[0], 0)
        for depth in range(tree.k + 1):
            axes = tuple(range(depth + 1, tree.k + 1))
            gaps.append(np.max(np.abs(table.sum(axes) - want.sum(axes))))
    return float(np.max(gaps))


@pytest.fixture(scope="module")
def tree() -> Tree:
    return Tree(5, 3, seed=7)


@pytest.mark.parametrize("law", ["rejection", "block"])
@pytest.mark.parametrize("size", SIZES)
def test_emitted_law_is_the_targets(law, size):
    """To 1e-6 for every prefix, 0..k drafts, greedy and sampled lanes in one batch, good and bad drafters."""
    for draft_error in (0.0, 0.5, 4.0) if size == SIZES[0] else (1.0,):
        tree = Tree(*size, seed=sum(size), draft_error=draft_error)
        result = emitted(tree, law)
        assert len(result) == len(SETTINGS) * (size[1] + 1)
        assert worst(tree, result) < 1e-6
        if draft_error == 0.0:
            assert all(abs(length - n) < 1e-5 for (_, n), (_, length) in result.items())


def test_block_accepts_at_least_as_much(tree):
    """In expectation, for each setting and number of drafts; strictly more from two drafts on if sampled."""
    token, block = emitted(tree, "rejection"), emitted(tree, "block")
    for (setting, n), (_, length) in token.items():
        gain = block[setting, n][1] - length
        assert gain > -1e-6
        assert (gain > 1e-4) == (n >= 2 and SETTINGS[setting]["temperature"] > 0)


def test_first_draft_stands_with_one_minus_total_variation(tree):
    """With one draft both laws accept sum min(p, q), and `acceptance_probability` says so."""
    for setting in range(len(SETTINGS)):
        p, q = (np.log(np.maximum(x[0], 1e-45)).astype(np.float32) for x in tree.laws(setting))
        want = float(acceptance_probability(jnp.asarray(p), jnp.asarray(q)))
        for law in ("rejection", "block"):
            assert abs(emitted(tree, law)[setting, 1][1] - want) < 1e-6


def wrong_order(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Top-p of the unheated distribution, then temperature."""
    raw = process(logits, Sampling(**(vars(sampling) | {"temperature": jnp.ones_like(sampling.temperature)})))
    heated = Sampling(**(vars(sampling) | {"top_p": jnp.ones_like(sampling.top_p)}))
    return process(jnp.where(jnp.isfinite(raw), logits, -jnp.inf), heated)


def from_target(plan: Plan, target, draft, num_accepted, num_drafts):
    """After a rejection, a token from p and not from the residual."""
    return next_of(plan, target, draft, num_accepted, jnp.zeros_like(num_drafts))


def not_renormalised(plan: Plan, target, draft, num_accepted, num_drafts):
    """max(p - q, 0) as if it were a distribution."""
    right = next_of(plan, target, draft, num_accepted, num_drafts)
    rows = np.arange(len(right)), np.minimum(np.asarray(num_accepted), draft.shape[1] - 1)
    weight = np.asarray(plan.weight)[rows][:, None]
    bare = np.maximum(weight * np.exp(target[rows]) - np.exp(draft[rows]), 0)
    with np.errstate(divide="ignore"):
        return np.where((num_accepted < num_drafts)[:, None], np.log(bare), right)


@pytest.mark.parametrize("law", ["rejection", "block"])
@pytest.mark.parametrize(
    "slip",
    [
        "residual not renormalised",
        "p for the residual",
        "top-p first",
        "stale draft row",
        "target row off by one",
    ],
)
def test_arithmetic_controls_fail(tree, law, slip):
    """Each slip moves the emitted law by more than 1e-3, a thousand times the bound above."""
    draft = process(tree.draft_rows, tree.sampling)
    settings = {
        "residual not renormalised": dict(next_token=not_renormalised),
        "p for the residual": dict(next_token=from_target),
        "top-p first": dict(target=wrong_order(tree.target_rows, tree.sampling)),
        "stale draft row": dict(plan_draft=jnp.concatenate([draft[:, :1], draft[:, :-1]], axis=1)),
        "target row off by one": dict(
            target_rows=jnp.concatenate([tree.target_rows[:, :1], tree.target_rows[:, :-1]], 1)
        ),
    }[slip]
    assert worst(tree, emitted(tree, law, **settings)) > 1e-3


def random_window(seed: int, num_lanes: int, k: int, vocab_size: int, bias: np.ndarray | None = None, **settings):
    """Processed target and draft rows of lanes with different seeds, and their noise."""
    rng = np.random.default_rng(seed)
    target = rng.normal(0, 1.5, (num_lanes, k + 1, vocab_size)).astype(np.float32)
    draft = target[:, :k] + rng.normal(0, 0.7, (num_lanes, k, vocab_size)).astype(np.float32)
    sampling = Sampling(
        **(vars(Sampling.alike(num_lanes, **settings)) | {"seed": jnp.arange(num_lanes, dtype=jnp.uint32)})
    )
    noise = WindowNoise(sampling, jnp.asarray(rng.integers(0, 9999, num_lanes), jnp.int32))
    if bias is not None:
        lanes = jnp.broadcast_to(jnp.asarray(bias, jnp.float32)[None, :], (num_lanes, vocab_size))
        sampling = Sampling(**(vars(sampling) | {"bias": lanes}))
    return process(jnp.asarray(target), sampling), process(jnp.asarray(draft), sampling), noise


@partial(jax.jit, static_argnums=0)
def run_window(law: str, target, draft, num_drafts, noise):
    """Drafts from the window's noise, then the shipped `accept`."""
    size = target.shape[-1]
    drafts = jnp.stack([sample(draft[:, i], noise.draft(law, i, size)) for i in range(draft.shape[1])], axis=1)
    return drafts, accept(law, target, draft, drafts, num_drafts, noise)


def test_inference_C30_sampler_match_is_plain_decoding():
    """100,000 windows with 0..3 drafts: emitted tokens are plain decoding's; drafts end where they differ."""
    target, draft, noise = random_window(1, 100_000, 3, 6, temperature=0.7, top_p=0.9)
    num_drafts = jnp.asarray(np.random.default_rng(2).integers(0, 4, 100_000), jnp.int32)
    drafts, got = run_window("coupled", target, draft, num_drafts, noise)
    positions = noise.position[:, None] + 1 + jnp.arange(4, dtype=jnp.int32)[None, :]
    plain = np.asarray(sample(target, jax.jit(target_noise, static_argnums=2)(noise.sampling, positions, 6)))
    drafts, count = np.asarray(drafts), np.asarray(got.num_accepted)
    stands = np.arange(3) < count[:, None]
    assert np.all(drafts[stands] == plain[:, :3][stands])
    assert np.all(np.asarray(got.next_token) == np.take_along_axis(plain, count[:, None], 1)[:, 0])
    stopped = count < np.asarray(num_drafts)
    assert stopped.any() and (count == 3).any()
    assert np.all(drafts[stopped, count[stopped]] != plain[stopped, count[stopped]])


def test_coupled_agrees_as_often_as_the_formula_says():
    """P(agree) = sum_v 1 / sum_u max(p_u/p_v, q_u/q_v), within 4.5 standard errors over 100,000 windows."""
    n = 100_000
    target, draft, noise = random_window(3, n, 3, 6)
    # The first row of lane 0 for all lanes, whose seeds differ.
    target, draft = (jnp.broadcast_to(x[:1], x.shape) for x in (target, draft))
    p, q = (np.exp(np.asarray(x[0, 0], np.float64)) for x in (target, draft))
    want = sum(1 / np.sum(np.maximum(p / p[v], q / q[v])) for v in range(6))
    overlap = np.minimum(p, q).sum()
    assert overlap / (2 - overlap) <= want <= overlap
    _, got = run_window("coupled", target, draft, jnp.ones(n, jnp.int32), noise)
    rate = float(np.asarray(got.num_accepted).mean())
    assert abs(rate - want) < 4.5 * np.sqrt(want * (1 - want) / n)


@pytest.mark.parametrize("law", acceptance.LAWS)
def test_greedy_takes_the_argmax_and_counts_the_leading_matches(law):
    """At temperature 0 all laws are the same rule, with any noise; 0..k drafts and k = 0."""
    n = 100_000
    target, draft, noise = random_window(4, n, 3, 6, temperature=0.0)
    best = np.argmax(np.asarray(target), -1)
    num_drafts = np.arange(n) % 4
    drafts, got = run_window(law, target, draft, jnp.asarray(num_drafts, jnp.int32), noise)
    same = (np.asarray(drafts) == best[:, :3]) & (np.arange(3) < num_drafts[:, None])
    count = np.cumprod(same, axis=1).sum(1)
    np.testing.assert_array_equal(got.num_accepted, count)
    np.testing.assert_array_equal(got.next_token, best[np.arange(n), count])
    assert set(count) == {0, 1, 2, 3}

    none = accept(law, target[:, :1], draft[:, :0], jnp.zeros((n, 0), jnp.int32), jnp.zeros(n, jnp.int32), noise)
    np.testing.assert_array_equal(none.next_token, best[:, 0])
    assert not np.any(none.num_accepted)


@pytest.mark.parametrize("law", ["rejection", "block"])
def test_extreme_distributions(law):
    """Disjoint supports are always refused, equal ones never, and a NaN draft costs its own lane nothing."""
    inf = -np.inf
    p = np.log(np.array([0.5, 0.5, 1e-30, 1e-38], np.float32))
    target = np.tile(p, (4, 3, 1))
    target[0, :, :2] = [0.0, inf]
    target[0, :, 2:] = inf
    draft = np.tile(p, (4, 2, 1))
    draft[0] = [inf, 0.0, inf, inf]
    draft[2, :] = [-80.0, -90.0, 0.0, -70.0]
    draft[3, :] = np.nan
    drafts = jnp.asarray([[1, 1], [3, 2], [2, 2], [0, 1]], jnp.int32)
    num_drafts = jnp.full(4, 2, jnp.int32)
    target, draft = jnp.asarray(target), jnp.asarray(draft)
    plan = plan_of(law, target, draft, drafts, num_drafts)
    count = np.asarray(count_of(law, plan, jnp.full((4, 2), 1e-6, jnp.float32)))
    assert count.tolist() == [0, 2, 0, 0]
    got = np.exp(np.asarray(next_of(plan, target, draft, jnp.zeros(4, jnp.int32), num_drafts)))
    assert got[0].tolist() == [1, 0, 0, 0]
    np.testing.assert_allclose(got[1:], np.tile(np.exp(p), (3, 1)), atol=1e-6)


def test_inference_C28_one_transform_in_a_mixed_batch(tree):
    """A greedy lane and one at T = 0.6, top-p 0.8 share a batch: both laws exact; top-p first is caught."""
    both = {key: value for key, value in emitted(tree, "rejection").items() if key[0] in (0, 1)}
    assert {setting for setting, _ in both} == {0, 1}
    assert worst(tree, both) < 1e-6
    slipped = emitted(tree, "rejection", target=wrong_order(tree.target_rows, tree.sampling))
    assert worst(tree, {key: value for key, value in slipped.items() if key[0] == 1}) > 1e-3


@pytest.mark.parametrize("law", ["rejection", "block"])
def test_inference_C29_deterministic_draft_under_a_masked_target(law):
    """A drafter that does not draw declares a one-hot q; whatever it proposes, p comes out."""
    p = np.array([0.5, 0.3, 0.2, 0.0, 0.0])
    with np.errstate(divide="ignore"):
        target = jnp.asarray(np.tile(np.log(p), (5, 2, 1)).astype(np.float32))
        draft = jnp.asarray(np.log(np.eye(5))[:, None, :].astype(np.float32))
    drafts, ones = jnp.arange(5, dtype=jnp.int32)[:, None], jnp.ones(5, jnp.int32)
    plan = plan_of(law, target, draft, drafts, ones)
    stands = np.asarray(plan.pass_probability, np.float64)
    follow = np.exp(np.asarray(next_of(plan, target, draft, jnp.zeros(5, jnp.int32), ones), np.float64))
    np.testing.assert_allclose(np.eye(5) * stands + (1 - stands) * follow, np.tile(p, (5, 1)), atol=1e-6)


def slots(law: str, seed: int, **settings) -> dict[str, np.ndarray]:
    """Tokens emitted by 100,000 windows, by the slot they come out of, and the drafts proposed."""
    n = 100_000
    target, draft, noise = random_window(seed, n, 3, 6, **settings)
    num_drafts = np.arange(n) % 4
    drafts, got = run_window(law, target, draft, jnp.asarray(num_drafts, jnp.int32), noise)
    drafts, count, following = (np.asarray(x) for x in (drafts, got.num_accepted, got.next_token))
    result = {f"draft {i}": drafts[:, i][count > i] for i in range(3)}
    result |= {f"next {i}": following[(count == i) & (num_drafts > i)] for i in range(3)}
    result |= {f"bonus {i}": following[(count == i) & (num_drafts == i)] for i in range(4)}
    assert all(len(tokens) > 300 for tokens in result.values())
    return result


def test_inference_C31_drafts_are_drawn_from_the_declared_q():
    """Counts of 100,000 drafts at each offset follow q at T = 0.7, top-p 0.9: chi-square at p = 1e-4."""
    n = 100_000
    target, draft, noise = random_window(6, n, 3, 6, temperature=0.7, top_p=0.9)
    target, draft = (jnp.broadcast_to(x[:1], x.shape) for x in (target, draft))
    drafts, _ = run_window("rejection", target, draft, jnp.full(n, 3, jnp.int32), noise)
    q = np.exp(np.asarray(draft[0], np.float64))
    for i in range(3):
        counts = np.bincount(np.asarray(drafts)[:, i], minlength=6)
        live = q[i] > 0
        assert live.sum() >= 2 and not counts[~live].any()
        # 25.74 is the critical value of 5 degrees of freedom, the most there can be.
        assert np.sum((counts[live] - n * q[i][live]) ** 2 / (n * q[i][live])) < 25.74


@pytest.mark.parametrize("law", acceptance.LAWS)
def test_inference_C35_C36_C37_every_slot_passes_the_same_chain(law):
    """A mask of two letters and a bias of -100 hold in every slot, bonus included, and each slot samples."""
    grammar = np.array([-np.inf, 0, -np.inf, -np.inf, 0, -np.inf])
    for slot, tokens in slots(law, 8, bias=grammar).items():
        assert set(tokens) == {1, 4}, slot
    for slot, tokens in slots(law, 9, bias=np.array([0, 0, -100.0, 0, 0, 0])).items():
        assert set(tokens) == {0, 1, 3, 4, 5}, slot


def test_inference_C34_filtered_lanes_sample_and_do_not_take_the_argmax():
    """300 replies from one law with top-k 3: exactly its three tokens come out, each of them, at each row."""
    n = 100_000
    target, draft, noise = random_window(10, n, 3, 6, temperature=1.5, top_k=3)
    target, draft = (jnp.broadcast_to(x[:1], x.shape) for x in (target, draft))
    for law in acceptance.LAWS:
        drafts, got = run_window(law, target, draft, jnp.zeros(n, jnp.int32), noise)
        assert set(np.asarray(got.next_token)[:300]) == set(np.flatnonzero(np.isfinite(target[0, 0])))


def test_unknown_law_is_refused():
    """By name, before any arithmetic."""
    target, draft, noise = random_window(5, 1, 1, 3)
    with pytest.raises(ValueError, match="law='typical' must be one of rejection, block, coupled"):
        accept("typical", target, draft, jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32), noise)
    with pytest.raises(ValueError, match="'coupled'"):
        make_plan("coupled", target, draft, jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32))
