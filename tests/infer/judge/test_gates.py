"""The judge's statistics against simulation: standard errors, error rates, power, and the plan of the sample."""

import math
from dataclasses import asdict
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from infer.judge import gates, plan
from infer.judge.gates import Estimate
from infer.judge.record import LIMITS
from tests.infer.judge import records

PROMPTS, LOOKS, SIMULATIONS = 40, 3, 3000
LIKELIHOOD_MARGIN, LENGTH_MARGIN = LIMITS["likelihood_bound"], LIMITS["length_margin"]


def draw(
    rng: np.random.Generator, simulations: int, repetitions: int, *, gap: float = 0.0, ratio: float = 1.0
) -> dict[str, np.ndarray]:
    """Tokens and log-probability of replies [arm (stock, candidate), simulation, prompt, reply].

    Prompts differ in length and likelihood; lengths are skewed and noise is as well, one nat a token.
    """
    shape = (2, simulations, PROMPTS, repetitions)
    prompt_length = 60 * rng.gamma(8, 1 / 8, (1, simulations, PROMPTS, 1))
    prompt_mean = -0.8 + 0.2 * rng.normal(size=(1, simulations, PROMPTS, 1))
    candidate = np.array([0.0, 1.0])[:, None, None, None]
    spread = rng.gamma(16, 1 / 16, shape)
    tokens = 1 + np.rint(prompt_length * (1 + candidate * (ratio - 1)) * spread)
    noise = np.sqrt(tokens) * (1 - rng.exponential(size=shape))
    return {"tokens": tokens, "log_prob": (prompt_mean + candidate * gap) * tokens + noise}


def likelihood(sample: dict[str, np.ndarray], counts: np.ndarray | int) -> Estimate:
    """From the first `counts` replies to each prompt (of each simulation)."""
    sums = {name: _first(values, counts) for name, values in sample.items()}
    arms = [(sums["log_prob"][arm], sums["tokens"][arm]) for arm in (1, 0)]
    return gates.gap_of_means(*arms)


def lengths(sample: dict[str, np.ndarray], counts: np.ndarray | int) -> Estimate:
    """The same of lengths."""
    tokens = _first(sample["tokens"], counts)
    replies = np.broadcast_to(np.asarray(counts)[..., None], tokens.shape[1:])
    return gates.ratio_of_means((tokens[1], replies), (tokens[0], replies))


def _first(values: np.ndarray, counts: np.ndarray | int) -> np.ndarray:
    sums = np.cumsum(values, axis=-1)
    place = np.broadcast_to(np.asarray(counts)[..., None] - 1, sums.shape[1:3])
    return np.take_along_axis(sums, np.broadcast_to(place, sums.shape[:3])[..., None], axis=-1)[..., 0]


def one(estimate: Estimate, number: int) -> Estimate:
    """Of one simulation."""
    return Estimate(
        estimate.value[number],
        estimate.se[number],
        estimate.candidate[number],
        estimate.stock[number],
        estimate.num_clusters,
    )


KINDS: dict[str, tuple[Any, float, float, dict[str, float]]] = {
    "likelihood": (likelihood, 0.0, LIKELIHOOD_MARGIN, {"gap": LIKELIHOOD_MARGIN}),
    "likelihood, below": (likelihood, 0.0, LIKELIHOOD_MARGIN, {"gap": -LIKELIHOOD_MARGIN}),
    "lengths": (lengths, 1.0, LENGTH_MARGIN, {"ratio": 1 + LENGTH_MARGIN}),
    "lengths, below": (lengths, 1.0, LENGTH_MARGIN, {"ratio": 1 - LENGTH_MARGIN}),
}


