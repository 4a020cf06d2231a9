"""Every gate of the judge, and all of its statistics: from a complete record to verdicts.

Two rules. `reference`: a statistical gate fails only if its whole 95 % interval lies outside the bound, so a small
sample passes. `strict`: equivalence, the whole interval has to lie inside; it is taken at looks announced beforehand,
with the error of 2.5 % a side split evenly over them (Bonferroni), and what no look decides is undecided, never passed.
Intervals are clustered by prompt and paired: both arms reply to the same prompts, and a prompt's replies of the two
arms count as one observation, however many there are.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

RULES = ("strict", "reference")
WORKLOADS = ("solo", "team", "busy")
ARMS = ("stock", "candidate")
PASS, FAIL, UNDECIDED, NOT_APPLICABLE = "pass", "fail", "undecided", "n-a"

# One-sided error of an equivalence gate, over all looks.
ALPHA = 0.025
MAX_LOOKS = 4
# Chance to pass without a gap, or to be caught, that samples are made for.
POWER = 0.9
# Half of a 95 % interval in standard errors.
INTERVAL_95 = 1.96
# With fewer prompts their spread says too little about the standard error.
MIN_CLUSTERS = 10
# Chance that any of the one-arm tests of an honest record fails.
FAMILY_ALPHA = 0.001
# Tokens of a slot from which on its sums are as good as normal.
MIN_SLOT_TOKENS = 1000
# Variance a token that rounding alone may cause, in nats squared or shares squared.
ROUNDING_VARIANCE = 1e-10
# The gates of the one-arm tests, and the tests' names.
KINDS = {
    "martingale.likelihood": "log-probability",
    "martingale.argmax": "first choice",
    "martingale.pit": "PIT",
}
# Where float32 may decide either way, and in how many tokens.
NEAR_TIE = 1e-5
TOKENS_A_NEAR_TIE = 10_000

# Totals and counts.
Sums = tuple[np.ndarray, np.ndarray]
Record = Mapping[str, Any]

_normal = NormalDist()


@dataclass(frozen=True)
class Check:
    """What one gate found."""

    name: str
    measured: float | None
    # what is allowed, in words
    limit: str
    # "pass", "fail", "undecided" or "n-a"
    verdict: str
    # one line; what the verdict rests on
    reason: str = ""
    # the chance that an equivalence gate passes at this sample size if there is no gap at all
    power: float | None = None
    # the interval that the verdict rests on
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Verdict:
    """What all gates found together."""

    specscore: float | None
    passed: bool
    # None if passed, else the gates in the way and why
    reason: str | None
    checks: tuple[Check, ...]


@dataclass(frozen=True)
class Estimate:
    """A comparison of the arms and its standard error, clustered by prompt; arrays of one shape, or numbers."""

    value: Any
    se: Any
    candidate: Any
    stock: Any
    # None where only the figures have come down to us
    num_clusters: int | None


def gap_of_means(candidate: Sums, stock: Sums) -> Estimate:
    """Candidate's mean less stock's.

    Args:
        candidate, stock: totals and counts by prompt, each [..., prompts]; the mean is all totals over all counts.

    The standard error linearises both ratios (Cochran, Sampling Techniques, chapter 6) and sums their influences within
    each prompt before squaring.
    """
    (ours, own_influence), (theirs, their_influence) = _mean(*candidate), _mean(*stock)
    se = _clustered_se(own_influence - their_influence)
    return Estimate(ours - theirs, se, ours, theirs, own_influence.shape[-1])


def ratio_of_means(candidate: Sums, stock: Sums) -> Estimate:
    """Candidate's mean over stock's, by the delta method; arguments as in `gap_of_means`."""
    (ours, own_influence), (theirs, their_influence) = _mean(*candidate), _mean(*stock)
    ratio = ours / theirs
    se = _clustered_se((own_influence - ratio[..., None] * their_influence) / theirs[..., None])
    return Estimate(ratio, se, ours, theirs, own_influence.shape[-1])


def _mean(total: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A ratio of sums [...], and what each prompt adds to its error [..., prompts]."""
    total, count = np.asarray(total, np.float64), np.asarray(count, np.float64)
    size = count.sum(-1)
    mean = total.sum(-1) / size
    return mean, (total - mean[..., None] * count) / size[..., None]


