"""The judge's measurements: what is timed, what is scored, and whether its controls are wrong where they should be."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.decode import HONEST
from infer.judge import controls, replies, scoring, texts, workloads
from infer.judge.replies import Law, Prompt
from infer.judge.workloads import Sample
from infer.replies import Reply
from mtp.acceptance import accept
from mtp.kernels.sampling import Sampling, WindowNoise, process_logits
from tests.infer import engines

LAW = Law({"temperature": 0.6, "top_k": 20, "top_p": 0.95}, (511,), 500)


def shape(**fields: Any) -> SimpleNamespace:
    known = dict(num_requests=9, prompt_tokens=20, reply_tokens=24, stagger=0.25, window="refill", full_share=0.9)
    return SimpleNamespace(**known | fields)


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
    assert workloads.timed(SAMPLES, shape(window=window)) == expected


def test_a_window_that_never_opens_is_an_error() -> None:
    idle = [Sample(float(i), i, 1, 0, 0.5) for i in range(4)]
    with pytest.raises(ValueError, match="nobody ever waits: 9 requests"):
        workloads.timed(idle, shape(window="refill"))
    with pytest.raises(ValueError, match=r"never 90% full while requests wait \(at most 0%\)"):
        workloads.timed([Sample(0.0, 0, 0, 0, 0.0), *idle[1:]], shape(window="full"))


def test_requests_are_the_same_for_both_arms_and_staggered() -> None:
    stream = list(range(100))
    first, again = (workloads.make_requests(shape(), stream, seed=3) for _ in range(2))
    assert first == again != workloads.make_requests(shape(), stream, seed=4)
    lengths = sorted(request.num_tokens for request in first)
    assert lengths[0] == 18 and lengths[-1] == 30 and len(set(lengths)) > 5
    assert all(len(request.prompt) == 20 for request in first)
    assert {request.num_tokens for request in workloads.make_requests(shape(stagger=0.0), stream, seed=3)} == {24}
    with pytest.raises(ValueError, match="the texts hold 19 tokens and a prompt takes prompt_tokens=20"):
        workloads.make_requests(shape(), stream[:19], seed=3)


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
    engine = engines.engine(num_draft_tokens=k, snapshot_memory=0)
    requests = workloads.make_requests(shape(), engines.prompt(1, 200), seed=3)
    arm = workloads.measure(engine, shape(window="whole"), requests, {"temperature": 1.0}, seed=5)
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
    engine.close()


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
        engine = engines.engine(num_draft_tokens=k, snapshot_memory=0, usable_tokens=LAW.usable_tokens)
        found[k] = replies.draw(engine, PROMPTS, LAW, repetitions=6, max_tokens=32, seed=("test", k))
        engine.close()
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
    engine = engines.engine(num_draft_tokens=0, snapshot_memory=0, usable_tokens=500)
    plain = replies.draw(engine, PROMPTS, greedy, repetitions=1, max_tokens=12, seed=())
    engine.close()
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
