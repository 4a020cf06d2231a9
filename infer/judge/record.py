"""The record of a judgement: its schema, and every derived figure from the raw ones.

The top level has the reference's fields: `ratios`, `specscore`, `likelihood` and so on, all of them derived. Beside
them lies `raw`, what was counted and timed, from which they are computed anew whenever a record is read; one that
disagrees with its own raw figures is malformed. A record without `raw` stands on its own figures.

    raw.passes[workload]     a pass: the raw figures of each arm, `{"stock": ARM, "candidate": ARM}`
    raw.memory               peak bytes of each arm and where they come from, or null
    raw.texts                fixed texts: sums of absolute differences by text, or null
    raw.replies              `{"plan": Plan, "looks": [{workload: {arm: CLUSTERS}}]}`, sums by prompt that grow from
                             look to look, or null; the pilot is not among them
    raw.martingale           sums by slot of the window of each arm, or null
    raw.greedy, raw.coupled  where replies that should be equal part, and the stock arm's margin there, or null
    raw.controls             negative controls, `infer.judge.gates.control`; the honest arm among them, strength 0

With `synthetic_acceptance` nothing but passes, memory and fixed texts is ever there: tokens mean nothing then.
"""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from infer.cli import read_text
from infer.judge import gates
from infer.judge.gates import ARMS, INTERVAL_95, WORKLOADS
from infer.judge.plan import planned_replies

SCHEMA = 1
MIB = 2**20
# Relative, between a stored figure and the one that the raw figures give.
TOLERANCE = 1e-9
# The reference's.
LIMITS = {
    "greedy_agreement_floor": None,
    "likelihood_bound": 0.05,
    "argmax_bound": 0.01,
    "fidelity_ceiling": 0.02,
    "length_margin": 0.05,
    "memory_slack_mib": 4096,
}
# What tells of sampled tokens.
NATURAL = ("replies", "martingale", "greedy", "coupled", "controls")

Record = dict[str, Any]
# Complains, with the path, about a value that is not as it should be.
Rule = Callable[[str, Any], None]


def load(path: str | Path) -> Record:
    """A record from its file, complete and consistent.

    Raises:
        OSError: it can't be read.
        ValueError: one line, naming the field that is malformed.
    """
    text = read_text(Path(path))
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error.msg} at line {error.lineno}") from None
    return complete(record)


def complete(record: Any) -> Record:
    """The record with every derived field, computed anew; those already there are checked.

    Raises:
        ValueError: one line, naming the field that is malformed.
    """
    validate(record)
    derived = derive(record)
    for name, value in derived.items():
        if name in record:
            _agree(name, record[name], value)
    if record.get("score") is not None:
        _agree("score", record["score"], derived["specscore"])
    return {**record, **derived}


def _agree(path: str, stored: Any, computed: Any) -> None:
    if isinstance(stored, Mapping) and isinstance(computed, Mapping):
        if stored.keys() != computed.keys():
            raise ValueError(f"{path} has {sorted(stored)}, and the raw figures give {sorted(computed)}")
        for name, value in computed.items():
            _agree(f"{path}.{name}", stored[name], value)
    elif isinstance(stored, Sequence) and isinstance(computed, Sequence):
        if len(stored) != len(computed):
            raise ValueError(f"{path} has {len(stored)} entries, and the raw figures give {len(computed)}")
        for number, (one, value) in enumerate(zip(stored, computed, strict=True)):
            _agree(f"{path}[{number}]", one, value)
    elif not _same(stored, computed):
        raise ValueError(f"{path}={stored} disagrees with {computed}, which the raw figures give")


def _same(stored: Any, computed: Any) -> bool:
    if stored is None or computed is None or isinstance(computed, bool):
        return stored is computed
    return math.isclose(stored, computed, rel_tol=TOLERANCE, abs_tol=1e-12)


