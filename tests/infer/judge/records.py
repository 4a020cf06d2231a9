"""Records as a run would write them, made up from seeded noise: every gate passes unless something is put into them."""

from functools import cache
from typing import Any

import numpy as np

from infer.judge import gates, record
from infer.judge.gates import ARMS, WORKLOADS, Significance

NUM_DRAFT_TOKENS = 3
SPEEDS = {"solo": (2.4, 2.2, 2.3), "team": (1.9, 2.0, 2.1), "busy": (1.2, 1.3, 1.25)}
LENGTHS = {"solo": 3.3, "team": 3.1, "busy": 3.0}


@cache
def build(
    *,
    seed: int = 0,
    likelihood_gap: float = 0.0,
    argmax_gap: float = 0.0,
    length_ratio: float = 1.0,
    num_prompts: int = 40,
    repetitions: int = 10,
    num_looks: int = 3,
    synthetic: bool = False,
    model: str = "demo",
    dtype: str = "float32",
) -> dict[str, Any]:
    """A complete record; the gaps are the candidate's, of mean log-probability, of tokens that are not the first
    choice, and of lengths. With `synthetic` it has what such a run measures, and no more.

    Calls share the record, so copy it before changing it.
    """
    rng = np.random.default_rng(seed)
    looks = replies(rng, (likelihood_gap, argmax_gap, length_ratio), num_prompts, repetitions, num_looks)
    plan = {"num_looks": num_looks, "num_prompts": num_prompts, "repetitions": dict.fromkeys(WORKLOADS, repetitions)}
    natural = {
        "replies": {"plan": plan, "looks": looks},
        "martingale": {arm: martingale(rng) for arm in ARMS},
        "greedy": partings(12, {3: (40, 2e-6), 7: (90, 0.3)}),
        "coupled": partings(12, {5: (17, 4e-7)}),
        "controls": controls(),
    }
    raw = {
        "passes": {name: [a_pass(name, speed) for speed in SPEEDS[name]] for name in WORKLOADS},
        "memory": {
            arm: {"peak_bytes": (1000 + 50 * number) * 2**20, "source": "peak_bytes_in_use"}
            for number, arm in enumerate(ARMS)
        },
        "texts": texts(),
        **(dict.fromkeys(natural) if synthetic else natural),
    }
    about = {"commit": "0" * 40, "device": "cpu", "jax": "0.11.2", "created": "2026-01-01T00:00:00+00:00"}
    return record.complete(
        {
            "schema": record.SCHEMA,
            "clock": "wall",
            "model": model,
            "dtype": dtype,
            "config": {},
            "about": about,
            "synthetic_acceptance": list(LENGTHS.values()) if synthetic else None,
            "limits": dict(record.LIMITS),
            "raw": raw,
        }
    )


def raw_of(full: dict[str, Any]) -> dict[str, Any]:
    """The record without what is derived, for changing it and completing it again."""
    kept = ("schema", "clock", "model", "dtype", "config", "about", "synthetic_acceptance", "limits", "raw")
    return {name: full[name] for name in kept}


def a_pass(workload: str, speed: float) -> dict[str, Any]:
    """One pass in which the candidate is `speed` times as fast."""
    return {"stock": an_arm(workload, 1.0, 0), "candidate": an_arm(workload, speed, NUM_DRAFT_TOKENS)}


def an_arm(workload: str, speed: float, num_draft_tokens: int) -> dict[str, Any]:
    """An arm's figures of 4,096 tokens."""
    length = LENGTHS[workload] if num_draft_tokens else 1.0
    steps = round(4096 / length)
    drafts = 4096 - steps
    accepted = [round(drafts * share) for share in (0.39, 0.33)] if num_draft_tokens else []
    return {
        "wall_seconds": 20.0 / speed,
        "wall_tokens": 4096,
        "decode_seconds": 15.0 / speed,
        "decode_tokens": 3500,
        "num_verify_steps": steps,
        "drafted": [steps] * num_draft_tokens,
        "accepted": [*accepted, drafts - sum(accepted)] if num_draft_tokens else [],
        "by_context": [
            {"context": 64, "tokens": 1500, "steps": round(1500 / length)},
            {"context": 128, "tokens": 2596, "steps": steps - round(1500 / length)},
        ],
        "fill": [[0.0, 0.0], [5.0 / speed, 0.93], [15.0 / speed, 0.97], [20.0 / speed, 0.1]],
        "compile_seconds": 3.0,
        "num_preemptions": 0,
        "step_seconds": 0.02,
        "floor_seconds": 0.016,
    }