def _clustered_se(influence: np.ndarray) -> np.ndarray:
    clusters = influence.shape[-1]
    return np.sqrt((influence**2).sum(-1) * clusters / (clusters - 1))


def compare_likelihood(look: Mapping[str, Any]) -> Estimate:
    """Mean log-probability of sampled tokens, nats; all workloads of a look of `raw.replies` pooled."""
    return gap_of_means(*(_pooled(look, arm, "sum_log_prob", "num_tokens") for arm in reversed(ARMS)))


def compare_argmax(look: Mapping[str, Any]) -> Estimate:
    """Share of sampled tokens that are not the target's first choice; all workloads of a look pooled."""
    return gap_of_means(*(_pooled(look, arm, "num_not_first", "num_tokens") for arm in reversed(ARMS)))


def compare_lengths(look: Mapping[str, Any], workload: str) -> Estimate:
    """Ratio of mean reply lengths under one workload of a look."""
    own = {workload: look[workload]}
    return ratio_of_means(*(_pooled(own, arm, "sum_length", "num_replies") for arm in reversed(ARMS)))


def _pooled(look: Mapping[str, Any], arm: str, total: str, count: str) -> Sums:
    """Totals and counts by prompt; a prompt that several workloads share is one cluster."""
    prompts: dict[str, list[float]] = {}
    for arms in look.values():
        clusters = arms[arm]
        for name, x, n in zip(clusters["prompt"], clusters[total], clusters[count], strict=True):
            sums = prompts.setdefault(name, [0.0, 0.0])
            sums[0] += x
            sums[1] += n
    totals, counts = np.array(list(prompts.values()), np.float64).T
    return totals, counts


def critical_value(num_looks: int, num_clusters: int | None) -> float:
    """Half of an equivalence interval in standard errors: Student's t with one degree of freedom less than prompts, the
    error split over the looks."""
    z = _normal.inv_cdf(1 - ALPHA / num_looks)
    return z if num_clusters is None else _student(z, num_clusters - 1)


def _student(z: float, df: int) -> float:
    """Student's quantile from the normal one (Abramowitz and Stegun 26.7.5)."""
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / df ** (i + 1) for i, term in enumerate(terms))


def power_at_zero_gap(margin: float, se: float, num_looks: int, num_clusters: int | None) -> float:
    """Chance that the last look alone passes if there is no gap."""
    if se == 0:
        return 1.0
    return max(0.0, 2 * _normal.cdf(margin / se - critical_value(num_looks, num_clusters)) - 1)


def chi_square_p(statistic: float, df: int) -> float:
    """Chance of a larger chi-square (the finite sum for whole degrees of freedom, Abramowitz and Stegun 26.4.4-5)."""
    half = statistic / 2
    if df % 2:
        p, term, a = math.erfc(math.sqrt(half)), math.sqrt(half / math.pi) * 2 * math.exp(-half), 0.5
    else:
        p, term, a = math.exp(-half), half * math.exp(-half), 1.0
    while a < df / 2:
        p += term
        a += 1
        term *= half / a
    return min(1.0, p)


@dataclass(frozen=True)
class Significance:
    """One significance test."""

    # z, or chi-square
    statistic: float
    p_value: float


def martingale_tests(table: Mapping[str, Any]) -> dict[str, Significance]:
    """Do an arm's tokens follow the law they should? By slot of the window, whichever has enough tokens.

    Args:
        table: one arm of `raw.martingale`. Sums of log-probability and of being the first choice, each less its
            expectation, over the root of their variance are normal; the randomised place of each token within its
            law (Smith 1985) is uniform.
    """
    tests = {}
    for row, slot in enumerate(table["slot"]):
        size = table["num_tokens"][row]
        if size < MIN_SLOT_TOKENS:
            continue
        for name, excess, variance in (
            ("log-probability", "sum_log_prob_excess", "var_log_prob"),
            ("first choice", "sum_first_excess", "var_first"),
        ):
            z = table[excess][row] / math.sqrt(table[variance][row] + ROUNDING_VARIANCE * size)
            tests[f"{name}, slot {slot}"] = Significance(z, math.erfc(abs(z) / math.sqrt(2)))
        counts = np.array(table["pit_counts"][row], np.float64)
        expected = counts.sum() / len(counts)
        statistic = float(((counts - expected) ** 2).sum() / expected)
        tests[f"PIT, slot {slot}"] = Significance(statistic, chi_square_p(statistic, len(counts) - 1))
    return tests


