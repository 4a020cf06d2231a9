"""`python -m infer.judge score`: its verdicts, its exit status, and which field of a malformed record it names."""

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infer.judge import gates, record
from infer.judge.__main__ import main
from infer.judge.gates import WORKLOADS
from tests.infer.judge import records
from tests.infer.judge.records import build, raw_of

REFERENCE = Path(__file__).with_name("reference_record.json")
STATISTICAL = ["likelihood", "argmax", *(f"lengths.{name}" for name in WORKLOADS)]
NATURAL = [*STATISTICAL, "martingale.likelihood", "martingale.argmax", "martingale.pit"]

Record = dict[str, Any]
Change = Callable[[Record], Any]


def verdicts(full: Record, rule: str = "strict") -> dict[str, str]:
    return {check.name: check.verdict for check in gates.check(full, rule)}


def changed(change: Change, **options: Any) -> Record:
    """A record whose raw figures were changed before it was completed."""
    found = copy.deepcopy(raw_of(build(**options)))
    change(found)
    return record.complete(found)


def run(tmp_path: Path, content: Any, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    path = tmp_path / "record.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    status = main(["score", str(path), *options])
    said = capsys.readouterr()
    return status, said.out, said.err


def test_the_reference_record_passes_its_own_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", str(REFERENCE), "--rule", "reference"]) == 0
    said = capsys.readouterr()
    line = json.loads(said.out.splitlines()[-1])
    assert line["specscore"] == 1.3182919839229221
    assert line["passed"] is True and line["reason"] is None
    assert {name for name, check in line["checks"].items() if check["verdict"] == "pass"} == {
        *("workloads", "memory", "fidelity"),
        *STATISTICAL,
    }
    for words in ("3.296", "1.880", "1.626", "166,490.0", "0.01307", "0.56024", "0.011784"):
        assert words in said.err


def test_the_reference_record_is_too_small_for_the_strict_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", str(REFERENCE)]) == 1
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["specscore"] == 1.3182919839229221
    assert line["passed"] is False
    undecided = [name for name, check in line["checks"].items() if check["verdict"] == "undecided"]
    assert undecided == STATISTICAL
    for name in undecided:
        assert f"{name} undecided: the sample is too small" in line["reason"]
    assert all(check["verdict"] != "fail" for check in line["checks"].values())


@pytest.mark.parametrize("rule", gates.RULES)
def test_a_good_record_passes(rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(tmp_path, build(), capsys, "--rule", rule)
    line = json.loads(out.splitlines()[-1])
    assert status == 0 and line["passed"] is True
    found = {name: check["verdict"] for name, check in line["checks"].items()}
    assert found.pop("greedy_agreement") == "n-a"
    assert set(found.values()) == {"pass"}
    assert all(check["power"] > 0.9 for name, check in line["checks"].items() if name in STATISTICAL)
    assert "passed" in err


def reach(full: Record, *path: Any) -> Any:
    for part in path:
        full = full[part]
    return full


def put(value: Any, *path: Any) -> Change:
    def change(full: Record) -> None:
        reach(full, *path[:-1])[path[-1]] = value

    return change


def crowd(row: int, factor: float) -> Change:
    """Candidate's tokens of one slot lie where they should not."""

    def change(full: Record) -> None:
        counts = full["raw"]["martingale"]["candidate"]["pit_counts"][row]
        moved = int(counts[0] * factor) - counts[0]
        counts[0] += moved
        counts[1] -= moved

    return change


def longer(workload: str, factor: float) -> Change:
    def change(full: Record) -> None:
        for look in full["raw"]["replies"]["looks"]:
            own = look[workload]["candidate"]
            own["sum_length"] = [round(factor * length) for length in own["sum_length"]]

    return change


def shift(arm: str, field: str, z: float) -> Change:
    variance = {"sum_log_prob_excess": "var_log_prob", "sum_first_excess": "var_first"}[field]

    def change(full: Record) -> None:
        table = full["raw"]["martingale"][arm]
        table[field][2] = z * math.sqrt(table[variance][2])

    return change


MISSED = gates.control("coins shared by windows", 1.0, 40_000, {"PIT, slot 1": gates.Significance(18.0, 0.5)})
ACCUSED = gates.control("honest", 0.0, 40_000, {"PIT, slot 1": gates.Significance(90.0, 1e-10)})

FAILURES: list[tuple[str, Record, Change, str]] = [
    ("memory", {}, put(6000 * 2**20, "raw", "memory", "candidate", "peak_bytes"), "peak_bytes_in_use"),
    ("fidelity", {}, put(60.0, "raw", "texts", 1, "sum_abs_diff"), "mean absolute difference"),
    ("likelihood", {"likelihood_gap": -0.08}, lambda full: None, "lies outside"),
    ("argmax", {"argmax_gap": 0.02}, lambda full: None, "lies outside"),
    *((f"lengths.{name}", {}, longer(name, 1.12), "lies outside") for name in WORKLOADS),
    ("greedy_agreement", {}, put(0.95, "limits", "greedy_agreement_floor"), "2 of 12 replies part"),
    ("coupled", {}, put(2e-5, "raw", "coupled", 5, "margin"), "largest margin 2e-05"),
    ("martingale.likelihood", {}, shift("candidate", "sum_log_prob_excess", 5.5), "candidate, log-probability, slot 2"),
    ("martingale.argmax", {}, shift("candidate", "sum_first_excess", -5.5), "candidate, first choice, slot 2"),
    ("martingale.likelihood", {}, shift("stock", "sum_log_prob_excess", 5.5), "stock, log-probability, slot 2"),
    ("martingale.pit", {}, crowd(1, 1.5), "candidate, PIT, slot 1"),
    ("controls", {}, lambda full: full["raw"]["controls"].append(MISSED), "coins shared by windows was not caught"),
    ("controls", {}, put(ACCUSED, "raw", "controls", 0), "honest is honest and was caught"),
]


@pytest.mark.parametrize("rule", gates.RULES)
@pytest.mark.parametrize("name, options, change, words", FAILURES, ids=[f"{f[0]}-{i}" for i, f in enumerate(FAILURES)])
def test_each_gate_fails_alone_and_is_named(
    name: str,
    options: Record,
    change: Change,
    words: str,
    rule: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    full = changed(change, **options)
    others = {other: verdict for other, verdict in verdicts(full, rule).items() if other != name}
    assert others.keys() >= {"memory", "controls"} - {name}
    assert set(others.values()) <= {"pass", "n-a"}
    status, out, _ = run(tmp_path, full, capsys, "--rule", rule)
    line = json.loads(out.splitlines()[-1])
    assert status == 1 and line["passed"] is False
    assert line["checks"][name]["verdict"] == "fail"
    assert line["reason"].startswith(f"{name} fail: ") and words in line["reason"]
    assert line["specscore"] == full["specscore"]


def drop(name: str) -> Change:
    return put(None, "raw", name)


def without_workload(full: Record) -> None:
    full["raw"]["passes"]["busy"] = []


def no_three(full: Record) -> None:
    for text in full["raw"]["texts"]:
        text["committed"][3] = 0


def short_slots(full: Record) -> None:
    for table in full["raw"]["martingale"].values():
        table["num_tokens"] = [gates.MIN_SLOT_TOKENS - 1] * 4
        table["pit_counts"] = [[49] + [50] * 19] * 4


GAPS: list[tuple[list[str], Change, str, str]] = [
    (["workloads"], without_workload, "no passes of busy", "undecided"),
    (["memory"], drop("memory"), "not measured", "undecided"),
    (["fidelity"], drop("texts"), "no fixed texts", "undecided"),
    (["fidelity"], no_three, "ever kept 3 drafts", "undecided"),
    (STATISTICAL, drop("replies"), "no replies were drawn", "undecided"),
    (["coupled"], drop("coupled"), "not measured", "n-a"),
    (["martingale.pit", "martingale.argmax"], drop("martingale"), "not measured", "n-a"),
    (["martingale.pit", "martingale.argmax"], short_slots, "no slot has 1,000 tokens", "n-a"),
]


@pytest.mark.parametrize("names, change, words, under_reference", GAPS)
def test_what_was_not_measured_is_undecided(names: list[str], change: Change, words: str, under_reference: str) -> None:
    """Under `reference` the gates beyond the reference may be missing."""
    full = changed(change)
    for rule, expected in (("strict", "undecided"), ("reference", under_reference)):
        found = {check.name: check for check in gates.check(full, rule)}
        assert all(found[name].verdict == expected and words in found[name].reason for name in names)
    assert not gates.judge(full).passed


def test_controls_are_asked_for_separately_and_need_an_honest_arm() -> None:
    assert verdicts(changed(drop("controls")))["controls"] == "n-a"
    assert gates.judge(changed(drop("controls"))).passed
    assert verdicts(changed(lambda full: full["raw"]["controls"].pop(0)))["controls"] == "undecided"


@pytest.mark.parametrize("rule", gates.RULES)
def test_synthetic_acceptance_and_random_weights_have_no_law(rule: str) -> None:
    for options, why in (({"synthetic": True}, "synthetic"), ({"model": "random:qwen3.5-27b"}, "random weights")):
        found = {check.name: check for check in gates.check(build(**options), rule)}
        assert all(found[name].verdict == "n-a" and why in found[name].reason for name in STATISTICAL)
        assert {found[name].verdict for name in ("workloads", "memory", "fidelity")} == {"pass"}
    full = build(synthetic=True)
    assert all(verdicts(full, rule)[name] == "n-a" for name in [*NATURAL, "coupled", "controls"])
    # what is left can fail all the same
    broken = changed(put(60.0, "raw", "texts", 1, "sum_abs_diff"), synthetic=True)
    assert verdicts(broken, rule)["fidelity"] == "fail"


@pytest.mark.parametrize("rule", gates.RULES)
def test_fixed_lengths_are_not_applicable(rule: str) -> None:
    def cut(*workloads: str) -> Change:
        def change(full: Record) -> None:
            for look in full["raw"]["replies"]["looks"]:
                for workload in workloads:
                    for arm in look[workload].values():
                        arm["num_ended"] = [0] * len(arm["num_ended"])

        return change

    some, every = verdicts(changed(cut("team")), rule), verdicts(changed(cut(*WORKLOADS)), rule)
    assert some["lengths.team"] == "n-a" and some["lengths.solo"] == some["likelihood"] == "pass"
    assert {every[name] for name in STATISTICAL} == {"n-a"}


def test_equality_is_decided_in_float32_only() -> None:
    def coupled(number: int, margin: float, **options: Any) -> str:
        rows = records.partings(200, {i: (100, margin) for i in range(number)})
        return verdicts(changed(put(rows, "raw", "coupled"), **options))["coupled"]

    # 24,000 tokens, fewer where a text has parted: three near-ties at most
    assert coupled(0, 1e-6) == coupled(3, 1e-6) == coupled(1, 1e-5) == "pass"
    assert coupled(4, 1e-6) == coupled(1, 1.1e-5) == "fail"
    assert coupled(60, 0.1, dtype="bfloat16") == "n-a"


def test_a_budget_that_ends_first_is_undecided_until_a_look_decides() -> None:
    def first_look(full: Record) -> None:
        del full["raw"]["replies"]["looks"][1:]

    for options, verdict in (({"num_prompts": 15, "repetitions": 1}, "undecided"), ({}, "pass")):
        found = {check.name: check for check in gates.check(changed(first_look, **options))}["argmax"]
        assert found.verdict == verdict and "look 1 of 3" in found.reason
        assert verdicts(changed(first_look, **options), "reference")["argmax"] == "pass"
    # too few prompts to tell their spread, however many replies
    few = {check.name: check for check in gates.check(build(num_prompts=9, repetitions=60))}["argmax"]
    assert few.verdict == "undecided" and "9 prompts" in few.reason


def test_stored_verdicts_and_score_are_not_trusted() -> None:
    full = raw_of(build(likelihood_gap=-0.08)) | {"reason": None, "score": build()["specscore"]}
    assert not gates.judge(record.complete(full)).passed
    reference = json.loads(REFERENCE.read_text())
    reference["memory"]["peak_mib"] = 170_000.0
    with pytest.raises(ValueError, match="memory.ok=True disagrees with False"):
        record.complete(reference)


def test_derived_figures_come_from_the_raw_ones() -> None:
    full = build(likelihood_gap=-0.01, argmax_gap=0.002, length_ratio=1.02)
    for name, speeds in records.SPEEDS.items():
        assert full["ratios"][name]["ratio"] == pytest.approx(sorted(speeds)[1], rel=1e-12)
        assert full["acceptance"][name] == pytest.approx(records.LENGTHS[name], rel=1e-3)
    assert full["specscore"] == pytest.approx((2.3 * 2.0 * 1.25) ** (1 / 3), rel=1e-12)
    assert full["fidelity"] == pytest.approx(2e-6)
    assert full["greedy_agreement"] == pytest.approx((10 * 120 + 40 + 90) / (12 * 120))
    assert full["memory"] == {"ok": True, "peak_mib": 1050.0, "allowed_mib": 5096.0}
    assert full["likelihood"]["stock"] == pytest.approx(-0.5, abs=0.01)
    assert full["likelihood"]["gap"] == pytest.approx(-0.01, abs=4 * full["likelihood"]["se"])
    assert full["argmax"]["gap"] == pytest.approx(0.002, abs=4 * full["argmax"]["se"])
    for found in full["lengths"].values():
        assert found["low"] < 1.02 < found["high"]
        assert (found["low"] + found["high"]) / 2 == pytest.approx(found["ratio"])


def test_an_appended_pass_changes_the_median() -> None:
    found = copy.deepcopy(raw_of(build()))
    found["raw"]["passes"]["solo"] += [records.a_pass("solo", 3.0)]
    assert record.complete(found)["ratios"]["solo"]["ratio"] == pytest.approx(2.35)


CLUSTERS = ("raw", "replies", "looks", 1, "team", "stock")
MALFORMED: list[tuple[Change, str]] = [
    (put(math.nan, "ratios", "team", "passes", 1), "ratios.team.passes[1]=nan must be positive and finite"),
    (
        put(0, "raw", "passes", "team", 1, "candidate", "wall_seconds"),
        "raw.passes.team[1].candidate.wall_seconds=0 must",
    ),
    (put(-1.0, "raw", "passes", "solo", 0, "stock", "wall_seconds"), "raw.passes.solo[0].stock.wall_seconds=-1.0 must"),
    (put(math.inf, "raw", "passes", "busy", 2, "stock", "wall_seconds"), "raw.passes.busy[2].stock.wall_seconds=inf"),
    (put(True, "raw", "passes", "busy", 2, "stock", "wall_tokens"), "raw.passes.busy[2].stock.wall_tokens=true must"),
    (put(9999, "raw", "passes", "busy", 0, "candidate", "accepted", 0), "raw.passes.busy[0].candidate.accepted="),
    (put(0, "raw", "passes", "busy", 0, "candidate", "num_verify_steps"), "candidate.num_verify_steps=0 must"),
    (put([], "raw", "passes", "crowd"), "raw.passes.crowd must be one of solo, team, busy"),
    (put(1.9, "ratios", "team", "ratio"), "ratios.team.ratio=1.9 disagrees with 2.0"),
    (put(2.5, "specscore"), "specscore=2.5 disagrees with"),
    (put(2.5, "score"), "score=2.5 disagrees with"),
    (put(0.0, "likelihood", "gap"), "likelihood.gap=0.0 disagrees with"),
    (put(1.0, "lengths", "busy", "ratio"), "lengths.busy.ratio=1.0 disagrees with"),
    (put(None, "argmax"), "argmax=None disagrees with"),
    (put(1.0, "greedy_agreement"), "greedy_agreement=1.0 disagrees with"),
    (put("fast", "specscore"), 'specscore="fast" must be positive and finite'),
    (put(2, "schema"), "schema=2 must be 1"),
    (put("decode", "clock"), 'clock="decode" must be wall'),
    (put(0, "limits", "argmax_bound"), "limits.argmax_bound=0 must be positive and finite"),
    (lambda full: full["limits"].pop("length_margin"), "limits.length_margin is missing"),
    (lambda full: full["raw"].pop("coupled"), "raw.coupled is missing"),
    (put([3.3, 3.1, 3.1], "synthetic_acceptance"), "raw.replies must be null: with synthetic_acceptance"),
    (put("compiled", "raw", "memory", "stock", "source"), "raw.memory compares sources compiled and peak_bytes_in_use"),
    (put([1], *CLUSTERS, "num_tokens"), "raw.replies.looks[1].team.stock.num_tokens has 1 entries for 40 prompts"),
    (put(1, *CLUSTERS, "num_tokens", 3), "raw.replies.looks[1].team.stock.num_not_first exceeds num_tokens"),
    (put(0.5, *CLUSTERS, "sum_log_prob", 3), "team.stock.sum_log_prob[3]=0.5 must be finite and not positive"),
    (put(0, *CLUSTERS, "num_not_first", 3), "team.stock.num_not_first is less than at the look before"),
    (put("other", *CLUSTERS, "prompt", 0), "raw.replies.looks[1].team.stock.prompt differs from the look before"),
    (put(21, *CLUSTERS, "num_replies", 0), "team.stock.num_replies is 801, and the plan announced 800"),
    (put(2, "raw", "replies", "plan", "num_looks"), "raw.replies.looks has 3 looks, and the plan announced 2"),
    (put(5, "raw", "replies", "plan", "num_looks"), "raw.replies.plan.num_looks=5 must be from 1 to 4"),
    (put(None, "raw", "greedy", 3, "margin"), "raw.greedy[3].margin must be null if and only if"),
    (put(True, "raw", "controls", 0, "caught"), "raw.controls[0].caught=True disagrees with its tests"),
    (put(0.5, "raw", "controls", 1, "tests", "log-probability, slot 1", "p_value"), "slot 1.caught=True disagrees"),
    (put([0] * 20, "raw", "martingale", "stock", "pit_counts", 2), "raw.martingale.stock.pit_counts[2] has 0 tokens"),
    (put([1, 2], "raw", "martingale", "stock", "num_tokens"), "raw.martingale.stock.num_tokens has 2 entries"),
]


@pytest.mark.parametrize("change, words", MALFORMED, ids=[words for _, words in MALFORMED])
def test_a_malformed_record_names_its_field(
    change: Change, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = copy.deepcopy(build())
    change(full)
    status, out, err = run(tmp_path, full, capsys)
    assert status == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and words in err


@pytest.mark.parametrize(
    "content, words",
    [
        ("{", "is not JSON"),
        ("[]", "the record=[] must be an object"),
        ("{}", "ratios is missing"),
        ('{"ratios": {}}', "specscore is missing"),
    ],
)
def test_what_is_no_record_at_all(content: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(tmp_path, content, capsys)
    assert status == 2 and words in err


def test_wrong_options_take_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", str(tmp_path / "absent.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    for argv in (["score"], ["score", "x.json", "--rule", "lenient"], ["praise"]):
        with pytest.raises(SystemExit) as stop:
            main(argv)
        assert stop.value.code == 2 and capsys.readouterr().err.count("\n") == 1
    with pytest.raises(ValueError, match="must be one of strict, reference"):
        gates.check(build(), "lenient")


def test_a_record_survives_the_file(tmp_path: Path) -> None:
    full = build(seed=int(np.random.default_rng(3).integers(1000)))
    path = tmp_path / "record.json"
    path.write_text(json.dumps(full))
    assert record.load(path) == full


COMMITTED = sorted((Path(__file__).resolve().parents[3] / "infer" / "results").glob("*.json"))


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_records_pass_and_are_what_the_readme_quotes(path: Path) -> None:
    full = record.load(path)
    line = next(line for line in (path.parents[2] / "README.md").read_text().splitlines() if path.name in line)
    rule = line.split("rule `")[1].split("`: passed")[0]
    assert gates.judge(full, rule).passed and not full["synthetic_acceptance"]
    quoted = [full["specscore"], *(full["ratios"][name]["ratio"] for name in ("solo", "team", "busy"))]
    assert "{:.2f} (solo {:.2f}, team {:.2f}, busy {:.2f})".format(*quoted) in line
    assert full["about"]["commit"][:7] in line
    assert path.with_suffix(".html").exists()