def texts() -> list[dict[str, Any]]:
    """Fixed texts, 2e-6 apart on the mean."""
    return [
        {
            "id": f"text-{number}",
            "num_tokens": 500,
            "sum_abs_diff": 1e-3,
            "max_abs_diff": 2e-5,
            "sum_log_prob_stock": -900.0,
            "sum_log_prob_candidate": -900.0005,
            "committed": [50] * (NUM_DRAFT_TOKENS + 1),
        }
        for number in range(4)
    ]


def replies(
    rng: np.random.Generator, gaps: tuple[float, float, float], num_prompts: int, repetitions: int, num_looks: int
) -> list[dict[str, Any]]:
    """Looks at a growing sample: 100 tokens a reply, -0.5 nats a token, 13 % not the first choice."""
    likelihood, argmax, ratio = gaps
    found: list[dict[str, Any]] = []
    for look in range(num_looks):
        found.append({})
        for workload in WORKLOADS:
            found[-1][workload] = {}
            for arm in ARMS:
                own = arm == "candidate"
                mean = 100 * (ratio if own else 1.0) * repetitions
                tokens = np.rint(rng.normal(mean, 0.1 * mean / repetitions**0.5, num_prompts)).astype(int)
                log_prob = (-0.5 + own * likelihood) * tokens + rng.normal(size=num_prompts) * np.sqrt(tokens)
                sums = {
                    "num_replies": np.full(num_prompts, repetitions),
                    "num_tokens": tokens,
                    "sum_log_prob": log_prob,
                    "num_not_first": rng.binomial(tokens, 0.13 + own * argmax),
                    "sum_length": tokens,
                    "num_ended": np.full(num_prompts, repetitions - (repetitions > 1)),
                }
                before = found[look - 1][workload][arm] if look else dict.fromkeys(sums, 0)
                grown = {name: (np.asarray(before[name]) + values).tolist() for name, values in sums.items()}
                found[-1][workload][arm] = {"prompt": [f"prompt-{i}" for i in range(num_prompts)], **grown}
    return found


def martingale(rng: np.random.Generator, num_tokens: int = 20_000) -> dict[str, Any]:
    """Sums of an arm that follows its law."""
    slots = NUM_DRAFT_TOKENS + 1
    variance, first_variance = np.full(slots, 0.8 * num_tokens), np.full(slots, 0.1 * num_tokens)
    return {
        "slot": list(range(slots)),
        "num_tokens": [num_tokens] * slots,
        "sum_log_prob_excess": (rng.normal(size=slots) * np.sqrt(variance)).tolist(),
        "var_log_prob": variance.tolist(),
        "sum_first_excess": (rng.normal(size=slots) * np.sqrt(first_variance)).tolist(),
        "var_first": first_variance.tolist(),
        "pit_counts": rng.multinomial(num_tokens, np.full(20, 0.05), size=slots).tolist(),
    }


def partings(number: int, places: dict[int, tuple[int, float]]) -> list[dict[str, Any]]:
    """Replies of 120 tokens; some part at a place, with a margin."""
    rows = []
    for i in range(number):
        place, margin = places.get(i, (None, None))
        rows.append({"prompt": f"prompt-{i}", "num_tokens": 120, "first_difference": place, "margin": margin})
    return rows


def controls() -> list[dict[str, Any]]:
    """The honest arm and two that are wrong, each caught by another test."""
    calm = {
        "log-probability, slot 1": Significance(0.4, 0.69),
        "PIT, slot 1": Significance(18.0, 0.52),
    }
    return [
        gates.control("honest", 0.0, 40_000, calm),
        gates.control("lossy acceptance", 0.1, 40_000, calm | {"log-probability, slot 1": Significance(-9.0, 2e-19)}),
        gates.control("stale state", 0.01, 40_000, calm | {"PIT, slot 1": Significance(120.0, 1e-16)}),
    ]