def derive(record: Record) -> Record:
    """Every derived field of a valid record, from the raw figures where there are any, else from its own."""
    raw, limits = record.get("raw"), record["limits"]
    if raw is None:
        ratios = {workload: _median(found["passes"]) for workload, found in record["ratios"].items()}
        memory = record["memory"]
        ok = memory and {**memory, "ok": memory["peak_mib"] <= memory["allowed_mib"]}
        return {"ratios": ratios, "specscore": _specscore(ratios), "memory": ok}
    ratios = {
        workload: _median([_ratio(one) for one in passes]) for workload, passes in raw["passes"].items() if passes
    }
    look = raw["replies"]["looks"][-1] if raw["replies"] and raw["replies"]["looks"] else None
    return {
        "ratios": ratios,
        "specscore": _specscore(ratios),
        "acceptance": {workload: acceptance_length(passes) for workload, passes in raw["passes"].items() if passes},
        "likelihood": look and _gap(gates.compare_likelihood(look)),
        "argmax": look and _gap(gates.compare_argmax(look)),
        "lengths": look and {workload: _interval(gates.compare_lengths(look, workload)) for workload in look},
        "fidelity": raw["texts"] and _mean_difference(raw["texts"]),
        "greedy_agreement": raw["greedy"] and agreement(raw["greedy"]),
        "memory": raw["memory"] and _memory(raw["memory"], limits["memory_slack_mib"]),
    }


def _median(passes: Sequence[float]) -> Record:
    return {"passes": list(passes), "ratio": statistics.median(passes)}


def _ratio(one: Mapping[str, Any]) -> float:
    rates = [one[arm]["wall_tokens"] / one[arm]["wall_seconds"] for arm in ("candidate", "stock")]
    return rates[0] / rates[1]


def _specscore(ratios: Mapping[str, Any]) -> float | None:
    """Geometric mean; None while a workload has no pass."""
    if any(workload not in ratios for workload in WORKLOADS):
        return None
    return math.prod(ratios[workload]["ratio"] for workload in WORKLOADS) ** (1 / len(WORKLOADS))


def acceptance_length(passes: Sequence[Mapping[str, Any]]) -> float:
    """The candidate's tokens a verify step, over all passes of a workload."""
    arms = [one["candidate"] for one in passes]
    return 1 + sum(sum(arm["accepted"]) for arm in arms) / sum(arm["num_verify_steps"] for arm in arms)


def _gap(found: gates.Estimate) -> Record:
    return {
        "gap": float(found.value),
        "se": float(found.se),
        "candidate": float(found.candidate),
        "stock": float(found.stock),
    }


def _interval(found: gates.Estimate) -> Record:
    ratio, half = float(found.value), INTERVAL_95 * float(found.se)
    return {"ratio": ratio, "low": ratio - half, "high": ratio + half}


def _mean_difference(texts: Sequence[Mapping[str, Any]]) -> float:
    return math.fsum(text["sum_abs_diff"] for text in texts) / sum(text["num_tokens"] for text in texts)


def agreement(rows: Sequence[Mapping[str, Any]]) -> float:
    """Share of tokens before the place where texts part."""
    alike = [
        row["num_tokens"] if row["first_difference"] is None else min(row["first_difference"], row["num_tokens"])
        for row in rows
    ]
    return sum(alike) / sum(row["num_tokens"] for row in rows)


def _memory(raw: Mapping[str, Any], slack_mib: float) -> Record:
    stock, candidate = (raw[arm]["peak_bytes"] / MIB for arm in ARMS)
    return {"ok": candidate <= stock + slack_mib, "peak_mib": candidate, "allowed_mib": stock + slack_mib}


def validate(record: Any) -> None:
    """Raises ValueError (one line, naming the field) if a record is malformed.

    Derived fields that follow from raw ones may be absent; `complete` compares those that are there.
    """
    _table({})("the record", record)
    if record.get("raw") is None:
        _table(FIGURES | {"limits": LIMITS_RULE})("", record)
        return
    _table(HEADER | {"limits": LIMITS_RULE, "raw": RAW}, optional=FIGURES)("", record)
    raw = record["raw"]
    for workload, passes in raw["passes"].items():
        for number, one in enumerate(passes):
            _check_pass(f"raw.passes.{workload}[{number}]", one)
    if record["synthetic_acceptance"]:
        for name in NATURAL:
            if raw[name] is not None:
                raise ValueError(f"raw.{name} must be null: with synthetic_acceptance, tokens follow no law")
    if raw["memory"]:
        sources = [raw["memory"][arm]["source"] for arm in ARMS]
        if len(set(sources)) > 1:
            raise ValueError(f"raw.memory compares sources {' and '.join(sources)}, which must be one")
    if raw["replies"]:
        _check_replies(raw["replies"])
    for arm, table in (raw["martingale"] or {}).items():
        _check_martingale(f"raw.martingale.{arm}", table)
    for name in ("greedy", "coupled"):
        for number, row in enumerate(raw[name] or ()):
            if (row["first_difference"] is None) != (row["margin"] is None):
                raise ValueError(f"raw.{name}[{number}].margin must be null if and only if first_difference is")
    for number, row in enumerate(raw["controls"] or ()):
        _check_control(f"raw.controls[{number}]", row)


