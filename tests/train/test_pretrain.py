"""The pretraining command, on a tiny model and a made-up corpus: batches, strict settings, a run, its resumption."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp import weights
from train import pretrain
from train.checkpoint import Checkpoints
from train.data import PADDING, Batch, Corpus, HeldOut
from train.evaluate import Tally
from train.loop import TIMINGS
from train.losses import RowScores, mean_valid, score_rows
from train.step import OptimizerSettings, Params, init_state

VOCAB, END = 64, 63
TINY = "configs/train/tiny.toml"
STEPS = 8


def write_split(path: Path, seed: int, count: int) -> list[np.ndarray]:
    """Documents that count upwards from a random start: easy to learn."""
    random = np.random.default_rng(seed)
    documents = []
    for _ in range(count):
        length = int(random.integers(1, 90))
        text = (random.integers(END) + np.arange(length)) % END
        documents.append(np.append(text, END).astype(np.uint16))
    np.concatenate(documents).tofile(path)
    return documents


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("corpus")
    write_split(directory / "train.bin", 0, 200)
    documents = write_split(directory / "val.bin", 1, 12)
    ends = np.cumsum([len(ids) for ids in documents])
    index = [
        {"start": int(end) - len(ids), "bytes": 3 * len(ids), "domain": ("code", "prose")[i % 2]}
        for i, (ids, end) in enumerate(zip(documents, ends, strict=True))
    ]
    (directory / "meta.json").write_text(json.dumps({"vocab_size": VOCAB, "val_documents": index}))
    (directory / "tokenizer.json").write_text("{}")
    return directory


def command(corpus: Path, out: Path, *more: str) -> list[str]:
    settings = [f"corpus={corpus}", f"tokenizer={corpus}", f"steps={STEPS}", "save_minutes=0", "log_every=1"]
    settings += ["batch.rows=2", "batch.length=32", "loss.chunk_rows=32", "eval_batches=0"]
    settings += ["optimizer.warmup_steps=2", "optimizer.learning_rate=0.01"]
    return [TINY, *settings, "--out", str(out), *more]


def metrics(out: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMINGS} for line in lines]


def final_params(corpus: Path, out: Path) -> Params:
    config = pretrain.load_toml(pretrain.PretrainConfig, TINY, command(corpus, out)[1:-2])
    model = pretrain.model_config("tiny", VOCAB)
    checkpoints = Checkpoints(out / "checkpoints")
    state, _ = checkpoints.restore(init_state(model, config.step_settings, config.seed))
    checkpoints.close()
    assert int(state.step) == STEPS
    return state.params


@pytest.fixture(scope="module")
def finished(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "whole"
    assert pretrain.main(command(corpus, out, "--export", str(out / "export"))) == 0
    return out


# Data


def test_batches_depend_on_seed_and_step_alone(corpus: Path) -> None:
    first, second = (Corpus.open(corpus / "train.bin") for _ in range(2))
    second.batch(0, 41, 3, 32)
    for step in (0, 7, 300):
        a, b = first.batch(0, step, 3, 32), second.batch(0, step, 3, 32)
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.documents, b.documents)
        assert (a.tokens != first.batch(1, step, 3, 32).tokens).any()
        assert (a.tokens != first.batch(0, step + 1, 3, 32).tokens).any()


def test_an_epoch_reads_each_window_once_and_marks_its_documents(corpus: Path) -> None:
    train = Corpus.open(corpus / "train.bin")
    windows = (len(train.tokens) - 32) // 32
    batch = train.batch(0, 0, windows, 32)
    pieces = [
        tuple(row[documents == number])
        for row, documents in zip(np.asarray(batch.tokens), np.asarray(batch.documents), strict=True)
        for number in np.unique(documents)
    ]
    # a document counts upwards, so a piece that mixed two of them would not
    for piece in pieces:
        text = np.array([token for token in piece if token != END])
        assert ((text[1:] - text[:-1]) % END == 1).all()
        assert END not in piece[:-1]
    # all but the ends of the epoch that no window reaches
    counts = np.bincount(np.asarray(batch.tokens).reshape(-1), minlength=VOCAB)
    whole = np.bincount(train.tokens, minlength=VOCAB)
    assert (counts <= whole).all() and whole.sum() - counts.sum() < 3 * 32


def test_held_out_text_is_predicted_once(corpus: Path) -> None:
    held_out = HeldOut.open(corpus)
    predicted = np.zeros(len(held_out.domains), int)
    for batch in held_out.batches(2, 32):
        assert batch.tokens.shape == batch.documents.shape == (2, 32)
        documents = np.asarray(batch.documents)
        same = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] != PADDING)
        np.add.at(predicted, documents[:, 1:][same] // 2, 1)
    np.testing.assert_array_equal(predicted, np.diff(held_out.corpus.starts) - 1)


# Losses and figures


def test_scores_in_chunks_equal_dense_ones() -> None:
    """Values and gradients against the definition written out, and no more rows than asked for at a time."""
    keys = jax.random.split(jax.random.key(0), 3)
    table = jax.random.normal(keys[0], (11, 5))
    trunk = jax.random.normal(keys[1], (2, 6, 5))
    drafts = jax.random.normal(keys[2], (2, 6, 3, 5))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 11, (2, 6)), jnp.int32)
    unembed = lambda x: jnp.matmul(x, table.T, precision="highest")  # noqa: E731

    def dense(drafts: jax.Array) -> RowScores:
        p = jax.nn.softmax(unembed(trunk))[:, :, None]
        q = jax.nn.softmax(unembed(drafts))
        here = jax.nn.one_hot(jnp.roll(tokens, -1, axis=1), 11)
        return RowScores(
            -jnp.log(jnp.sum(p[:, :, 0] * here, -1)),
            -jnp.log(jnp.sum(q * here[:, :, None], -1)),
            jnp.sum(p * jnp.log(p / q), -1),
            1.0 - 0.5 * jnp.sum(jnp.abs(p - q), -1),
            jnp.argmax(p, -1) == jnp.argmax(q, -1),
        )

    chunked = score_rows(trunk, drafts, tokens, unembed, unembed, chunk_rows=4)
    for ours, expected in zip(jax.tree.leaves(chunked), jax.tree.leaves(dense(drafts)), strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-5)
    total = lambda score: lambda drafts: jnp.sum(score(drafts).kl)  # noqa: E731
    ours = jax.grad(total(lambda d: score_rows(trunk, d, tokens, unembed, unembed, 4)))(drafts)
    np.testing.assert_allclose(ours, jax.grad(total(dense))(drafts), atol=1e-5)
    with pytest.raises(ValueError, match="chunk_rows=5 must divide the batch's 12 tokens"):
        score_rows(trunk, drafts, tokens, unembed, unembed, chunk_rows=5)


def test_a_batch_without_a_valid_row_has_loss_zero() -> None:
    x = jnp.full((1, 3, 2), jnp.nan).at[0, 1].set(4.0)
    valid = jnp.zeros((1, 3, 2), bool).at[0, 1, 0].set(True)
    np.testing.assert_array_equal(mean_valid(x, valid), [4.0, 0.0])


def test_acceptance_is_a_chain(corpus: Path) -> None:
    """One document of five tokens, two depths: anchors 0 and 1 have whole chains within it, anchor 2 has not."""
    held_out = HeldOut.open(corpus)
    documents = jnp.array([[0, 0, 0, 0, 0, PADDING]], jnp.int32)
    # depth d of anchor t is scored at row t + d
    valid = np.zeros((1, 6, 3), bool)
    valid[0, :4, 0] = valid[0, 1:4, 1] = valid[0, 2:4, 2] = True
    agree = np.zeros((1, 6, 2), bool)
    agree[0, 1, 0] = agree[0, 2, 1] = agree[0, 3, 1] = True
    overlap = np.zeros((1, 6, 2), np.float32)
    overlap[0, 1:3, 0], overlap[0, 2:4, 1] = (0.5, 0.75), (0.25, 1.0)
    # the text's tokens cost the trunk 1 nat; depth 1 gives the one after anchor 0's chain half as much as the trunk
    draft_nll = np.ones((1, 6, 2), np.float32)
    draft_nll[0, 1, 0] += np.log(2.0)
    arrays = (np.ones((1, 6), np.float32), draft_nll, np.zeros_like(draft_nll), overlap, agree)
    scores = RowScores(*map(jnp.asarray, arrays))
    tally = Tally(held_out, 2)
    tally.add(Batch(jnp.zeros_like(documents), documents), scores, jnp.asarray(valid))
    report = tally.report()["code"]
    assert report["num_anchors"] == 2
    greedy, sampled = (report["acceptance"][f"temperature_{t}"] for t in (0, 1))
    # anchor 0: both agree; anchor 1: the first does not, so the second is not counted
    assert greedy["unconditional"] == [0.5, 0.5] and greedy["conditional"] == [0.5, 1.0]
    assert sampled["unconditional"] == pytest.approx([(0.5 + 0.75) / 2, (0.5 * 0.25 + 1.0 * 1.0) / 2])
    assert greedy["length"] == 2.0
    each = held_out.num_bytes[0] / (held_out.corpus.starts[1] - 1)
    assert report["bits_per_byte"] == pytest.approx(1.0 / np.log(2) / each)


# Settings


def test_learning_rate_warms_up_and_ends_low() -> None:
    settings = OptimizerSettings(learning_rate=1.0, final_fraction=0.1, warmup_steps=4, weight_decay=0.0)
    rates = [settings.rate(step, 20) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)


def test_wrong_settings_are_one_line(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, message in (
        ("optimizer.learnin_rate=1", "unknown key 'optimizer.learnin_rate', did you mean 'learning_rate'?"),
        ("loss.chunk_rows=7", "loss.chunk_rows=7 must divide batch.rows * batch.length = 64"),
        ("batch.length=8192", "batch.length=8192 exceeds the model's 4096"),
        ("compute.dtype='int8'", "compute.dtype='int8'"),
        ("corpus='nowhere'", "nowhere/meta.json does not exist"),
    ):
        args = command(corpus, tmp_path / "out")
        assert pretrain.main([*args[:-2], wrong, *args[-2:]]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["demo", "tiny"])
def test_configs_print(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = f"configs/train/{name}.toml"
    assert pretrain.main([path, "batch.rows=5", "--print-config"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["name"] == name and printed["batch"]["rows"] == 5


def test_demo_has_11_3_m_parameters_and_fits() -> None:
    model = pretrain.model_config("demo", 8192)
    shapes = jax.eval_shape(lambda: Params.init(model, 0))
    count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert count == 11_304_740
    # bf16, and room for the tokenizer, in the 24 MB that it may take
    assert 2 * count < 23e6


# A run


def test_run_learns_and_reports(finished: Path) -> None:
    lines = metrics(finished)
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert steps[-1]["trunk_nll"] < 0.9 * steps[0]["trunk_nll"]
    assert np.all(np.array(steps[-1]["draft_nll"]) < np.array(steps[0]["draft_nll"]))
    report = lines[-1]["held_out"]
    assert set(report) == {"code", "prose", "all"}
    assert report["all"]["bytes"] == report["code"]["bytes"] + report["prose"]["bytes"]


def test_export_is_the_trained_model_and_loads(corpus: Path, finished: Path) -> None:
    loaded = weights.load(finished / "export")
    expected = final_params(corpus, finished).cast(jnp.dtype("bfloat16"))
    assert loaded.config == pretrain.model_config("tiny", VOCAB)
    ours, theirs = jax.tree.leaves(Params(loaded.model, loaded.head)), jax.tree.leaves(expected)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    assert (finished / "export" / "tokenizer.json").is_file()


def test_resumed_run_equals_an_uninterrupted_one(
    corpus: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "cut"
    real, calls = pretrain.train_step, iter(range(100))

    def interrupted(*args: Any) -> Any:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(pretrain, "train_step", interrupted)
    assert pretrain.main(command(corpus, out)) == 130
    monkeypatch.setattr(pretrain, "train_step", real)
    assert len(metrics(out)) == 3
    assert pretrain.main(command(corpus, out)) == 2
    assert pretrain.main([*command(corpus, out, "--resume"), "seed=1"]) == 2
    assert pretrain.main(command(corpus, out, "--resume")) == 0
    assert metrics(out) == metrics(finished)
    jax.tree.map(np.testing.assert_array_equal, final_params(corpus, out), final_params(corpus, finished))