def is_caught(p_value: float, num_tests: int) -> bool:
    """Whether a test that is one of a family of so many fails."""
    return p_value < FAMILY_ALPHA / num_tests


def catching_distance(num_tests: int) -> float:
    """Standard errors by which a z has to be off to be caught, as one of so many tests, with a chance of 90 %."""
    return _normal.inv_cdf(1 - FAMILY_ALPHA / (2 * num_tests)) + _normal.inv_cdf(POWER)


def smallest_shift(variance: float, num_tokens: int, num_tests: int) -> float:
    """What a token's mean excess has to be to be caught with 90 %; `variance` is the sum over the tokens."""
    return catching_distance(num_tests) * math.sqrt(variance) / num_tokens


def smallest_share(num_tokens: int, num_bins: int, num_tests: int) -> float:
    """The share of all tokens that has to lie in a wrong bin of the PIT to be caught with about 90 %.

    The chi-square that it adds is found from the normal approximation of the noncentral law.
    """
    df, z = num_bins - 1, _normal.inv_cdf(POWER)
    low, high = 0.0, 1000.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if chi_square_p(middle, df) > FAMILY_ALPHA / num_tests else (low, middle)
    spread = 2 * z + math.sqrt(4 * z**2 + 2 * df + 4 * (high - df))
    return math.sqrt((spread**2 - 2 * df) / 4 / (2 * num_bins * num_tokens))


def control(name: str, strength: float, num_tokens: int, tests: Mapping[str, Significance]) -> dict[str, Any]:
    """An entry of `raw.controls`. The honest arm, with strength 0, goes through the same tests."""
    rows = {
        test: {
            "statistic": one.statistic,
            "p_value": one.p_value,
            "caught": is_caught(one.p_value, len(tests)),
        }
        for test, one in tests.items()
    }
    caught = any(row["caught"] for row in rows.values())
    return {"name": name, "strength": strength, "num_tokens": num_tokens, "tests": rows, "caught": caught}


def judge(record: Record, rule: str = "strict") -> Verdict:
    """All verdicts of a complete record (`infer.judge.record.load`), and the one they make together.

    Raises:
        ValueError: there is no such rule.
    """
    checks = check(record, rule)
    open_checks = [one for one in checks if one.verdict in (FAIL, UNDECIDED)]
    reason = "; ".join(f"{one.name} {one.verdict}: {one.reason}" for one in open_checks) or None
    return Verdict(record["specscore"], not open_checks, reason, tuple(checks))


def check(record: Record, rule: str = "strict") -> list[Check]:
    """The verdict of every gate. What does not apply says why; what was not measured is undecided.

    Under `reference` the gates beyond the reference count only where they were measured.

    Raises:
        ValueError: there is no such rule.
    """
    if rule not in RULES:
        raise ValueError(f"{rule=} must be one of {', '.join(RULES)}")
    found = [_workloads(record), _memory(record), _fidelity(record), *_replies(record, rule), _greedy(record)]
    return found + [_coupled(record, rule), *_martingale(record, rule), _controls(record)]


def _workloads(record: Record) -> Check:
    missing = [name for name in WORKLOADS if name not in record["ratios"]]
    reason = f"no passes of {', '.join(missing)}" if missing else ""
    measured = float(len(WORKLOADS) - len(missing))
    return Check("workloads", measured, f"all {len(WORKLOADS)}", UNDECIDED if missing else PASS, reason)


def _memory(record: Record) -> Check:
    memory = record["memory"]
    if memory is None:
        return Check("memory", None, "stock's peak + slack", UNDECIDED, "not measured")
    limit = f"at most {memory['allowed_mib']:,.1f} MiB"
    raw = (record.get("raw") or {}).get("memory")
    reason = "" if raw is None else f"by {raw['candidate']['source']}"
    return Check("memory", memory["peak_mib"], limit, PASS if memory["ok"] else FAIL, reason)


