"""Log-probabilities of given texts: against a float64 reference, through prefill and through speculation."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from infer import score as command
from infer.score import Score, score
from infer.tokenizer import Tokenizer
from mtp.weights import Loaded, from_tensors
from tests import oracle
from tests.goldens import tiny_checkpoints
from tests.infer import small_models

LENGTH = 70
TOLERANCE = 2e-5

Case = tuple[Loaded, list[int], np.ndarray]


def reference(ids: np.ndarray, tensors: Mapping[str, np.ndarray], text_config: dict[str, Any]) -> np.ndarray:
    """Float64 log-probability of each token after the first."""
    logits = oracle.unembed(oracle.trunk(ids, tensors, text_config), tensors)[:-1]
    top = logits.max(axis=-1, keepdims=True)
    log_probs = logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))
    return log_probs[np.arange(len(ids) - 1), ids[1:]]


@pytest.fixture(scope="module")
def case() -> Case:
    """A small model, a text, and what the reference says of it."""
    config = small_models.config()
    tensors = small_models.tensors(config, mixing=1.0)
    ids = np.random.default_rng(1).integers(0, config.vocab_size, LENGTH)
    expected = reference(ids, tensors, config.to_hf()["text_config"])
    return from_tensors(config, tensors, dtype=jnp.float32), ids.tolist(), expected


def test_inference_D47(case: Case) -> None:
    """Scores of a text don't depend on k, nor on the chunks it is read in."""
    loaded, ids, expected = case
    first = score(loaded, ids, num_draft_tokens=0).logprobs
    assert np.abs(np.array(first) - expected).max() < 1e-4
    for chunk in (1, 7, None):
        found = score(loaded, ids, num_draft_tokens=3, chunk=chunk).logprobs
        assert np.abs(np.array(found) - first).max() < TOLERANCE


def test_verify_agrees_with_plain(case: Case) -> None:
    loaded, ids, _ = case
    plain = np.array(score(loaded, ids).logprobs)
    for seed in range(8):
        found = np.array(score(loaded, ids, through="verify", seed=seed).logprobs)
        assert found.shape == plain.shape and np.abs(found - plain).max() < TOLERANCE


def test_inference_D48(case: Case) -> None:
    """Log-probabilities under speculation are real values: none is zero, and they differ."""
    loaded, ids, _ = case
    found = np.array(score(loaded, ids, through="verify").logprobs)
    assert (found < -1e-3).all() and np.isfinite(found).all() and found.std() > 0.1


def test_inference_D49(case: Case) -> None:
    """One value a token, each its own token's: off by one row in either direction would show."""
    loaded, ids, expected = case
    found = np.array(score(loaded, ids, through="verify").logprobs)
    assert len(found) == len(ids) - 1 and np.abs(found - expected).max() < 1e-4
    assert np.abs(found[1:] - expected[:-1]).max() > 0.1 and np.abs(found[:-1] - expected[1:]).max() > 0.1


def test_shortest_texts(case: Case) -> None:
    loaded, ids, expected = case
    for length in (2, 3, 4, 5):
        for through in ("plain", "verify"):
            found = score(loaded, ids[:length], through=through).logprobs
            assert np.abs(np.array(found) - expected[: length - 1]).max() < 1e-4


def test_bits_per_byte() -> None:
    half = Score((math.log(0.5), math.log(0.25)))
    assert half.total == pytest.approx(-3 * math.log(2)) and half.mean == pytest.approx(-1.5 * math.log(2))
    assert half.bits_per_byte(6) == pytest.approx(0.5)


def test_errors_of_the_function(case: Case) -> None:
    loaded, ids, _ = case
    for given, options, message in (
        ([], {}, "0 tokens"),
        ([5], {}, "1 token;"),
        ([5, 10**6], {}, "outside the vocabulary"),
        ([1] * 600, {}, "max_position_embeddings=512"),
        (ids, {"through": "magic"}, "through='magic' must be one of plain, verify"),
        (ids, {"num_draft_tokens": 8}, "num_draft_tokens=8"),
    ):
        with pytest.raises(ValueError, match=message):
            score(loaded, given, **options)


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    try:
        status = command.main([str(item) for item in argv])
    except SystemExit as left:
        assert isinstance(left.code, int)
        status = left.code
    return (status, *capsys.readouterr())


def test_command_without_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_checkpoints.CONFIGS["published_ratios"]
    tensors = tiny_checkpoints.tensors(config)
    directory = tiny_checkpoints.write_checkpoint(tmp_path / "tiny", config, tensors)
    ids = tiny_checkpoints.token_ids(config, LENGTH)
    expected = reference(ids, tensors, config["text_config"])
    for through in ("plain", "verify"):
        argv = ("--model", directory, "--token-ids", ",".join(map(str, ids)), "--through", through)
        status, out, err = run(capsys, *argv, "--dtype", "float32")
        result = json.loads(out)
        assert status == 0 and np.abs(np.array(result["logprobs"]) - expected).max() < 1e-4
        assert result["total"] == pytest.approx(sum(result["logprobs"]))
        assert result["mean"] == pytest.approx(np.mean(result["logprobs"]))
        assert result["bits_per_byte"] is None and "mean" in err
    status, out, err = run(capsys, "--model", directory, "--text", "hello")
    assert status == 2 and "has no tokenizer" in err and out == ""


def test_command_with_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = small_models.write(tmp_path / "small")
    text = "naïve café [bold] — def f(x):\n    return x\n"
    (tmp_path / "text.txt").write_text(text)
    found = []
    for more in (("--text", text), ("--text-file", tmp_path / "text.txt", "--through", "verify", "--json")):
        status, out, err = run(capsys, "--model", directory, *more)
        assert status == 0 and (err == "") == ("--json" in more)
        found.append(json.loads(out.splitlines()[-1]))
    plain, verify = found
    assert len(plain["logprobs"]) == len(plain["token_ids"]) - 1
    assert np.abs(np.array(plain["logprobs"]) - verify["logprobs"]).max() < TOLERANCE
    tokenizer = Tokenizer.from_pretrained(directory, small_models.config())
    first = tokenizer.decode(plain["token_ids"][:1])
    assert first and text.startswith(first)
    # the first token has no score
    assert plain["num_bytes"] == len(text.encode()) - len(first)
    assert plain["bits_per_byte"] == pytest.approx(-plain["total"] / math.log(2) / plain["num_bytes"])
    given = ",".join(map(str, plain["token_ids"]))
    assert json.loads(run(capsys, "--model", directory, "--token-ids", given, "--json")[1]) == plain


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--text", ""], "the text is empty"),
        (["--text", "a"], "1 token;"),
        (["--token-ids", "1,x"], "integers with commas"),
        (["--token-ids", "1,8192"], "outside the vocabulary of 8192"),
        (["--text", "word " * 600], "max_position_embeddings=512"),
        (["--text", "a b", "--draft-tokens", "9"], "num_draft_tokens=9"),
        (["--text", "a b", "--through", "magic"], "magic"),
        (["--text-file", "no_such_file"], "no_such_file"),
        (["--text", "a b", "--model", "no/such/dir"], "no such directory"),
        ([], "--text"),
    ],
)
def test_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], part: str) -> None:
    directory = small_models.write(tmp_path / "small")
    status, out, err = run(capsys, "--model", directory, *argv)
    assert status == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1 and part in err