def _check_pass(path: str, one: Mapping[str, Any]) -> None:
    for arm in ARMS:
        drafted, accepted = one[arm]["drafted"], one[arm]["accepted"]
        if len(drafted) != len(accepted) or any(a > d for a, d in zip(accepted, drafted, strict=True)):
            raise ValueError(f"{path}.{arm}.accepted={accepted} must be at most {drafted=}, place by place")
    if one["candidate"]["num_verify_steps"] < 1:
        raise ValueError(f"{path}.candidate.num_verify_steps=0 must be at least 1")
    POSITIVE(f"{path}: its ratio", _ratio(one))


def _check_replies(replies: Mapping[str, Any]) -> None:
    plan, looks = replies["plan"], replies["looks"]
    if not plan["repetitions"]:
        raise ValueError("raw.replies.plan.repetitions is empty")
    if len(looks) > plan["num_looks"]:
        raise ValueError(f"raw.replies.looks has {len(looks)} looks, and the plan announced {plan['num_looks']}")
    before: dict[tuple[str, str], Mapping[str, Any]] = {}
    for number, look in enumerate(looks):
        path = f"raw.replies.looks[{number}]"
        if look.keys() != plan["repetitions"].keys():
            raise ValueError(f"{path} has {', '.join(look)}, and the plan announced {', '.join(plan['repetitions'])}")
        for workload, arms in look.items():
            for arm in ARMS:
                _check_clusters(f"{path}.{workload}.{arm}", arms[arm], before.get((workload, arm)))
                drawn, planned = sum(arms[arm]["num_replies"]), planned_replies(plan, workload, number)
                if drawn != planned:
                    raise ValueError(
                        f"{path}.{workload}.{arm}.num_replies is {drawn}, and the plan announced {planned}"
                    )
                before[workload, arm] = arms[arm]
            if arms["stock"]["prompt"] != arms["candidate"]["prompt"]:
                raise ValueError(f"{path}.{workload}.candidate.prompt differs from stock's: the arms must be paired")


def _check_clusters(path: str, clusters: Mapping[str, Any], before: Mapping[str, Any] | None) -> None:
    size = len(clusters["prompt"])
    for name, values in clusters.items():
        if len(values) != size:
            raise ValueError(f"{path}.{name} has {len(values)} entries for {size} prompts")
    for part, whole in (("num_not_first", "num_tokens"), ("num_ended", "num_replies")):
        if any(one > of for one, of in zip(clusters[part], clusters[whole], strict=True)):
            raise ValueError(f"{path}.{part} exceeds {whole}")
    if not sum(clusters["num_tokens"]):
        raise ValueError(f"{path}.num_tokens is 0 for every prompt")
    if before is None:
        return
    if clusters["prompt"] != before["prompt"]:
        raise ValueError(f"{path}.prompt differs from the look before")
    for name in CLUSTER_COUNTS:
        if any(now < then for now, then in zip(clusters[name], before[name], strict=True)):
            raise ValueError(f"{path}.{name} is less than at the look before")


def _check_martingale(path: str, table: Mapping[str, Any]) -> None:
    size = len(table["slot"])
    for name in MARTINGALE_FIELDS:
        if len(table[name]) != size:
            raise ValueError(f"{path}.{name} has {len(table[name])} entries for {size} slots")
    for number, (counts, tokens) in enumerate(zip(table["pit_counts"], table["num_tokens"], strict=True)):
        if sum(counts) != tokens:
            raise ValueError(f"{path}.pit_counts[{number}] has {sum(counts)} tokens, and num_tokens is {tokens}")