def _fidelity(record: Record) -> Check:
    measured, ceiling = record["fidelity"], record["limits"]["fidelity_ceiling"]
    limit = f"at most {ceiling:g}"
    if measured is None:
        return Check("fidelity", None, limit, UNDECIDED, "no fixed texts were read")
    if measured > ceiling:
        return Check("fidelity", measured, limit, FAIL, "mean absolute difference of log-probabilities")
    texts = (record.get("raw") or {}).get("texts") or ()
    counts = np.sum([text["committed"] for text in texts], axis=0) if texts else np.ones(1)
    if not np.all(counts):
        never = ", ".join(str(place) for place in np.flatnonzero(counts == 0))
        return Check("fidelity", measured, limit, UNDECIDED, f"no window of the texts ever kept {never} drafts")
    return Check("fidelity", measured, limit, PASS)


def _replies(record: Record, rule: str) -> list[Check]:
    limits, raw = record["limits"], record.get("raw")
    looks = None if raw is None else (raw["replies"] or {}).get("looks")
    plan_looks = raw["replies"]["plan"]["num_looks"] if looks else 1
    found = []
    for name, compare, margin in (
        ("likelihood", compare_likelihood, limits["likelihood_bound"]),
        ("argmax", compare_argmax, limits["argmax_bound"]),
    ):
        stored = record[name]
        if looks:
            estimates = [compare(look) for look in looks]
        else:
            estimates = stored and [Estimate(stored["gap"], stored["se"], stored["candidate"], stored["stock"], None)]
        why = _no_replies(record, looks)
        found.append(_equivalence(name, estimates, 0.0, margin, plan_looks, rule, why))
    for workload in WORKLOADS:
        stored = (record["lengths"] or {}).get(workload)
        if looks and workload in looks[-1]:
            estimates = [compare_lengths(look, workload) for look in looks]
        else:
            estimates = stored and [_stored_lengths(stored)]
        why = _no_replies(record, looks, workload)
        found.append(
            _equivalence(f"lengths.{workload}", estimates, 1.0, limits["length_margin"], plan_looks, rule, why)
        )
    return found


def _stored_lengths(stored: Mapping[str, float]) -> Estimate:
    se = (stored["high"] - stored["low"]) / (2 * INTERVAL_95)
    return Estimate(stored["ratio"], se, stored["ratio"], 1.0, None)


def _no_replies(record: Record, looks: Sequence[Any] | None, workload: str | None = None) -> str | None:
    """Why sampled replies can't be compared, if they can't."""
    if why := _not_natural(record):
        return why
    if looks:
        read = [arms for name, arms in looks[-1].items() if workload in (None, name)]
        if read and not any(sum(arms[arm]["num_ended"]) for arms in read for arm in ARMS):
            return "fixed lengths: no reply ended by itself"
    return None


def _not_natural(record: Record) -> str | None:
    if record.get("synthetic_acceptance"):
        return "synthetic acceptance: tokens follow no law"
    if str(record.get("model", "")).startswith("random:"):
        return "random weights: replies have no natural end"
    return None


def _equivalence(
    name: str,
    estimates: Sequence[Estimate] | None,
    centre: float,
    margin: float,
    num_looks: int,
    rule: str,
    why_not: str | None,
) -> Check:
    limit = f"{centre:g} ± {margin:g}"
    if why_not is not None:
        return Check(name, None, limit, NOT_APPLICABLE, why_not)
    if not estimates:
        return Check(name, None, limit, UNDECIDED, "no replies were drawn")
    if rule == "reference":
        return _not_proven_outside(name, estimates[-1], centre, margin)
    return decide(name, estimates, centre, margin, num_looks)


def _not_proven_outside(name: str, estimate: Estimate, centre: float, margin: float) -> Check:
    """The rule `reference`."""
    half = INTERVAL_95 * float(estimate.se)
    value, limit = float(estimate.value), f"{centre:g} ± {margin:g}"
    interval = (value - half, value + half)
    outside = interval[0] > centre + margin or interval[1] < centre - margin
    reason = f"95 % interval {_words(interval)}{' lies outside' if outside else ''}"
    power = power_at_zero_gap(margin, float(estimate.se), 1, estimate.num_clusters)
    return Check(name, value, limit, FAIL if outside else PASS, reason, power, interval)