def passes(kind: str, seed: int, *, at_bound: bool) -> float:
    """Share of simulated judgements that pass: pilot, plan, looks, verdict."""
    compare, centre, margin, bound = KINDS[kind]
    rng = np.random.default_rng(seed)
    gap = bound if at_bound else {}
    pilot = compare(draw(rng, SIMULATIONS, 1, **gap), 1)
    needed = [plan.needed_repetitions(one(pilot, i), margin, 1, LOOKS) for i in range(SIMULATIONS)]
    per_look = -(-np.array(needed) // LOOKS)
    sample = draw(rng, SIMULATIONS, LOOKS * int(per_look.max()), **gap)
    looks = [compare(sample, per_look * number) for number in range(1, LOOKS + 1)]
    verdicts = [
        gates.decide(kind, [one(look, i) for look in looks], centre, margin, LOOKS).verdict for i in range(SIMULATIONS)
    ]
    return verdicts.count("pass") / SIMULATIONS


@pytest.mark.parametrize("kind", KINDS)
def test_strict_passes_a_fault_at_the_bound_with_two_and_a_half_percent_at_most(kind: str) -> None:
    three_sigma = 3 * math.sqrt(gates.ALPHA * (1 - gates.ALPHA) / SIMULATIONS)
    assert passes(kind, 11, at_bound=True) <= gates.ALPHA + three_sigma


@pytest.mark.parametrize("kind", ["likelihood", "lengths"])
def test_strict_passes_what_is_lossless(kind: str) -> None:
    assert passes(kind, 12, at_bound=False) >= 0.85


def test_drawing_with_fixed_intervals_until_one_fits_passes_far_more() -> None:
    """Why looks are announced: the same fault, a reply to each prompt at a time, and 1.96 standard errors."""
    simulations = 1000
    sample = draw(np.random.default_rng(13), simulations, 60, gap=LIKELIHOOD_MARGIN)
    fitted = np.zeros(simulations, bool)
    for count in range(2, 61):
        look = likelihood(sample, count)
        fitted |= np.abs(look.value) + gates.INTERVAL_95 * look.se <= LIKELIHOOD_MARGIN
    assert fitted.mean() > 0.10


@pytest.mark.parametrize("compare, truth", [(likelihood, -0.03), (lengths, 1.04)])
def test_standard_errors_are_those_of_repeated_samples(compare: Any, truth: float) -> None:
    sample = draw(np.random.default_rng(14), 4000, 4, **({"gap": truth} if compare is likelihood else {"ratio": truth}))
    found = compare(sample, 4)
    # a standard deviation of 4,000 values is known to 1.2 %
    assert found.value.std() == pytest.approx(np.sqrt((found.se**2).mean()), rel=0.05)
    assert found.value.mean() == pytest.approx(truth, abs=0.002)
    inside = np.abs(found.value - truth) <= gates.critical_value(1, PROMPTS) * found.se
    assert inside.mean() == pytest.approx(0.95, abs=0.015)


def test_replies_to_one_prompt_count_once() -> None:
    """A fault that depends on the prompt makes its replies alike; to count them one by one would claim too much."""
    sample = draw(np.random.default_rng(15), 2000, 8)
    # what the candidate adds to a prompt's replies
    shared = np.random.default_rng(16).normal(size=(2000, PROMPTS))[None, :, :, None] * 20
    sample = sample | {"log_prob": sample["log_prob"] + shared * np.array([0.0, 1.0])[:, None, None, None]}
    clustered = likelihood(sample, 8)
    replies = {name: values.reshape(2, 2000, -1) for name, values in sample.items()}
    alone = gates.gap_of_means(*((replies["log_prob"][arm], replies["tokens"][arm]) for arm in (1, 0)))
    spread = clustered.value.std()
    assert clustered.se.mean() == pytest.approx(spread, rel=0.06)
    assert alone.se.mean() < 0.6 * spread


def test_prompts_that_workloads_share_are_one_cluster() -> None:
    look = records.build()["raw"]["replies"]["looks"][-1]
    assert gates.compare_likelihood(look).num_clusters == 40
    sums = {
        arm: [np.sum([look[w][arm][name] for w in look], axis=0) for name in ("sum_log_prob", "num_tokens")]
        for arm in gates.ARMS
    }
    by_hand = gates.gap_of_means(tuple(sums["candidate"]), tuple(sums["stock"]))
    assert gates.compare_likelihood(look).se == pytest.approx(by_hand.se, rel=1e-12)


def test_a_gap_by_hand() -> None:
    """Two prompts: means 1 and 2 nats a token, influences worked out on paper."""
    ours = (np.array([-10.0, -30.0]), np.array([10.0, 10.0]))
    theirs = (np.array([-20.0, -20.0]), np.array([20.0, 20.0]))
    found = gates.gap_of_means(ours, theirs)
    assert (found.candidate, found.stock, found.value) == (-2.0, -1.0, -1.0)
    # influences +-10/20, so the variance is 2 * (0.25 + 0.25)
    assert found.se == pytest.approx(1.0)
    assert gates.ratio_of_means(ours, theirs).value == 2.0
    assert gates.ratio_of_means(ours, theirs).se == pytest.approx(1.0)


@pytest.mark.parametrize(
    "values, expected",
    [
        ([0.0], "pass"),
        ([0.026], "pass"),
        ([0.028], "undecided"),
        ([-0.05], "undecided"),
        ([0.074], "fail"),
        ([-0.074], "fail"),
        # the first look that decides is the verdict, whatever follows
        ([0.0, 0.2], "pass"),
        ([0.2, 0.0], "fail"),
        ([0.03, 0.0], "pass"),
        ([0.03, 0.04], "undecided"),
    ],
)
def test_strict_verdicts(values: list[float], expected: str) -> None:
    num_looks = len(values)
    half = gates.critical_value(num_looks, 50)
    estimates = [Estimate(value, 0.0235 / half, value, 0.0, 50) for value in values]
    found = gates.decide("likelihood", estimates, 0.0, 0.05, num_looks)
    assert found.verdict == expected
    assert found.interval is not None and found.interval[1] - found.interval[0] == pytest.approx(0.047)


def test_reference_fails_only_what_lies_outside_altogether() -> None:
    def verdict(value: float) -> str:
        full = dict(records.build(), raw=None)
        full["likelihood"] = {"gap": value, "se": 0.01, "candidate": -0.5, "stock": -0.5}
        return {check.name: check.verdict for check in gates.check(full, "reference")}["likelihood"]

    assert [verdict(x) for x in (0.0, 0.069, -0.069, 0.07, -0.07)] == ["pass", "pass", "pass", "fail", "fail"]


def test_looks_cost_width() -> None:
    widths = [gates.critical_value(looks, 1001) for looks in range(1, gates.MAX_LOOKS + 1)]
    assert widths == sorted(widths) and widths[0] == pytest.approx(1.9623, abs=1e-4)
    assert gates.critical_value(1, None) == pytest.approx(1.95996, abs=1e-5)


@pytest.mark.parametrize("df, expected", [(9, 2.2622), (10, 2.2281), (20, 2.0860), (30, 2.0423), (60, 2.0003)])
def test_student_quantiles_are_the_tabulated_ones(df: int, expected: float) -> None:
    assert gates.critical_value(1, df + 1) == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize(
    "statistic, df, expected",
    [(3.841, 1, 0.05), (5.991, 2, 0.05), (7.815, 3, 0.05), (30.144, 19, 0.05), (43.820, 19, 0.001), (31.410, 20, 0.05)],
)
def test_chi_square_is_the_tabulated_one(statistic: float, df: int, expected: float) -> None:
    assert gates.chi_square_p(statistic, df) == pytest.approx(expected, rel=1e-3)
    assert gates.chi_square_p(0.0, df) == 1.0


@pytest.mark.parametrize("num_looks, clusters", [(1, 30), (3, 64), (4, None)])
def test_power_at_the_needed_error_is_ninety_percent(num_looks: int, clusters: int | None) -> None:
    se = gates.needed_se(0.05, num_looks, clusters)
    assert gates.power_at_zero_gap(0.05, se, num_looks, clusters) == pytest.approx(0.90)
    values = np.random.default_rng(17).normal(0, se, 100_000)
    inside = np.abs(values) + gates.critical_value(num_looks, clusters) * se <= 0.05
    assert inside.mean() == pytest.approx(0.90, abs=0.005)
    assert gates.power_at_zero_gap(0.05, 1.0, num_looks, clusters) == 0.0


def token_law(rng: np.random.Generator, vocab: int = 30) -> np.ndarray:
    law = rng.dirichlet(np.full(vocab, 0.2), 50)
    return -np.sort(-law, axis=1)


def table_of(rng: np.random.Generator, law: np.ndarray, drawn_from: np.ndarray, num_tokens: int) -> dict[str, Any]:
    """What a run records of one slot whose tokens should follow `law`, and follow `drawn_from`."""
    context = rng.integers(0, len(law), num_tokens)
    token = (rng.random(num_tokens)[:, None] > np.cumsum(drawn_from[context], axis=1)).sum(1)
    token = np.minimum(token, law.shape[1] - 1)
    chance = law[context]
    own = chance[np.arange(num_tokens), token]
    logs = np.log(np.maximum(chance, 1e-30))
    mean = (chance * logs).sum(1)
    variance = (chance * (logs - mean[:, None]) ** 2).sum(1)
    below = np.where(np.arange(law.shape[1])[None] < token[:, None], chance, 0.0).sum(1)
    place = below + rng.random(num_tokens) * own
    return {
        "slot": [1],
        "num_tokens": [num_tokens],
        "sum_log_prob_excess": [float((np.log(own) - mean).sum())],
        "var_log_prob": [float(variance.sum())],
        "sum_first_excess": [float(((token == 0) - chance[:, 0]).sum())],
        "var_first": [float((chance[:, 0] * (1 - chance[:, 0])).sum())],
        "pit_counts": [np.bincount(np.minimum((place * 20).astype(int), 19), minlength=20).tolist()],
    }


def test_one_arm_tests_of_honest_tokens_have_uniform_p_values() -> None:
    rng = np.random.default_rng(18)
    found: dict[str, list[float]] = {}
    for _ in range(400):
        law = token_law(rng)
        for name, result in gates.martingale_tests(table_of(rng, law, law, gates.MIN_SLOT_TOKENS)).items():
            found.setdefault(name, []).append(result.p_value)
    assert found.keys() == {"log-probability, slot 1", "first choice, slot 1", "PIT, slot 1"}
    for name, values in found.items():
        # four standard errors of a share of 400
        for level in (0.05, 0.3, 0.7):
            assert np.mean(np.array(values) < level) == pytest.approx(level, abs=0.1 * math.sqrt(level)), name
        assert not any(gates.is_caught(value, 24) for value in values), name


def test_one_arm_tests_catch_a_wrong_law() -> None:
    rng = np.random.default_rng(19)
    law = token_law(rng)
    flat = np.sqrt(law) / np.sqrt(law).sum(1, keepdims=True)
    mixed = 0.9 * law + 0.1 * flat
    found = gates.martingale_tests(table_of(rng, law, mixed, 40_000))
    assert all(gates.is_caught(result.p_value, 24) for result in found.values())
    # a shift towards the middle of the law that leaves mean log-probability alone still shows in the PIT
    table = table_of(rng, law, law, 40_000)
    counts = table["pit_counts"][0]
    counts[10] += counts[0] // 5
    counts[0] -= counts[0] // 5
    caught = {name for name, one in gates.martingale_tests(table).items() if gates.is_caught(one.p_value, 24)}
    assert caught == {"PIT, slot 1"}


def test_slots_with_few_tokens_are_not_tested_and_certainty_is_no_fault() -> None:
    rng = np.random.default_rng(20)
    table = records.martingale(rng)
    table["num_tokens"][2] = gates.MIN_SLOT_TOKENS - 1
    assert not any("slot 2" in name for name in gates.martingale_tests(table))
    certain = {name: [values[0]] for name, values in table.items()}
    certain |= {"sum_log_prob_excess": [0.002], "var_log_prob": [0.0], "sum_first_excess": [0.0], "var_first": [0.0]}
    assert not any(gates.is_caught(one.p_value, 3) for one in gates.martingale_tests(certain).values())


@pytest.mark.parametrize("shift, variance", [(0.02, 0.9), (-0.005, 0.1)])
def test_tokens_to_catch_a_control_are_enough(shift: float, variance: float) -> None:
    size = plan.tokens_to_catch(shift, variance, 24)
    sums = np.random.default_rng(21).normal(size * shift, math.sqrt(size * variance), 20_000)
    p_values = 2 * np.array([NormalDist().cdf(-abs(z)) for z in sums / math.sqrt(size * variance)])
    assert np.mean([gates.is_caught(p, 24) for p in p_values]) == pytest.approx(0.9, abs=0.01)


def test_what_a_test_would_catch_is_what_it_catches() -> None:
    rng = np.random.default_rng(22)
    size, num_tests, simulations = 5000, 15, 4000
    assert plan.tokens_to_catch(gates.smallest_shift(0.8 * size, size, num_tests), 0.8, num_tests) == pytest.approx(
        size, abs=1
    )
    share = gates.smallest_share(size, 20, num_tests)
    chances = np.full(20, 0.05)
    chances[4] += share
    chances[11] -= share
    caught = 0
    for counts in rng.multinomial(size, chances, simulations):
        statistic = float(((counts - size / 20) ** 2).sum() / (size / 20))
        caught += gates.is_caught(gates.chi_square_p(statistic, 19), num_tests)
    assert caught / simulations == pytest.approx(gates.POWER, abs=0.03)


def pilot(repetitions: int = 1) -> Any:
    return records.build(repetitions=repetitions, num_looks=1)["raw"]["replies"]["looks"][0]


def test_the_plan_meets_every_gate() -> None:
    found = plan.make_plan(pilot(), LIMITS, tokens_per_second=1000.0)
    assert (found.num_looks, found.num_prompts, found.within_budget) == (3, 40, True)
    assert [gate.name for gate in found.gates] == [
        *("likelihood", "argmax", "lengths.solo", "lengths.team", "lengths.busy"),
    ]
    for gate in found.gates:
        assert gate.power >= gates.POWER
        workloads = [gate.name.split(".")[1]] if "." in gate.name else list(found.repetitions)
        assert all(found.repetitions[name] * found.num_looks >= gate.repetitions for name in workloads)
    # no more than the neediest asks
    assert max(found.repetitions.values()) * 3 < max(gate.repetitions for gate in found.gates) + 3
    assert found.num_replies == 2 * 3 * 40 * sum(found.repetitions.values())
    assert found.num_tokens == pytest.approx(100 * found.num_replies, rel=0.05)
    assert found.seconds == pytest.approx(found.num_tokens / 1000, rel=0.01)
    assert plan.planned_replies(asdict(found), "team", 1) == 2 * 40 * found.repetitions["team"]


def test_a_tighter_bound_and_a_noisier_pilot_need_more() -> None:
    loose = plan.make_plan(pilot(), LIMITS)
    tight = plan.make_plan(pilot(), LIMITS | {"argmax_bound": 0.005})
    more = {gate.name: gate.repetitions for gate in tight.gates}["argmax"]
    assert more == pytest.approx(4 * {gate.name: gate.repetitions for gate in loose.gates}["argmax"], abs=4)
    # the size of the pilot is no matter, but for its own noise
    big = plan.make_plan(pilot(9), LIMITS)
    for ours, theirs in zip(big.gates, loose.gates, strict=True):
        assert ours.repetitions == pytest.approx(theirs.repetitions, rel=1.0, abs=2)


@pytest.mark.parametrize("share, looks", [(0.5, 3), (0.02, 1)])
def test_a_budget_scales_the_plan_down_and_says_what_is_left(share: float, looks: int) -> None:
    limits = LIMITS | {"argmax_bound": 0.002}
    free = plan.make_plan(pilot(), limits, tokens_per_second=100.0)
    poor = plan.make_plan(pilot(), limits, budget_tokens=share * free.num_tokens)
    assert not poor.within_budget and poor.num_tokens <= share * free.num_tokens
    assert min(gate.power for gate in poor.gates) < 0.6 < 0.9 <= min(gate.power for gate in free.gates)
    timed = plan.make_plan(pilot(), limits, tokens_per_second=100.0, budget_seconds=share * free.seconds)
    assert timed.repetitions == poor.repetitions and timed.num_looks == poor.num_looks
    assert poor.num_looks == looks


def test_the_smallest_plan_is_one_reply() -> None:
    found = plan.make_plan(pilot(), LIMITS, budget_tokens=1)
    assert found.num_looks == 1 and set(found.repetitions.values()) == {1} and not found.within_budget


def test_plans_that_cannot_be() -> None:
    for looks in (0, 5):
        with pytest.raises(ValueError, match=f"num_looks={looks} must be from 1 to 4"):
            plan.make_plan(pilot(), LIMITS, num_looks=looks)
    with pytest.raises(ValueError, match="needs tokens_per_second"):
        plan.make_plan(pilot(), LIMITS, budget_seconds=10.0)
    assert plan.fixed(8, {"solo": 2, "team": 3, "busy": 1}).num_replies == 2 * 8 * 6