def _check_control(path: str, row: Mapping[str, Any]) -> None:
    tests = row["tests"]
    for name, test in tests.items():
        if test["caught"] != gates.is_caught(test["p_value"], len(tests)):
            raise ValueError(f"{path}.tests.{name}.caught={test['caught']} disagrees with p_value={test['p_value']}")
    if row["caught"] != any(test["caught"] for test in tests.values()):
        raise ValueError(f"{path}.caught={row['caught']} disagrees with its tests")


def _number(words: str, fits: Callable[[float], bool], whole: bool = False) -> Rule:
    def rule(path: str, value: Any) -> None:
        kinds = (int,) if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value) or not fits(value):
            raise ValueError(f"{path}={_shown(value)} must be {words}")

    return rule


def _kind(words: str, kind: type) -> Rule:
    def rule(path: str, value: Any) -> None:
        if not isinstance(value, kind):
            raise ValueError(f"{path}={_shown(value)} must be {words}")

    return rule


def _shown(value: Any) -> str:
    text = json.dumps(value) if not isinstance(value, float) else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _one_of(*choices: Any) -> Rule:
    def rule(path: str, value: Any) -> None:
        if value not in choices or isinstance(value, bool):
            raise ValueError(f"{path}={_shown(value)} must be {' or '.join(map(str, choices))}")

    return rule


def _maybe(inner: Rule) -> Rule:
    def rule(path: str, value: Any) -> None:
        if value is not None:
            inner(path, value)

    return rule


def _list(inner: Rule, least: int = 0) -> Rule:
    def rule(path: str, value: Any) -> None:
        if not isinstance(value, list | tuple) or len(value) < least:
            raise ValueError(f"{path}={_shown(value)} must be a list of at least {least}")
        for number, item in enumerate(value):
            inner(f"{path}[{number}]", item)

    return rule


def _table(fields: Mapping[str, Rule], optional: Mapping[str, Rule] | None = None) -> Rule:
    """Unknown fields are nobody's business."""

    def rule(path: str, value: Any) -> None:
        if not isinstance(value, Mapping):
            raise ValueError(f"{path}={_shown(value)} must be an object")
        missing = next((name for name in fields if name not in value), None)
        if missing is not None:
            raise ValueError(f"{_join(path, missing)} is missing")
        for name, inner in {**(optional or {}), **fields}.items():
            if name in value:
                inner(_join(path, name), value[name])

    return rule


def _each(inner: Rule, names: Sequence[str] | None = None) -> Rule:
    def rule(path: str, value: Any) -> None:
        if not isinstance(value, Mapping):
            raise ValueError(f"{path}={_shown(value)} must be an object")
        for name, item in value.items():
            if names is not None and name not in names:
                raise ValueError(f"{path}.{name} must be one of {', '.join(names)}")
            inner(_join(path, name), item)

    return rule


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


FINITE = _number("finite", lambda x: True)
POSITIVE = _number("positive and finite", lambda x: x > 0)
NOT_NEGATIVE = _number("finite and not negative", lambda x: x >= 0)
SHARE = _number("from 0 to 1", lambda x: 0 <= x <= 1)
COUNT = _number("a whole number, not negative", lambda x: x >= 0, whole=True)
POSITIVE_COUNT = _number("a whole number, positive", lambda x: x > 0, whole=True)
NOT_POSITIVE = _number("finite and not positive", lambda x: x <= 0)
LOOKS = _number(f"from 1 to {gates.MAX_LOOKS}", lambda x: 1 <= x <= gates.MAX_LOOKS, whole=True)
TEXT, TRUTH, OBJECT = _kind("a string", str), _kind("true or false", bool), _kind("an object", dict)