def decide(name: str, estimates: Sequence[Estimate], centre: float, margin: float, num_looks: int) -> Check:
    """The rule `strict`: the first look that decides is the verdict.

    Args:
        estimates: one a look, of a growing sample.
        num_looks: looks that were announced.
    """
    limit, last = f"{centre:g} ± {margin:g}", estimates[-1]
    power = power_at_zero_gap(margin, float(last.se), num_looks, last.num_clusters)
    if last.num_clusters is not None and last.num_clusters < MIN_CLUSTERS:
        reason = f"{last.num_clusters} prompts, and an interval needs {MIN_CLUSTERS}"
        return Check(name, float(last.value), limit, UNDECIDED, reason, power)
    half = critical_value(num_looks, last.num_clusters)
    for number, estimate in enumerate(estimates, 1):
        value, se = float(estimate.value), float(estimate.se)
        interval = (value - half * se, value + half * se)
        where = f"interval {_words(interval)} at look {number} of {num_looks}"
        if centre - margin <= interval[0] and interval[1] <= centre + margin:
            return Check(name, value, limit, PASS, where, power, interval)
        if interval[1] < centre - margin or interval[0] > centre + margin:
            return Check(name, value, limit, FAIL, f"{where} lies outside", power, interval)
    times = (se / needed_se(margin, num_looks, last.num_clusters)) ** 2
    reason = f"the sample is too small: {where} crosses the bound; 90 % power takes {times:.1f} times the replies"
    return Check(name, value, limit, UNDECIDED, reason, power, interval)


def needed_se(margin: float, num_looks: int, num_clusters: int | None) -> float:
    """The standard error at which the last look alone passes with 90 % if there is no gap."""
    return margin / (critical_value(num_looks, num_clusters) + _normal.inv_cdf((1 + POWER) / 2))


def _words(interval: tuple[float, float]) -> str:
    return f"[{interval[0]:.4f}, {interval[1]:.4f}]"


def _greedy(record: Record) -> Check:
    measured, floor = record["greedy_agreement"], record["limits"]["greedy_agreement_floor"]
    rows = (record.get("raw") or {}).get("greedy")
    said = "" if not rows else _partings(rows)
    if floor is None:
        return Check("greedy_agreement", measured, "none", NOT_APPLICABLE, "; ".join(filter(None, ("no floor", said))))
    limit = f"at least {floor:g}"
    if measured is None:
        return Check("greedy_agreement", None, limit, UNDECIDED, "not measured")
    return Check("greedy_agreement", measured, limit, PASS if measured >= floor else FAIL, said)


def partings(rows: Sequence[Mapping[str, Any]]) -> tuple[int, int, int]:
    """Tokens that texts were compared at, places where they part, and how many of those are near-ties (float32)."""
    tokens = sum(min(row["num_tokens"], _compared(row)) for row in rows)
    margins = [row["margin"] for row in rows if row["first_difference"] is not None]
    return tokens, len(margins), sum(margin <= NEAR_TIE for margin in margins)


def _compared(row: Mapping[str, Any]) -> int:
    place = row["first_difference"]
    return row["num_tokens"] if place is None else place + 1


def _partings(rows: Sequence[Mapping[str, Any]]) -> str:
    tokens, parted, ties = partings(rows)
    return f"{parted} of {len(rows)} replies part in {tokens:,} tokens, {ties} at a near-tie"


def _coupled(record: Record, rule: str) -> Check:
    """Exact in real arithmetic. In float32 a text may part at a near-tie, rarely; in bfloat16 rows round by how many
    are computed together, so that honest texts part often and nothing is decided."""
    limit = f"near-ties only (margin {NEAR_TIE:g}), 1 in {TOKENS_A_NEAR_TIE:,} tokens"
    rows = (record.get("raw") or {}).get("coupled")
    if not rows:
        return _not_measured("coupled", limit, record, rule)
    tokens, parted, ties = partings(rows)
    said, worst = _partings(rows), max((row["margin"] or 0.0 for row in rows), default=0.0)
    if record["dtype"] != "float32":
        reason = f"{said}, largest margin {worst:.3g}; {record['dtype']} rounds by the number of rows, float32 decides"
        return Check("coupled", float(parted), limit, NOT_APPLICABLE, reason)
    allowed = math.ceil(tokens / TOKENS_A_NEAR_TIE)
    if parted > ties:
        return Check("coupled", float(parted), limit, FAIL, f"{said}; largest margin {worst:.3g}")
    return Check("coupled", float(parted), limit, FAIL if parted > allowed else PASS, said)


