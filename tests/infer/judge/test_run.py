"""The judge's measurements: what is timed, what is scored, whether its controls are wrong where they should be, and a
whole run on a model of two layers. All engines here have the same shapes and share their programs.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.decode import HONEST
from infer.engine import Compilations, Engine
from infer.judge import __main__ as command
from infer.judge import controls, gates, record, replies, run, scoring, selftest, texts, workloads
from infer.judge.config import Controls, JudgeConfig, Replies, Texts, Workload
from infer.judge.options import Options
from infer.judge.replies import Law, Prompt
from infer.judge.subject import Subject
from infer.judge.workloads import Sample
from infer.replies import Reply
from mtp import cache as kv
from mtp.acceptance import accept
from mtp.kernels.sampling import Sampling, WindowNoise, process_logits
from tests.infer import engines

LAW = Law({"temperature": 0.6, "top_k": 20, "top_p": 0.95}, (511,), 500)


def workload(**fields: Any) -> Workload:
    """Three lanes and 18 pages, as all engines here have."""
    known: dict[str, Any] = dict(lanes=3, num_requests=9, prompt_tokens=20, reply_tokens=24, stagger=0.25)
    known |= dict(window="refill", pool_tokens=3 * engines.MAX_LENGTH, page_size=engines.PAGE_SIZE)
    return Workload(**known | dict(chunk_lengths=(8, 32), prefill_lanes=2, steps_per_turn=4) | fields)


def engine(k: int) -> Engine:
    return Engine(
        engines.loaded(), None, **run.engine_options(workload(), engines.MAX_LENGTH) | {"num_draft_tokens": k}, **FIXED
    )


FIXED: dict[str, Any] = dict(snapshot_memory=0, max_mask_states=1, usable_tokens=LAW.usable_tokens)


def reply(**fields: Any) -> Reply:
    known: dict[str, Any] = dict(
        text="", token_ids=(), finish_reason="length", error=None, log_probs=None, prompt_tokens=10, cached_tokens=0
    )
    known |= dict(steps=(), drafted=(), accepted=(), queue_seconds=0.0, prefill_seconds=0.0, decode_seconds=0.0)
    return Reply(**known | dict(num_preemptions=0) | fields)


# -- timed passes ------------------------------------------------------------------------------------------------------

SAMPLES = [
    # seconds, tokens, live, waiting, fill
    Sample(0.0, 0, 0, 5, 0.0),
    Sample(1.0, 2, 2, 3, 0.85),
    Sample(2.0, 10, 2, 2, 0.95),
    Sample(3.5, 30, 2, 1, 0.92),
    Sample(4.0, 40, 2, 1, 0.80),
    Sample(5.0, 50, 2, 1, 1.0),
    Sample(6.0, 62, 2, 0, 0.9),
    Sample(8.0, 70, 1, 0, 0.4),
    Sample(9.0, 70, 0, 0, 0.0),
]


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        # the last token comes at 8 s
        ("whole", (8.0, 70)),
        # the line is seen empty at 6 s
        ("refill", (6.0, 62)),
        # only from 2 to 3.5 s is the pool full at both ends while somebody waits
        ("full", (1.5, 20)),
    ],
)
def test_what_is_timed(window: str, expected: tuple[float, int]) -> None:
    assert workloads.timed(SAMPLES, workload(window=window)) == expected


def test_a_window_that_never_opens_is_an_error() -> None:
    idle = [Sample(float(i), i, 1, 0, 0.5) for i in range(4)]
    with pytest.raises(ValueError, match="nobody ever waits: 9 requests"):
        workloads.timed(idle, workload(window="refill"))
    with pytest.raises(ValueError, match=r"never 90% full while requests wait \(at most 0%\)"):
        workloads.timed([Sample(0.0, 0, 0, 0, 0.0), *idle[1:]], workload(window="full"))


def test_requests_are_the_same_for_both_arms_and_staggered() -> None:
    stream = list(range(100))
    first, again = (workloads.make_requests(workload(), stream, seed=3) for _ in range(2))
    assert first == again != workloads.make_requests(workload(), stream, seed=4)
    lengths = sorted(request.num_tokens for request in first)
    assert lengths[0] == 18 and lengths[-1] == 30 and len(set(lengths)) > 5
    assert all(len(request.prompt) == 20 for request in first)
    assert {request.num_tokens for request in workloads.make_requests(workload(stagger=0.0), stream, seed=3)} == {24}
    with pytest.raises(ValueError, match="the texts hold 19 tokens and a prompt takes prompt_tokens=20"):
        workloads.make_requests(workload(), stream[:19], seed=3)


def test_steps_by_context() -> None:
    # contexts before the steps: 63, 64, 68 | 129
    found = workloads.by_context([reply(prompt_tokens=62, steps=(1, 4, 2)), reply(prompt_tokens=128, steps=(3,))])
    assert found == [
        {"context": 64, "tokens": 5, "steps": 2},
        {"context": 128, "tokens": 2, "steps": 1},
        {"context": 256, "tokens": 3, "steps": 1},
    ]


@pytest.mark.parametrize("k", [0, 3])
def test_a_measured_pass(k: int) -> None:
    """Tokens, steps and drafts add up, and all of it happens behind the first submission."""
    server = engine(k)
    requests = workloads.make_requests(workload(), engines.prompt(1, 200), seed=3)
    arm = workloads.measure(server, workload(window="whole"), requests, {"temperature": 1.0}, seed=5)
    assert arm["wall_tokens"] == sum(request.num_tokens for request in requests)
    assert 0 < arm["wall_seconds"] and len(arm["drafted"]) == k
    assert arm["num_verify_steps"] == sum(bucket["steps"] for bucket in arm["by_context"])
    decoded = arm["wall_tokens"] - len(requests)
    assert decoded == sum(bucket["tokens"] for bucket in arm["by_context"])
    # a step emits its accepted drafts and one more, which an end of the reply may cut off
    assert 0 <= arm["num_verify_steps"] + sum(arm["accepted"]) - decoded <= len(requests)
    if k:
        assert sum(arm["accepted"]) > 0
    seconds = [point[0] for point in arm["fill"]]
    assert seconds == sorted(seconds) and max(point[1] for point in arm["fill"]) > 0.2
    server.close()


# -- scores ------------------------------------------------------------------------------------------------------------


def test_token_scores_equal_a_plain_computation() -> None:
    rng = np.random.default_rng(0)
    lanes, rows, vocab = 3, 7, 40
    logits = rng.normal(0, 2, (lanes, rows, vocab)).astype(np.float32)
    sampling = Sampling.alike(lanes, temperature=0.7, top_k=12, top_p=0.9)
    law = np.asarray(process_logits(jnp.asarray(logits), sampling), np.float64)
    tokens = np.array([[rng.choice(np.nonzero(row > -np.inf)[0]) for row in lane] for lane in law], np.int32)
    found = scoring.score_tokens(jnp.asarray(logits), jnp.asarray(tokens), sampling)
    for b in range(lanes):
        for t in range(rows):
            p, x, raw = np.exp(law[b, t]), tokens[b, t], logits[b, t].astype(np.float64)
            inside = p > 0
            mean = np.sum(p[inside] * law[b, t][inside])
            first = int(np.argmax(raw))
            expected = {
                "log_prob": raw[x] - np.log(np.sum(np.exp(raw))),
                "not_first": x != first,
                "excess": law[b, t, x] - mean,
                "variance": np.sum(p[inside] * law[b, t][inside] ** 2) - mean**2,
                "first_excess": (x == first) - p[first],
                "first_variance": p[first] * (1 - p[first]),
                "below": np.sum(p[p > p[x]]),
                "mass": p[x],
            }
            for name, value in expected.items():
                assert float(getattr(found, name)[b, t]) == pytest.approx(float(value), abs=5e-6), name


def test_a_token_without_a_chance_is_scored_as_the_least_probable_one() -> None:
    logits = jnp.asarray([[[3.0, 2.0, 1.0, -5.0]]], jnp.float32)
    found = scoring.score_tokens(logits, jnp.asarray([[3]], jnp.int32), Sampling.alike(1, top_k=2))
    law = np.log(np.array([1.0, np.exp(-1.0)]) / (1 + np.exp(-1.0)))
    assert float(found.excess[0, 0]) == pytest.approx(law[1] - np.exp(law) @ law, abs=1e-6)
    assert float(found.below[0, 0]) == pytest.approx(1.0) and float(found.mass[0, 0]) == 0.0


def test_slots() -> None:
    assert replies.slots((1, 4, 2), "rejection").tolist() == [0, 0, 0, 1, 2, 3, 0, 1]
    assert replies.slots((1, 4, 2), "block").tolist() == [0, 0, 0, 1, 1, 1, 0, 1]


def test_seeds_are_stable_and_differ() -> None:
    assert replies.seed_of("stock", "solo", 0, "a") == replies.seed_of("stock", "solo", 0, "a") < 2**32
    parts = [(arm, workload, look) for arm in ("stock", "candidate") for workload in "ab" for look in range(3)]
    assert len({replies.seed_of(*part, "p") for part in parts}) == len(parts)


PROMPTS = [Prompt(str(i), tuple(engines.prompt(50 + i, 1 + 9 * i))) for i in range(4)]


@pytest.fixture(scope="module")
def drawn() -> dict[int, list[list[Reply]]]:
    """Replies of both arms, by k."""
    found = {}
    for k in (0, 3):
        server = engine(k)
        found[k] = replies.draw(server, PROMPTS, LAW, repetitions=6, max_tokens=32, seed=("test", k))
        server.close()
    return found


@pytest.mark.parametrize("k", [0, 3])
def test_scored_replies_add_up_and_fit_their_law(drawn: dict[int, list[list[Reply]]], k: int) -> None:
    loaded = engines.loaded()
    scores = replies.score(loaded, PROMPTS, drawn[k], LAW, num_lanes=5)
    clusters, martingale = replies.Clusters(PROMPTS), replies.Martingale(k + 1, seed=0)
    for place, (own, theirs) in enumerate(zip(drawn[k], scores, strict=True)):
        assert len(own) == 6 and len({one.token_ids for one in own}) > 1
        for one, score in zip(own, theirs, strict=True):
            clusters.add(place, one, score)
            martingale.add(one, score, "rejection")
    total = sum(len(one.token_ids) for own in drawn[k] for one in own)
    by_prompt, by_slot = clusters.record(), martingale.record()
    assert sum(by_prompt["num_tokens"]) == sum(by_slot["num_tokens"]) == total == clusters.num_tokens
    assert by_prompt["num_replies"] == [6] * 4
    assert [sum(bins) for bins in by_slot["pit_counts"]] == by_slot["num_tokens"]
    # each sum is within 5 standard deviations of 0; a token shifted by one place would be at hundreds
    for name, variance in (("sum_log_prob_excess", "var_log_prob"), ("sum_first_excess", "var_first")):
        z = np.array(by_slot[name]) / np.sqrt(by_slot[variance])
        assert np.all(np.abs(z) < 5), (name, z)


def test_raw_scores_are_those_of_one_text_read_alone(drawn: dict[int, list[list[Reply]]]) -> None:
    loaded = engines.loaded()
    scores = replies.score(loaded, PROMPTS, drawn[3], LAW, num_lanes=5)
    one, whole = drawn[3][2][1], (*PROMPTS[2].token_ids, *drawn[3][2][1].token_ids)
    alone = texts.read_plainly(loaded, [texts.Text("x", whole)], num_lanes=2)[0].log_probs
    np.testing.assert_allclose(scores[2][1].log_prob, alone[-len(one.token_ids) :], atol=2e-5)


def test_differences_are_found_with_their_margin(drawn: dict[int, list[list[Reply]]]) -> None:
    loaded, greedy = engines.loaded(), Law({"temperature": 0.0}, (511,), 500)
    server = engine(0)
    plain = replies.draw(server, PROMPTS, greedy, repetitions=1, max_tokens=12, seed=())
    server.close()
    assert all(
        row["first_difference"] is None for row in replies.differences(loaded, PROMPTS, plain, plain, greedy, [0] * 4)
    )
    own = plain[2][0]
    other = reply(token_ids=(*own.token_ids[:5], (own.token_ids[5] + 1) % 500, *own.token_ids[6:]))
    rows = replies.differences(loaded, PROMPTS, plain, [*plain[:2], [other], plain[3]], greedy, [0] * 4)
    assert [row["first_difference"] for row in rows] == [None, None, 5, None]
    # the margin is that of the two best logits behind the prompt and five tokens
    hidden = (*PROMPTS[2].token_ids, *own.token_ids[:5])
    best, second = _top_two(loaded, hidden)
    assert rows[2]["margin"] == pytest.approx(best - second, abs=2e-5)


def _top_two(loaded: Any, token_ids: tuple[int, ...]) -> tuple[float, float]:
    """The two best logits among usable tokens, as log-probabilities of all candidates read as one-token texts."""
    cands = [texts.Text(str(i), (*token_ids, i)) for i in range(500)]
    last = sorted(float(r.log_probs[-1]) for r in texts.read_plainly(loaded, cands, num_lanes=50))
    return last[-1], last[-2]


def test_draft_scores_equal_a_plain_computation(drawn: dict[int, list[list[Reply]]]) -> None:
    """The head's law at a window start is that of speculation: each reply's own first drafts come from it."""
    loaded = engines.loaded()
    scores = replies.score_drafts(loaded, PROMPTS, drawn[3], LAW, num_lanes=5)
    tests = selftest.preference(
        [one.steps for own in drawn[3] for one in own], [score for own in scores for score in own]
    )
    assert [abs(test.statistic) < 4 for test in tests.values()] == [True, True]
    flat = np.concatenate([score.excess for own in scores for score in own])
    variance = np.concatenate([score.variance for own in scores for score in own])
    assert np.all((flat > -1) & (flat <= 1)) and 0.01 < variance.mean() <= 0.25
    # plain decoding's tokens follow the same law
    plain = replies.score_drafts(loaded, PROMPTS, drawn[0], LAW, num_lanes=5)
    excess, spread = (
        sum(float(np.sum(getattr(score, name), dtype=np.float64)) for own in plain for score in own)
        for name in ("excess", "variance")
    )
    assert abs(excess) < 4 * spread**0.5


def test_preference_sees_windows_behind_a_single_token() -> None:
    """Reply of windows 1, 3, 1, 2: the second and the last start behind a single token."""
    excess = np.zeros(8)
    excess[[2, 6]] = 1.0
    found = selftest.preference([(1, 3, 1, 2)], [scoring.DraftScores(excess, np.full(8, 0.25))])
    several, one = found.values()
    assert several.statistic == 0 and one.statistic == pytest.approx(2 / 0.5**0.5)
    assert one.p_value == pytest.approx(0.00468, abs=1e-5)


# -- texts -------------------------------------------------------------------------------------------------------------

TEXTS = [texts.Text(str(i), tuple(engines.prompt(80 + i, 2 + 19 * i))) for i in range(5)]


def test_texts_in_windows_read_the_same_with_every_count_of_drafts() -> None:
    loaded = engines.loaded()
    plain = texts.read_plainly(loaded, TEXTS, num_lanes=3)
    windows = texts.read_in_windows(loaded, TEXTS, 3, num_draft_tokens=3, seed=1)
    rows = texts.compare(TEXTS, plain, windows)
    assert [row["num_tokens"] for row in rows] == [len(text.token_ids) - 1 for text in TEXTS]
    assert max(row["max_abs_diff"] for row in rows) < 2e-5
    assert np.all(np.sum([row["committed"] for row in rows], axis=0) > 5)
    # all tokens but the first two are committed by a window
    for row in rows:
        assert sum((n + 1) * count for n, count in enumerate(row["committed"])) == row["num_tokens"] - 1


def test_texts_see_a_stale_state() -> None:
    loaded = engines.loaded()
    plain = texts.read_plainly(loaded, TEXTS, num_lanes=3)
    wrong = controls.controls(0.1, 5)[-1].verbs
    rows = texts.compare(TEXTS, plain, texts.read_in_windows(loaded, TEXTS, 3, num_draft_tokens=3, seed=1, verbs=wrong))
    assert max(row["max_abs_diff"] for row in rows) > selftest.TEXT_TOLERANCE


# -- controls ----------------------------------------------------------------------------------------------------------

LANES, VOCAB, K = 400, 24, 3


@pytest.fixture(scope="module")
def window() -> tuple[Any, ...]:
    """Laws and drafts of windows that differ in part, and their noise: the arguments of `accept` behind the law."""
    rng = np.random.default_rng(4)
    sampling = replace(Sampling.alike(LANES), seed=jnp.arange(LANES, dtype=jnp.uint32))
    target = process_logits(jnp.asarray(rng.normal(0, 1.5, (LANES, K + 1, VOCAB)), jnp.float32), sampling)
    moved = target[:, :K] + jnp.asarray(rng.normal(0, 0.7, (LANES, K, VOCAB)), jnp.float32)
    drafting = process_logits(moved, sampling)
    drafts = jnp.argmax(drafting + jnp.asarray(rng.gumbel(size=(LANES, K, VOCAB)), jnp.float32), -1).astype(jnp.int32)
    noise = WindowNoise(sampling, jnp.asarray(rng.integers(5, 900, LANES), jnp.int32))
    return target, drafting, drafts, jnp.full((LANES,), K, jnp.int32), noise


@pytest.mark.parametrize("law", ["rejection", "coupled"])
def test_lossy_acceptance_keeps_one_rejected_draft_more_now_and_then(window: tuple[Any, ...], law: str) -> None:
    honest = accept(law, *window)
    for leak in (0.0, 0.3, 1.0):
        wrong = controls.LossyAccept(leak)(law, *window)
        more = np.asarray(wrong.num_accepted - honest.num_accepted)
        rejected = np.asarray(honest.num_accepted) < K
        assert rejected.sum() > LANES // 4 and set(more) <= {0, 1} and not np.any(more[~rejected])
        # within four standard deviations
        assert abs(more[rejected].mean() - leak) <= 4 * (leak * (1 - leak) / rejected.sum()) ** 0.5
        same = more == 0
        assert np.array_equal(np.asarray(wrong.next_token)[same], np.asarray(honest.next_token)[same])


def test_top_p_first_keeps_what_the_unheated_law_keeps() -> None:
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 2, (4, 6, 50)).astype(np.float32)
    law = np.asarray(controls.top_p_first(jnp.asarray(logits), Sampling.alike(4, temperature=1.5, top_p=0.8)))
    unheated = np.asarray(process_logits(jnp.asarray(logits), Sampling.alike(4, top_p=0.8)))
    np.testing.assert_array_equal(law > -np.inf, unheated > -np.inf)
    scaled = np.where(unheated > -np.inf, logits / 1.5, -np.inf)
    np.testing.assert_allclose(law, scaled - np.log(np.exp(scaled).sum(-1, keepdims=True)), atol=1e-5)
    right = np.asarray(process_logits(jnp.asarray(logits), Sampling.alike(4, temperature=1.5, top_p=0.8)))
    assert np.any((right > -np.inf) != (law > -np.inf))


def test_shared_coins_are_the_same_in_neighbouring_windows(window: tuple[Any, ...]) -> None:
    noise = window[-1]
    starts = [replace(noise, position=jnp.full((LANES,), place, jnp.int32)) for place in (16, 19, 24)]
    first, second, third = (np.asarray(controls._SharedNoise(start).coins(K)) for start in starts)
    assert np.array_equal(first, second) and not np.any(first == third)
    # what it decides differs from the honest decision somewhere, and not in law
    wrong, honest = controls.accept_with_shared_coins("rejection", *window), accept("rejection", *window)
    differ = np.asarray(wrong.num_accepted != honest.num_accepted)
    assert 0 < differ.sum() < LANES
    assert abs(float(jnp.mean(wrong.num_accepted - honest.num_accepted))) < 4 * (2.5 / LANES) ** 0.5


def test_stale_commit_forgets_a_row_as_often_as_it_should() -> None:
    lanes, every = 2000, 10
    cache = kv.init(engines.CONFIG, num_lanes=lanes, num_pages=1, page_size=1, pages_per_lane=1, num_draft_tokens=1)
    rng = np.random.default_rng(6)
    cache = replace(cache, lengths=jnp.asarray(rng.integers(1, 500, lanes), jnp.int32))
    tokens = jnp.asarray(rng.integers(0, 500, (lanes, 2)), jnp.int32)
    count = jnp.asarray(rng.integers(0, 3, lanes), jnp.int32)
    honest = HONEST.commit(cache, cache.recent_hidden, tokens, count)
    wrong = controls.StaleCommit(every)(cache, cache.recent_hidden, tokens, count)
    short = np.asarray(honest.num_pending - wrong.num_pending)
    assert set(short) == {0, 1} and not np.any(short[np.asarray(count) == 0])
    live = int((np.asarray(count) > 0).sum())
    assert abs(short.sum() / live - 1 / every) < 4 * (0.09 / live) ** 0.5
    assert np.array_equal(wrong.lengths, honest.lengths)


def test_controls_of_equal_strength_are_equal() -> None:
    """So that they share a compiled program."""
    first, again = controls.controls(0.1, 100), controls.controls(0.1, 100)
    assert first == again and hash(first[0].verbs) == hash(again[0].verbs)
    assert controls.controls(0.2, 100)[0].verbs != first[0].verbs


# -- whole runs --------------------------------------------------------------------------------------------------------

CONFIG = JudgeConfig(
    solo=workload(num_requests=3, window="whole"),
    team=workload(),
    busy=workload(prompt_tokens=48, reply_tokens=36, window="full", full_share=0.5),
    replies=Replies(num_prompts=10, max_tokens=72, looks=2, budget_seconds=1.0, num_equal=3),
    texts=Texts(num_texts=3, max_tokens=40, lanes=3),
    controls=Controls(leak=0.5, stale_every=3, num_prompts=4),
)


class Words:
    """A tokenizer, as far as the judge needs one."""

    @staticmethod
    def encode(text: str) -> list[int]:
        return engines.prompt(len(text), 4 + len(text) % 21)


SUBJECT = Subject("tiny", "float32", engines.loaded(), Words(), LAW)  # type: ignore[arg-type]
OPTIONS = Options(("solo", "team", "busy"), 1, frozenset(), False, "strict", None, None, None, None)


@pytest.fixture(scope="module")
def display() -> Iterator[run.Display]:
    with run.Display() as shown:
        yield shown


@pytest.fixture(scope="module")
def found(display: run.Display) -> dict[str, Any]:
    """A whole record, without memory and controls."""
    return run.Judge(SUBJECT, CONFIG, OPTIONS, display).all()


def test_a_whole_run(found: dict[str, Any]) -> None:
    raw = found["raw"]
    assert set(found["ratios"]) == {"solo", "team", "busy"} and found["specscore"] > 0
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    # equal texts have to be equal
    assert [row["first_difference"] for row in (*raw["greedy"], *raw["coupled"])] == [None] * 6
    assert found["fidelity"] < 2e-5 and found["greedy_agreement"] == 1
    # a budget of a second is spent after the first look
    plan, looks = raw["replies"]["plan"], raw["replies"]["looks"]
    assert len(looks) == 1 and not plan["within_budget"] and len(plan["gates"]) == 5
    for arms in looks[0].values():
        for clusters in arms.values():
            assert sum(clusters["num_replies"]) == 10 * plan["repetitions"]["solo"]
    drawn = sum(sum(arms[arm]["num_tokens"]) for arms in looks[0].values() for arm in ("candidate",))
    assert sum(raw["martingale"]["candidate"]["num_tokens"]) == drawn
    verdict = gates.judge(found, "strict")
    verdicts = {check.name: check.verdict for check in verdict.checks}
    assert not verdict.passed and "undecided" in verdicts.values() and "fail" not in verdicts.values()


def test_a_plan_does_not_expect_looks_to_compile(display: run.Display, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eleven prompts: the warm-up reads the eight longest, and takes ten times as long as the pilot behind it."""
    clock, said, seen = [0.0], {}, []

    def look(_: object, tally: object, prompts: Any, *rest: object) -> None:
        seen.append([prompt.id for prompt in prompts])
        clock[0] += 100.0 if len(seen) == 2 else 1000.0
        Compilations.heard("/jax/core/compile/backend_compile_duration", 90.0)

    monkeypatch.setattr(run.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(run.Judge, "take_look", look)
    monkeypatch.setattr(run.Tally, "num_tokens", 1000)
    monkeypatch.setattr(run.planning, "make_plan", lambda *_, **options: said.update(options))
    prompts = [Prompt(str(n), (1,) * (n + 1)) for n in range(11)]
    run.Judge(SUBJECT, CONFIG, OPTIONS, display).make_plan(prompts, 1300.0, 0.0)
    assert seen == [[str(n) for n in range(10, 2, -1)], [str(n) for n in range(11)]]
    assert said["tokens_per_second"] == pytest.approx(100) and said["budget_seconds"] == 200


def test_more_passes_are_added_to_the_same_thing_only(found: dict[str, Any], display: run.Display) -> None:
    before = json.loads(json.dumps(found))
    options = replace(OPTIONS, workloads=("solo",))
    judge = run.Judge(SUBJECT, CONFIG, options, display)
    after = judge.append(before)
    assert [len(after["ratios"][name]["passes"]) for name in ("solo", "team", "busy")] == [2, 1, 1]
    assert after["raw"]["passes"]["solo"][0] == found["raw"]["passes"]["solo"][0]
    for changed, name in (
        (replace(judge, subject=replace(SUBJECT, dtype="bfloat16")), "dtype"),
        (replace(judge, subject=replace(SUBJECT, name="other")), "model"),
        (replace(judge, config=replace(CONFIG, texts=Texts(3, 41, 3))), "config"),
        (replace(judge, options=replace(options, acceptance=(3.0, 3.0, 3.0))), "synthetic_acceptance"),
    ):
        changed.raw = dict.fromkeys(run.RAW_FIELDS) | {"passes": {}}
        with pytest.raises(ValueError, match=f"the record has {name}="):
            changed.append(before)


def test_the_self_test_tells_a_control_from_the_honest_arm(
    display: run.Display, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = controls.controls
    monkeypatch.setattr(selftest, "controls", lambda *strength: known(*strength)[-1:])
    honest, stale = run.Judge(SUBJECT, CONFIG, OPTIONS, display).run_controls()
    assert honest["name"] == "honest" and honest["strength"] == 0 and not honest["caught"]
    assert stale["name"] == "stale state" and stale["caught"] and stale["tests"].keys() == honest["tests"].keys()
    assert stale["tests"]["fixed texts"]["caught"] and stale["tests"]["fixed texts"]["statistic"] > 1e-3


def test_memory_of_both_arms() -> None:
    peaks = {arm: run.peak_memory(SUBJECT, arm, CONFIG.team) for arm in ("stock", "candidate")}
    assert {peak["source"] for peak in peaks.values()} == {"compiled"}
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(engines.loaded().model))
    assert weights < peaks["stock"]["peak_bytes"] < peaks["candidate"]["peak_bytes"] < 100 * weights


def test_the_command_on_random_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Synthetic acceptance is labelled, and nothing is said about tokens."""
    (tmp_path / "config.json").write_text(json.dumps(engines.CONFIG.to_hf()))
    table = ["lanes = 3", "num_requests = 9", "prompt_tokens = 20", "reply_tokens = 61", "stagger = 0.25"]
    table += ["pool_tokens = 288", "page_size = 16", "steps_per_turn = 4", "chunk_lengths = [8, 32]"]
    lines = [line for name in ("solo", "team", "busy") for line in (f"[{name}]", *table, "prefill_lanes = 2")]
    lines += ["[replies]", "num_prompts = 2", "max_tokens = 8", "[texts]", "num_texts = 3", "max_tokens = 40"]
    lines += ["lanes = 3", "[controls]", "leak = 0.5", "stale_every = 3", "num_prompts = 2"]
    (tmp_path / "judge.toml").write_text("\n".join(lines))
    argv = ["run", "--model", f"random:{tmp_path / 'config.json'}", "--config", str(tmp_path / "judge.toml")]
    argv += ["--workloads", "team", "--passes", "1", "--skip", "memory", "--acceptance", "3.0,3.3,3.1"]
    argv += ["--out", str(tmp_path / "record.json"), "--report", str(tmp_path / "report.html")]
    assert command.main(argv) == 1
    out = capsys.readouterr()
    line = json.loads(out.out.splitlines()[-1])
    assert line["synthetic_acceptance"] == [3.0, 3.3, 3.1] and line["specscore"] is None
    assert line["checks"]["likelihood"]["verdict"] == "n-a" and "synthetic" in out.err
    found = record.load(tmp_path / "record.json")
    # nine replies of 61 tokens on average: the mean over some 160 steps, each of 1..4 tokens
    assert found["acceptance"]["team"] == pytest.approx(3.3, abs=0.35)
    assert found["raw"]["replies"] is found["raw"]["coupled"] is None and found["fidelity"] < 2e-5
    assert "synthetic" in (tmp_path / "report.html").read_text().lower()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--workloads", "solo,tam"], "--workloads 'tam' must be one of solo, team, busy"),
        (["--skip", "txts"], "--skip 'txts' must be one of memory, texts, equality, replies"),
        (["--acceptance", "3,x,3"], "--acceptance '3,x,3' must be 3 numbers, for solo, team, busy"),
        (["--passes", "0"], "--passes 0 of 3 workloads"),
        (["--acceptance", "3,3,3", "--self-test"], "--self-test needs natural acceptance"),
        (["--out", "nowhere/record.json"], "nowhere is no directory"),
        (["--append", "nowhere.json"], "nowhere.json"),
    ],
)
def test_wrong_options(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["run", *argv]) == 2
    assert message in capsys.readouterr().err


def test_rows_of_a_file_of_the_users(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps({"id": n, "text": f"text {n}"}) + "\n" for n in range(6)))
    assert run.read_rows(path, "text", "num_texts", 3) == [("0", "text 0"), ("2", "text 2"), ("4", "text 4")]
    with pytest.raises(ValueError, match="has 6 rows and num_texts=7 are wanted"):
        run.read_rows(path, "text", "num_texts", 7)
    path.write_text('{"id": 1}\n')
    with pytest.raises(ValueError, match=r'own.jsonl:1 must be an object with "id" and "text"'):
        run.read_rows(path, "text", "num_texts", 1)