GAP = _table({"gap": FINITE, "se": NOT_NEGATIVE, "candidate": FINITE, "stock": FINITE})
INTERVAL = _table({"ratio": POSITIVE, "low": FINITE, "high": FINITE})
FIGURES = {
    "ratios": _each(_table({"passes": _list(POSITIVE, 1), "ratio": POSITIVE}), WORKLOADS),
    "specscore": _maybe(POSITIVE),
    "greedy_agreement": _maybe(SHARE),
    "likelihood": _maybe(GAP),
    "argmax": _maybe(GAP),
    "fidelity": _maybe(NOT_NEGATIVE),
    "lengths": _maybe(_each(INTERVAL, WORKLOADS)),
    "memory": _maybe(_table({"ok": TRUTH, "peak_mib": POSITIVE, "allowed_mib": POSITIVE})),
    "acceptance": _maybe(_each(POSITIVE, WORKLOADS)),
}
LIMITS_RULE = _table(
    {name: POSITIVE for name in ("likelihood_bound", "argmax_bound", "fidelity_ceiling", "length_margin")}
    | {"greedy_agreement_floor": _maybe(SHARE), "memory_slack_mib": NOT_NEGATIVE}
)
HEADER = {
    "schema": _one_of(SCHEMA),
    "clock": _one_of("wall"),
    "model": TEXT,
    "dtype": TEXT,
    "config": OBJECT,
    "about": OBJECT,
    "synthetic_acceptance": _maybe(_list(POSITIVE, len(WORKLOADS))),
}
ARM = _table(
    {
        "wall_seconds": POSITIVE,
        "wall_tokens": POSITIVE_COUNT,
        "decode_seconds": NOT_NEGATIVE,
        "decode_tokens": COUNT,
        "num_verify_steps": COUNT,
        "drafted": _list(COUNT),
        "accepted": _list(COUNT),
        "by_context": _list(_table({"context": POSITIVE_COUNT, "tokens": COUNT, "steps": COUNT})),
        "fill": _list(_list(NOT_NEGATIVE, 2)),
        "num_preemptions": COUNT,
        "step_seconds": _maybe(POSITIVE),
    },
    optional={"compile_seconds": _maybe(NOT_NEGATIVE), "floor_seconds": _maybe(POSITIVE)},
)
CLUSTER_COUNTS = ("num_replies", "num_tokens", "num_not_first", "sum_length", "num_ended")
CLUSTERS = _table(
    {"prompt": _list(TEXT, 2), "sum_log_prob": _list(NOT_POSITIVE)} | {name: _list(COUNT) for name in CLUSTER_COUNTS}
)
MARTINGALE_FIELDS = {
    "slot": _list(COUNT),
    "num_tokens": _list(COUNT),
    "sum_log_prob_excess": _list(FINITE),
    "var_log_prob": _list(NOT_NEGATIVE),
    "sum_first_excess": _list(FINITE),
    "var_first": _list(NOT_NEGATIVE),
    "pit_counts": _list(_list(COUNT, 2)),
}
PARTINGS = _list(
    _table(
        {
            "prompt": TEXT,
            "num_tokens": POSITIVE_COUNT,
            "first_difference": _maybe(COUNT),
            "margin": _maybe(NOT_NEGATIVE),
        }
    ),
    1,
)
CONTROL = _table(
    {
        "name": TEXT,
        "strength": NOT_NEGATIVE,
        "num_tokens": COUNT,
        "tests": _each(_table({"statistic": FINITE, "p_value": SHARE, "caught": TRUTH})),
        "caught": TRUTH,
    }
)
FIXED_TEXT = _table(
    {
        "id": TEXT,
        "num_tokens": POSITIVE_COUNT,
        "sum_abs_diff": NOT_NEGATIVE,
        "max_abs_diff": NOT_NEGATIVE,
        "sum_log_prob_stock": FINITE,
        "sum_log_prob_candidate": FINITE,
        "committed": _list(COUNT, 1),
    }
)
PEAK = _table({"peak_bytes": POSITIVE_COUNT, "source": _one_of("peak_bytes_in_use", "compiled")})
PLAN = _table(
    {"num_looks": LOOKS, "num_prompts": POSITIVE_COUNT, "repetitions": _each(POSITIVE_COUNT, WORKLOADS)},
)


def _arms(inner: Rule) -> Rule:
    return _table(dict.fromkeys(ARMS, inner))


RAW = _table(
    {
        "passes": _each(_list(_arms(ARM)), WORKLOADS),
        "memory": _maybe(_arms(PEAK)),
        "texts": _maybe(_list(FIXED_TEXT, 1)),
        "replies": _maybe(_table({"plan": PLAN, "looks": _list(_each(_arms(CLUSTERS), WORKLOADS))})),
        "martingale": _maybe(_arms(_table(MARTINGALE_FIELDS))),
        "greedy": _maybe(PARTINGS),
        "coupled": _maybe(PARTINGS),
        "controls": _maybe(_list(CONTROL, 1)),
    }
)