def _martingale(record: Record, rule: str) -> list[Check]:
    """Tests of both arms are one family: a stock arm that fails has shown the judge to be wrong."""
    arms = (record.get("raw") or {}).get("martingale")
    limit = f"p at least {FAMILY_ALPHA:g} over all one-arm tests"
    if not arms:
        return [_not_measured(name, limit, record, rule) for name in KINDS]
    tests = {f"{arm}, {name}": test for arm in ARMS for name, test in martingale_tests(arms[arm]).items()}
    missing = [arm for arm in ARMS if not any(name.startswith(arm) for name in tests)]
    if missing:
        reason = f"{' and '.join(missing)}: no slot has {MIN_SLOT_TOKENS:,} tokens"
        verdict = NOT_APPLICABLE if rule == "reference" else UNDECIDED
        return [Check(name, None, limit, verdict, reason) for name in KINDS]
    limit = f"p at least {FAMILY_ALPHA / len(tests):.1e}, one of {len(tests)} tests"
    found = []
    for name, kind in KINDS.items():
        own = {test: result for test, result in tests.items() if f", {kind}, " in test}
        worst = min(own, key=lambda test: own[test].p_value)
        caught = [test for test, result in own.items() if is_caught(result.p_value, len(tests))]
        reason = ", ".join(caught) or f"smallest: {worst}; {_sensitivity(kind, arms['candidate'], len(tests))}"
        found.append(Check(name, own[worst].p_value, limit, FAIL if caught else PASS, reason))
    return found


def _sensitivity(kind: str, table: Mapping[str, Any], num_tests: int) -> str:
    """What a kind of test would have caught, in the slot that tells least of those that are tested."""
    rows = [row for row, size in enumerate(table["num_tokens"]) if size >= MIN_SLOT_TOKENS]
    sizes = [table["num_tokens"][row] for row in rows]
    if kind == "PIT":
        share = max(smallest_share(size, len(table["pit_counts"][0]), num_tests) for size in sizes)
        return f"{share:.2%} of a slot's tokens out of place are caught with {POWER:.0%}"
    field, unit = ("var_log_prob", "nats") if kind == "log-probability" else ("var_first", "first choices")
    pairs = zip(rows, sizes, strict=True)
    shift = max(smallest_shift(table[field][row], size, num_tests) for row, size in pairs)
    return f"{shift:.3g} {unit} a token are caught with {POWER:.0%} in every slot"


def _controls(record: Record) -> Check:
    rows = (record.get("raw") or {}).get("controls")
    if not rows:
        return Check("controls", None, "all caught", NOT_APPLICABLE, "not run (--self-test)")
    wrong = [row for row in rows if row["strength"] > 0]
    limit = f"all {len(wrong)} caught"
    caught = float(sum(row["caught"] for row in wrong))
    missed = [f"{row['name']} was not caught" for row in wrong if not row["caught"]]
    missed += [f"{row['name']} is honest and was caught" for row in rows if row["strength"] == 0 and row["caught"]]
    if missed:
        return Check("controls", caught, limit, FAIL, ", ".join(missed))
    if len(wrong) == len(rows):
        return Check("controls", caught, limit, UNDECIDED, "no honest arm went through the same tests")
    return Check("controls", caught, limit, PASS)


def _not_measured(name: str, limit: str, record: Record, rule: str) -> Check:
    """A gate beyond the reference: a record of ours should have it, and only `strict` asks."""
    asked = rule == "strict" and record.get("raw") is not None and not _not_natural(record)
    return Check(name, None, limit, UNDECIDED if asked else NOT_APPLICABLE, _not_natural(record) or "not measured")
