"""How many replies the gates need: from a pilot's spread to a plan that is announced before anything is drawn.

A gate's standard error falls with the root of the replies to each prompt, so the pilot's, and the one at which an
equivalence interval passes with 90 % when there is no gap, give the size. The pilot only measures spread: its replies
are not among those that are judged, else its luck would decide twice. Looks are spaced evenly.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infer.judge import gates
from infer.judge.gates import ARMS, Estimate

Look = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Gate:
    """What one gate needs."""

    name: str
    # the pilot's standard error, and the one that is needed
    pilot_se: float
    needed_se: float
    # replies to each prompt, by each arm, under each of its workloads
    repetitions: int
    # chance to pass without a gap at the size planned
    power: float


@dataclass(frozen=True)
class Plan:
    """What will be drawn. `dataclasses.asdict` of it is `raw.replies.plan`."""

    num_looks: int
    num_prompts: int
    # replies that each look adds, to each prompt, by each arm
    repetitions: dict[str, int]
    # what each gate needs; empty if the size was not planned
    gates: tuple[Gate, ...]
    # of both arms and all looks
    num_replies: int
    # expected, of both arms and all looks; None if no pilot tells
    num_tokens: int | None
    # expected, at the rate measured by the pilot
    seconds: float | None
    # the size that all gates need fits the budget
    within_budget: bool


def planned_replies(plan: Mapping[str, Any], workload: str, look: int) -> int:
    """Replies of one arm that look number `look` (from 0) of `raw.replies.plan` reads."""
    return int(plan["num_prompts"] * plan["repetitions"][workload] * (look + 1))


def fixed(num_prompts: int, repetitions: Mapping[str, int]) -> Plan:
    """One look at a sample whose size was given, as the rule `reference` has it."""
    replies = len(ARMS) * num_prompts * sum(repetitions.values())
    return Plan(1, num_prompts, dict(repetitions), (), replies, None, None, True)


def make_plan(
    pilot: Look,
    limits: Mapping[str, Any],
    *,
    num_looks: int = 3,
    tokens_per_second: float | None = None,
    budget_tokens: float = math.inf,
    budget_seconds: float = math.inf,
) -> Plan:
    """The smallest sample at which every gate passes with `gates.POWER` if there is no gap.

    The pilot's variance is itself uncertain, so one standard error of it is added. What exceeds the budget is scaled
    down to it, all workloads alike, and in fewer looks if need be; the gates' `power` then says what is left.

    Args:
        pilot: replies of both arms to the same prompts, as a look of `raw.replies`.
        limits: the record's.
        tokens_per_second: of drawing, both arms together, as the pilot measured it.

    Raises:
        ValueError: a budget of seconds without a rate, or more looks than `gates.MAX_LOOKS`.
    """
    if not 1 <= num_looks <= gates.MAX_LOOKS:
        raise ValueError(f"{num_looks=} must be from 1 to {gates.MAX_LOOKS}")
    if tokens_per_second is None and budget_seconds < math.inf:
        raise ValueError(f"{budget_seconds=} needs tokens_per_second")
    budget = min(budget_tokens, budget_seconds * (tokens_per_second or math.inf))
    num_prompts = len(next(iter(pilot.values()))["stock"]["prompt"])
    # tokens of one reply to each prompt by both arms
    tokens = {
        workload: sum(sum(arms[arm]["num_tokens"]) / sum(arms[arm]["num_replies"]) for arm in ARMS) * num_prompts
        for workload, arms in pilot.items()
    }

    def cost(repetitions: Mapping[str, int], looks: int) -> float:
        return looks * sum(count * tokens[workload] for workload, count in repetitions.items())

    wanted = _per_look(pilot, limits, num_looks)
    affordable = budget / cost(wanted, num_looks)
    for looks in range(num_looks, 0, -1):
        share = min(1.0, affordable) * num_looks / looks
        chosen = {workload: max(1, int(count * share)) for workload, count in wanted.items()}
        if affordable >= 1 or cost(chosen, looks) <= budget:
            break
    total = cost(chosen, looks)
    return Plan(
        looks,
        num_prompts,
        chosen,
        tuple(_gate(comparison, pilot, limits, chosen, looks) for comparison in _comparisons(pilot)),
        len(ARMS) * num_prompts * looks * sum(chosen.values()),
        round(total),
        None if tokens_per_second is None else total / tokens_per_second,
        affordable >= 1,
    )


@dataclass(frozen=True)
class _Comparison:
    name: str
    workloads: tuple[str, ...]
    limit: str
    compare: Callable[[Look], Estimate]


def _comparisons(pilot: Look) -> Sequence[_Comparison]:
    every = tuple(pilot)
    pooled = [
        _Comparison("likelihood", every, "likelihood_bound", gates.compare_likelihood),
        _Comparison("argmax", every, "argmax_bound", gates.compare_argmax),
    ]
    lengths = [
        _Comparison(
            f"lengths.{workload}",
            (workload,),
            "length_margin",
            lambda look, workload=workload: gates.compare_lengths(look, workload),
        )
        for workload in every
    ]
    return pooled + lengths


def _per_look(pilot: Look, limits: Mapping[str, Any], num_looks: int) -> dict[str, int]:
    """Replies to each prompt that each look adds."""
    wanted = dict.fromkeys(pilot, 1)
    for comparison in _comparisons(pilot):
        estimate = comparison.compare(pilot)
        needed = needed_repetitions(estimate, limits[comparison.limit], _repetitions(pilot, comparison), num_looks)
        for workload in comparison.workloads:
            wanted[workload] = max(wanted[workload], -(-needed // num_looks))
    return wanted


def needed_repetitions(estimate: Estimate, margin: float, repetitions: float, num_looks: int) -> int:
    """Replies to each prompt at which a gate passes with `gates.POWER` if there is no gap.

    Args:
        estimate: the pilot's, from `repetitions` replies to each prompt.
    """
    # relative standard error of a variance from so many clusters
    caution = 1 + math.sqrt(2 / (estimate.num_clusters - 1))
    needed = gates.needed_se(margin, num_looks, estimate.num_clusters)
    return max(1, math.ceil(repetitions * caution * (float(estimate.se) / needed) ** 2))


def _repetitions(pilot: Look, comparison: _Comparison) -> float:
    """The pilot's replies to each prompt."""
    counts = [count for name in comparison.workloads for count in pilot[name]["stock"]["num_replies"]]
    return sum(counts) / len(counts)


def _gate(
    comparison: _Comparison, pilot: Look, limits: Mapping[str, Any], planned: Mapping[str, int], num_looks: int
) -> Gate:
    margin, estimate = limits[comparison.limit], comparison.compare(pilot)
    repetitions = _repetitions(pilot, comparison)
    reached = num_looks * sum(planned[name] for name in comparison.workloads) / len(comparison.workloads)
    se = float(estimate.se) * math.sqrt(repetitions / reached)
    return Gate(
        comparison.name,
        float(estimate.se),
        gates.needed_se(margin, num_looks, estimate.num_clusters),
        needed_repetitions(estimate, margin, repetitions, num_looks),
        gates.power_at_zero_gap(margin, se, num_looks, estimate.num_clusters),
    )


def tokens_to_catch(shift: float, variance: float, num_tests: int) -> int:
    """Tokens at which a one-arm z test of a family of `num_tests` catches a shift with `gates.POWER`.

    Args:
        shift: what the fault adds to the mean excess of a token.
        variance: of the excess, a token.
    """
    return math.ceil(variance * (gates.catching_distance(num_tests) / shift) ** 2)
