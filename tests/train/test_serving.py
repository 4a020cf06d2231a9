"""The expected length of a verify step against simulated serving with the real law, and against the engine's count."""

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp.acceptance import LAWS, accept
from mtp.kernels.sampling import Sampling, WindowNoise, process_logits, sample
from tests.infer import small_models
from tests.train.test_unroll import params, tokens, trained  # noqa: F401 (fixtures)
from train import evaluate, generate_data, serving

VOCABULARY, DEPTHS, LANES, WINDOWS = 5, 3, 64, 60


@cache
def tables() -> tuple[np.ndarray, np.ndarray]:
    """Target and draft log-probabilities [V, V] by the last token; one of the draft's tokens is excluded."""
    rng = np.random.default_rng(2)
    target = rng.normal(0, 1.5, (VOCABULARY, VOCABULARY)).astype(np.float32)
    draft = target + rng.normal(0, 0.8, (VOCABULARY, VOCABULARY)).astype(np.float32)
    draft[1, 2] = -np.inf
    log_p, log_q = (x - np.logaddexp.reduce(x, axis=1, keepdims=True) for x in (target, draft))
    return log_p, log_q


@partial(jax.jit, static_argnums=0)
def window(law: str, last: jax.Array, position: jax.Array, seeds: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One draft and verify step of every lane of the Markov model: tokens [B, k + 1] and how many of them were kept."""
    log_p, log_q = map(jnp.asarray, tables())
    noise = WindowNoise(Sampling(**(vars(Sampling.alike(LANES)) | {"seed": seeds})), position)
    drafts, context = [], last
    for depth in range(DEPTHS):
        context = sample(log_q[context], noise.draft(law, depth, VOCABULARY))
        drafts.append(context)
    rows = jnp.stack([last, *drafts], axis=1)
    got = accept(law, log_p[rows], log_q[rows[:, :-1]], rows[:, 1:], jnp.full((LANES,), DEPTHS), noise)
    place = jnp.arange(DEPTHS + 1)[None]
    out = jnp.where(place == got.num_accepted[:, None], got.next_token[:, None], jnp.pad(rows[:, 1:], ((0, 0), (0, 1))))
    return out, got.num_accepted + 1


judge = jax.jit(serving._judge)


def markov_odds(text: np.ndarray) -> serving.Odds:
    """What the tables say of a text, as `read_odds` does; of one length, so that little is compiled."""
    log_p, log_q = tables()
    rows = np.arange(WINDOWS * (DEPTHS + 1) + 2)
    text = np.concatenate([text, np.zeros(len(rows) + DEPTHS + 2 - len(text), int)])
    found, log_w = [], jnp.zeros((len(rows),))
    for depth in range(1, DEPTHS + 1):
        before, token = text[rows + depth], jnp.asarray(text[rows + depth + 1], jnp.int32)
        laws = jnp.asarray(log_p[before]), jnp.asarray(log_q[before])
        one, log_w = judge(*laws, token, jnp.zeros((len(rows),)), log_w)
        found.append(one)
    return jax.tree.map(lambda *columns: np.stack(columns, axis=-1), *found)


@pytest.mark.parametrize("law", LAWS)
def test_replay_counts_the_rounds_of_simulated_serving(law: str) -> None:
    """64 lanes of 60 windows of a Markov model: tokens a round within 4 standard errors of the lanes' differences."""
    seeds = jnp.arange(LANES, dtype=jnp.uint32)
    last, position = jnp.zeros((LANES,), jnp.int32), jnp.zeros((LANES,), jnp.int32)
    texts = [[0] for _ in range(LANES)]
    for _ in range(WINDOWS):
        out, count = window(law, last, position, seeds)
        last = jnp.take_along_axis(out, count[:, None] - 1, axis=1)[:, 0]
        position += count
        for lane, (row, kept) in enumerate(zip(np.asarray(out), np.asarray(count), strict=True)):
            texts[lane] += row[:kept].tolist()
    # the first token counts as the prompt's last row's own: anchor -1 is the prompt's
    rounds = [serving.replay(markov_odds(np.array([0, *text])), law, 1, len(text)) for text in texts]
    misses = np.array([one.num_rounds - WINDOWS for one in rounds])
    error = misses.std(ddof=1) / np.sqrt(LANES)
    # the text ends where the last window does, which the replay can't know: half a window at most
    assert abs(misses.mean()) < 4 * error + 0.5
    assert 0.01 < error < 1
    length, (low, high) = serving.serving_length(rounds), serving.interval(rounds)
    assert 1.5 < low < length < high < 3.5
    # each depth stands less often, and block at least as often as rejection
    stands = serving.standing(rounds)
    assert 1 > stands[0] > stands[1] > stands[2] > 0
    if law == "block":
        plain = [serving.replay(markov_odds(np.array([0, *text])), "rejection", 1, len(text)) for text in texts]
        assert stands[2] > serving.standing(plain)[2]


def test_argmax_drafts_are_counted_one_by_one() -> None:
    """Without randomness in the draft the replay is a count: greedy and argmax, with a text that ends in a window."""
    text = np.array([0, *np.random.default_rng(0).integers(0, VOCABULARY, 200)])
    best = tables()[1].argmax(axis=1)
    place, rounds = 1, 0
    while place < len(text) - 1:
        kept = 0
        while kept < DEPTHS and place + kept + 1 < len(text) and best[text[place + kept]] == text[place + kept + 1]:
            kept += 1
        place, rounds = place + kept + 1, rounds + 1
    for mode in ("greedy", "argmax"):
        one = serving.replay(markov_odds(text), mode, 1, len(text) - 1)
        assert (one.num_tokens, one.num_rounds) == (len(text) - 2, rounds)
    with pytest.raises(ValueError, match="mode='typical' must be one of greedy, argmax"):
        serving.replay(markov_odds(text), "typical", 1, 5)


def test_odds_are_those_of_the_whole_laws(params: Any, tokens: np.ndarray) -> None:  # noqa: F811
    """By chunks of 4 and of 16, padded, against laws made of all rows at once; float32, 1e-5."""
    length = 20
    padded, documents = serving.padded(tokens[:length].tolist(), 32)
    sampling = Sampling.alike(1, temperature=0.8, top_k=20)
    read = partial(serving.read_odds, params.head, params.model, padded, documents, sampling, num_depths=DEPTHS)
    small, large = read(chunk_rows=4), read(chunk_rows=16)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[:16], b[:16], rtol=0, atol=1e-5), small, large)
    hidden, drafts = trained(params, padded[None], documents[None])
    law = jax.jit(lambda rows: process_logits(params.model.unembed(rows), sampling)[0])
    raw_law = jax.jit(lambda rows: jax.nn.log_softmax(params.model.unembed(rows))[0])
    target = np.asarray(law(hidden))
    for depth, rows in enumerate(drafts, 1):
        anchors = np.arange(length - depth - 1)
        p, q, x = target[anchors + depth], np.asarray(law(rows))[anchors], tokens[anchors + depth + 1]
        np.testing.assert_allclose(small.log_p[anchors, depth - 1], p[anchors, x], atol=1e-5)
        np.testing.assert_allclose(small.log_q[anchors, depth - 1], q[anchors, x], atol=1e-5)
        overlap = np.minimum(np.exp(p), np.exp(q)).sum(axis=1)
        np.testing.assert_allclose(small.overlap[anchors, depth - 1], overlap, atol=1e-5)
        np.testing.assert_array_equal(small.is_best[anchors, depth - 1], q.argmax(axis=1) == x)
        raw = np.asarray(raw_law(rows))
        np.testing.assert_allclose(small.draft_nll[anchors, depth - 1], -raw[anchors, x], atol=1e-5)
    with pytest.raises(ValueError, match="chunk_rows=5 must divide the length of 32"):
        read(chunk_rows=5)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint, one whose head is another, and replies of the first: greedy and at T = 1."""
    root = tmp_path_factory.mktemp("serving")
    small_models.write(root / "model")
    small_models.write(root / "other", head_noise=3.0)
    prompts = [{"prompt": f"def f{n}(x):", "domain": "code" if n % 2 else "tests"} for n in range(12)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in prompts))
    for name, temperature, law in (("greedy", 0, "rejection"), ("block", 1, "block")):
        options = ["--temperature", temperature, "--verify", law, "--max-tokens", 40, "--lanes", 12]
        command = ["replies", root / "prompts.jsonl", "--model", root / "model", "--out", root / name, *options]
        assert generate_data.main([str(part) for part in command]) == 0
    return root


def run(capsys: pytest.CaptureFixture[str], *command: object) -> tuple[int, dict[str, Any], str]:
    capsys.readouterr()
    status = evaluate.main([str(part) for part in command])
    said = capsys.readouterr()
    return status, json.loads(said.out) if said.out else {}, said.err


def test_the_engine_counts_what_was_expected(drawn: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Greedy: to the round. Sampled: inside the interval of the law that drew the text; all four modes are told."""
    status, said, _ = run(capsys, drawn / "model", drawn / "greedy")
    row = said["modes"]["greedy"]["all"]
    assert status == 0 and list(said["modes"]) == ["greedy"]
    assert row["expected_rounds"] == pytest.approx(row["num_tokens"] / said["measured"], abs=1e-6)
    status, said, table = run(capsys, drawn / "model", drawn / "block")
    assert status == 0 and said["agrees"] and list(said["modes"]) == list(serving.SAMPLED_MODES)
    low, high = said["modes"]["block"]["all"]["interval"]
    assert low <= said["measured"] <= high and low < high
    assert {"all", "code", "tests"} <= set(said["modes"]["block"]) and f"{said['measured']:.3f}" in table
    parts = [said["modes"]["block"][name]["num_tokens"] for name in ("code", "tests")]
    assert sum(parts) == said["modes"]["block"]["all"]["num_tokens"]


def test_another_head_than_the_one_that_served_is_told(drawn: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said, error = run(capsys, drawn / "other", drawn / "greedy")
    assert status == 1 and not said["agrees"]
    assert "the head that served is not the one evaluated" in error


def test_what_is_no_file_of_replies_is_named(drawn: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, error = run(capsys, drawn / "model", drawn / "prompts.jsonl")
    assert status == 2 and error.count("\n") == 1
    (drawn / "bad").write_text('{"token_ids": [1]}\n')
    (drawn / "bad.about.json").write_text((drawn / "greedy.about.json").read_text())
    status, _, error = run(capsys, drawn / "model", drawn / "bad")
    assert status == 2 and "bad line 1 is no reply of `train.generate_data replies`" in error
    status, _, error = run(capsys, drawn / "model", drawn / "greedy", "--chunk-rows", 48)
    assert status == 2 and "--chunk-rows 48 must be a power of two" in error
