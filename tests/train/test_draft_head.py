"""The head's trainer on a small model: packed replies, a step whatever its parts, a run, its resumption, its export."""

import dataclasses
import json
import shutil
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mtp import weights
from mtp.config import ModelConfig
from mtp.draft_head import MTPHead
from mtp.model import Qwen35
from tests.infer import small_models
from train import draft_head
from train.checkpoint import Checkpoints
from train.contract import READINGS, swap_halves
from train.data import PADDING
from train.draft_head import DraftHeadConfig, Run
from train.head_data import HeadBatch, HeadData, open_data
from train.head_step import HeadState, head_step
from train.loop import TIMINGS
from train.metrics import scalars
from train.sequences import DataSettings, Reader

CONFIG = "configs/train/head_demo.toml"
STEPS, LENGTH = 8, 32


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint, and replies of random tokens; the head learns what the trunk makes of them."""
    root = tmp_path_factory.mktemp("head")
    small_models.write(root / "model")
    rng = np.random.default_rng(0)
    with (root / "replies.jsonl").open("w") as file:
        for number in range(60):
            prompt, reply = (rng.integers(0, 8000, rng.integers(2, most)).tolist() for most in (6, 20))
            line = {"id": f"p{number // 2}", "prompt_token_ids": prompt, "token_ids": reply, "sample": number % 2}
            file.write(json.dumps(line) + "\n")
        file.write(json.dumps({"id": "short", "prompt_token_ids": [1, 2], "token_ids": [3]}) + "\n")
        file.write(json.dumps({"id": "long", "prompt_token_ids": [1] * 5, "token_ids": list(range(90))}) + "\n")
    return root


def command(made: Path, out: Path, *more: str) -> list[str]:
    settings = [f"model={made / 'model'}", f"data.path={made / 'replies.jsonl'}", f"steps={STEPS}", "log_every=1"]
    settings += [
        "batch.rows=4",
        "batch.parts=2",
        f"batch.length={LENGTH}",
        "chunk_rows=32",
        "data.held_out_fraction=0.2",
    ]
    settings += ["eval_every=4", "save_minutes=0", "optimizer.warmup_steps=2", "optimizer.learning_rate=0.003"]
    return [CONFIG, *settings, "--out", str(out), *more]


def metrics(out: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMINGS} for line in lines]


@pytest.fixture(scope="module")
def finished(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "out"
    assert draft_head.main(command(made, out, "init=random", "--export", str(out.parent / "export"))) == 0
    return out


# Data


def opened(made: Path, fraction: float = 0.2) -> HeadData:
    settings = DataSettings(made / "replies.jsonl", fraction, learn_thinking=True, learn_end_of_turn=True)
    return open_data(Reader.open(made / "model", small_models.config(), settings, LENGTH))


def test_replies_are_packed_whole_and_split_by_prompt(made: Path) -> None:
    data = opened(made)
    train, held_out, counts = data.train, data.held_out, data.counts
    assert len(train.sequences) + len(held_out.sequences) == counts.done == counts.lines - 1 == 61
    assert counts.refused["nothing learned"] == 1
    lengths = [len(one.tokens) for one in (*train.sequences, *held_out.sequences)]
    assert max(lengths) == LENGTH  # the long one is cut
    # both replies to a prompt are on one side: prompts are told apart by their tokens
    sides = [{one.tokens[: one.learned.argmax()].tobytes() for one in part.sequences} for part in (train, held_out)]
    assert not sides[0] & sides[1] and held_out.sequences
    seen = []
    for batch in held_out.batches(3):
        assert batch.tokens.shape == (1, 3, LENGTH)
        tokens, documents, learned = (np.asarray(x)[0] for x in (batch.tokens, batch.documents, batch.learned))
        for row in range(3):
            for number in sorted(set(documents[row]) - {PADDING}):
                here = documents[row] == number
                seen.append((tokens[row][here].tolist(), int(learned[row][here].sum())))
                # the reply is the sequence's end
                assert not (np.diff(learned[row][here].astype(int)) < 0).any()
    assert seen == [(one.tokens.tolist(), int(one.learned.sum())) for one in held_out.sequences]
    # every reply is learned from its first token to its last, cut where the sequence is
    lines = [json.loads(line) for line in (made / "replies.jsonl").read_text().splitlines()]
    expected = {
        (*line["prompt_token_ids"], *line["token_ids"])[:LENGTH]: len(line["prompt_token_ids"]) for line in lines
    }
    for one in (*train.sequences, *held_out.sequences):
        prompt = expected[tuple(one.tokens.tolist())]
        assert one.learned.tolist() == [place >= prompt for place in range(len(one.tokens))]


def test_a_batch_is_a_function_of_seed_and_step(made: Path) -> None:
    """An epoch shows every sequence once, the next in another order; parts only cut the batch up."""
    replies, again = opened(made).train, opened(made).train
    later = [replies.batch(3, step, 4) for step in (7, 2)]
    np.testing.assert_array_equal(again.batch(3, 2, 4).tokens, later[1].tokens)
    assert not np.array_equal(again.batch(4, 2, 4).tokens, later[1].tokens)
    cut = replies.batch(3, 2, 4, parts=2)
    assert cut.tokens.shape == (2, 2, LENGTH)
    np.testing.assert_array_equal(np.reshape(cut.tokens, (4, LENGTH)), later[1].tokens[0])
    rows = [len(replies._epoch(3, epoch)) for epoch in (0, 1)]
    members = [sorted(sum(replies._epoch(3, epoch), ())) for epoch in (0, 1)]
    assert members[0] == members[1] == list(range(len(replies.sequences)))
    assert replies._epoch(3, 0) != replies._epoch(3, 1)
    # row 0 of the second epoch follows the last of the first
    assert replies._row(3, rows[0]) == replies._epoch(3, 1)[0]
    with pytest.raises(ValueError, match="batch.parts=3 must divide batch.rows=4"):
        replies.batch(3, 0, 4, parts=3)


# A step


def start(made: Path, tmp_path: Path, *more: str) -> Run:
    args = [part for part in command(made, tmp_path / "x", *more)[1:] if "=" in part]
    config = draft_head.load_toml(DraftHeadConfig, Path(CONFIG), args)
    return Run(config, tmp_path / "x", resume=False)


def test_a_step_does_not_depend_on_its_parts_and_devices(made: Path, tmp_path: Path) -> None:
    """One part of four rows, four of one row, and two that two devices share, their valid tokens unequal: the same
    figures and the same step, within float32's rounding."""
    run = start(made, tmp_path, "init=random")
    fresh = lambda: jax.tree.map(jnp.copy, run.state)  # noqa: E731
    whole = run.data.train.batch(0, 0, 4)
    rate = jnp.float32(1e-3)
    states, figures = [], []
    for parts, devices in ((1, 1), (4, 1), (2, 2)):
        settings = dataclasses.replace(run.config.settings, devices=devices)
        cut = jax.tree.map(lambda x, parts=parts: x.reshape(parts, 4 // parts, LENGTH), whole)
        model, state, cut = settings.place(run.loaded.model), settings.place(fresh()), settings.spread(cut)
        state, one = head_step(state, model, cut, rate, settings)
        assert all(len(leaf.sharding.device_set) == devices for leaf in jax.tree.leaves(state))
        states.append(state)
        figures.append(one)
    counts = np.asarray(whole.learned).sum(axis=(0, 2))
    assert len(set(counts.tolist())) > 1
    for name, value in figures[0].items():
        for other in figures[1:]:
            np.testing.assert_allclose(value, other[name], rtol=1e-4, err_msg=name)
    moved = [
        np.abs(np.asarray(a - b)).max()
        for a, b in zip(*map(jax.tree.leaves, (states[0].head, run.state.head)), strict=True)
    ]
    assert max(moved) > 5e-4
    # Adam's first step divides a gradient by its own size: where that is all rounding, so is the step
    size = [np.asarray(x) for x in jax.tree.leaves(states[0].moments[1].mu)]
    for first, second, third, moment in zip(*(jax.tree.leaves(state.head) for state in states), size, strict=True):
        sure = np.abs(moment) > 1e-5
        for other in (second, third):
            np.testing.assert_allclose(np.asarray(first)[sure], np.asarray(other)[sure], rtol=0, atol=2e-5)
    run.close()


def test_a_batch_without_anything_to_learn_changes_nothing(made: Path, tmp_path: Path) -> None:
    run = start(made, tmp_path)
    batch = run.data.train.batch(0, 0, 4, parts=2)
    nothing = HeadBatch(batch.tokens, batch.documents, jnp.zeros_like(batch.learned))
    before = jax.tree.map(np.asarray, run.state)
    after, figures = head_step(run.state, run.loaded.model, nothing, jnp.float32(1.0), run.config.settings)
    assert float(figures["loss"]) == 0 and float(figures["gradient_norm"]) == 0 and int(after.step) == 1
    jax.tree.map(np.testing.assert_array_equal, (after.head, after.moments), (before.head, before.moments))
    run.close()


def test_a_step_among_all_tokens_is_the_exact_step_and_among_few_says_what_it_covers(
    made: Path, tmp_path: Path
) -> None:
    run = start(made, tmp_path)
    batch = run.data.train.batch(0, 0, 4, parts=2)
    figures = {}
    for teacher_ids in (0, 8192, 512):
        settings = dataclasses.replace(run.config.settings, teacher_ids=teacher_ids)
        state = jax.tree.map(jnp.copy, run.state)
        figures[teacher_ids] = head_step(state, run.loaded.model, batch, jnp.float32(1e-3), settings)[1]
    for name, value in figures[0].items():
        np.testing.assert_allclose(value, figures[8192][name], rtol=1e-4, atol=1e-6, err_msg=name)
    assert figures[0]["mass_covered"] == 1.0 and 0.05 < figures[512]["mass_covered"] < 0.9
    run.close()


# A run


def test_run_learns_and_keeps_the_best(finished: Path, made: Path) -> None:
    lines = metrics(finished)
    held_out = {line["step"]: line["held_out"] for line in lines if "held_out" in line}
    assert list(held_out) == [0, 4, STEPS]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, STEPS + 1))
    lengths = {step: figures["expected_length"] for step, figures in held_out.items()}
    assert lengths[STEPS] > lengths[0] + 0.005
    best = max(lengths, key=lambda step: lengths[step])
    kept = Checkpoints(finished / "best")
    assert kept.latest == best
    kept.close()


def test_only_the_head_is_trained_and_exported(finished: Path, made: Path) -> None:
    """The trunk's tensors keep every bit; the head's are those of the best checkpoint, and all of them have moved."""
    before, after = (
        weights.load(made / "model", dtype="float32"),
        weights.load(finished.parent / "export", dtype="float32"),
    )
    jax.tree.map(np.testing.assert_array_equal, after.model, before.model)
    assert before.head is not None and after.head is not None
    kept = Checkpoints(finished / "best")
    config = draft_head.load_toml(DraftHeadConfig, Path(CONFIG), command(made, finished)[1:-2])
    state, _ = kept.restore(HeadState.start(after.head, config.settings))
    kept.close()
    jax.tree.map(np.testing.assert_array_equal, after.head, state.head)
    pairs = zip(jax.tree.leaves(after.head), jax.tree.leaves(before.head), strict=True)
    assert all(not np.array_equal(a, b) for a, b in pairs)
    assert (finished.parent / "export" / "tokenizer.json").is_file()


def test_a_run_is_as_good_as_its_export_to_put_its_head_back(finished: Path, made: Path, tmp_path: Path) -> None:
    """From the run's directory, its `best` and its export: the same files, of which the trunk's have not changed."""
    sources = (finished, finished / "best", finished.parent / "export")
    outs = [tmp_path / str(number) for number in range(len(sources))]
    for source, out in zip(sources, outs, strict=True):
        assert weights.export_head(source, made / "model", out) == [weights.SINGLE]
    first, *others = (weights.load(out, dtype="float32") for out in outs)
    exported = weights.load(sources[-1], dtype="float32")
    for one in (*others, exported):
        jax.tree.map(np.testing.assert_array_equal, (first.model, first.head), (one.model, one.head))
    # the newest checkpoint is that of the last step
    weights.export_head(finished / "checkpoints", made / "model", tmp_path / "newest")
    assert weights.load(tmp_path / "newest").head is not None


def test_a_broken_checkpoint_of_a_run_is_named(finished: Path, made: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(finished / "best", tmp_path / "best")
    for file in broken.rglob("_METADATA"):
        file.write_text("{")
    with pytest.raises(weights.CheckpointError, match="state cannot be read .*; give a directory with mtp"):
        weights.export_head(broken, made / "model", tmp_path / "out")
    assert list(tmp_path.iterdir()) == [broken]


@pytest.fixture
def interrupted(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that was stopped in the middle of its sixth step."""
    real, calls = draft_head.head_step, iter(range(100))

    def stop(*args: Any) -> Any:
        if next(calls) == 5:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(draft_head, "head_step", stop)
    assert draft_head.main(command(made, tmp_path / "cut", "init=random")) == 130
    monkeypatch.setattr(draft_head, "head_step", real)
    return tmp_path / "cut"


def test_resumed_run_equals_an_uninterrupted_one(finished: Path, made: Path, interrupted: Path) -> None:
    """The same lines of metrics and the same bits at the end."""
    assert draft_head.main(command(made, interrupted, "init=random")) == 2
    assert draft_head.main([*command(made, interrupted, "init=random", "--resume"), "seed=1"]) == 2
    assert draft_head.main(command(made, interrupted, "init=random", "--resume")) == 0
    assert metrics(interrupted) == metrics(finished)
    states = []
    for directory in (interrupted, finished):
        checkpoints = Checkpoints(directory / "checkpoints")
        assert checkpoints.latest == STEPS
        config = draft_head.load_toml(DraftHeadConfig, Path(CONFIG), command(made, directory)[1:-2])
        head = weights.load(made / "model", dtype="float32").head
        states.append(checkpoints.restore(HeadState.start(head, config.settings))[0])
        checkpoints.close()
    jax.tree.map(np.testing.assert_array_equal, *states)


def test_a_run_goes_on_with_more_devices(
    finished: Path, made: Path, interrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums over devices round otherwise: figures agree to a part in a thousand."""
    real, devices = draft_head.head_step, []

    def noted(state: HeadState, *args: Any) -> Any:
        devices.append({len(leaf.sharding.device_set) for leaf in jax.tree.leaves((state, args[:2]))})
        return real(state, *args)

    monkeypatch.setattr(draft_head, "head_step", noted)
    assert draft_head.main(command(made, interrupted, "init=random", "--resume", "batch.devices=2")) == 0
    assert devices == [{2}] * 3
    for ours, theirs in zip(metrics(interrupted), metrics(finished), strict=True):
        assert ours["step"] == theirs["step"]
        for one, other in zip(scalars(ours), scalars(theirs), strict=True):
            assert one[0] == other[0] and one[1] == pytest.approx(other[1], rel=1e-3, abs=1e-6), one[0]


def test_a_head_from_the_checkpoint_is_probed_first(made: Path, tmp_path: Path) -> None:
    run = start(made, tmp_path)
    (line,) = metrics(run.out)
    assert line["step"] == 0 and list(line["contract"]["readings"]) == list(READINGS)
    assert line["contract"]["sequences"] > 1
    run.close()


def test_a_head_that_drafts_best_when_it_is_fed_wrongly_is_refused(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = weights.load(made / "model", dtype="float32")
    wrong = dataclasses.replace(source, head=swap_halves(source.head))
    weights.export(wrong, tmp_path / "model", like=made / "model")
    assert draft_head.main([*command(made, tmp_path / "out"), f"model={tmp_path / 'model'}"]) == 2
    error = capsys.readouterr().err
    assert "the head drafts best with this reading: halves swapped" in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_head_of_the_checkpoint_is_probed_trained_and_exported_on_two_devices(made: Path, tmp_path: Path) -> None:
    """With hidden rows kept, and nothing else that a run on one device has not."""
    more = ["batch.devices=2", "steps=1", f"hidden_cache={tmp_path / 'rows'}", "--export", str(tmp_path / "export")]
    assert draft_head.main(command(made, tmp_path / "out", *more)) == 0
    assert "contract" in metrics(tmp_path / "out")[0] and weights.load(tmp_path / "export").head is not None


@pytest.fixture(scope="module")
def cached(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has written the trunk's rows, beside them."""
    out = tmp_path_factory.mktemp("cached") / "out"
    assert draft_head.main(command(made, out, "init=random", f"hidden_cache={out.parent / 'rows'}")) == 0
    return out


def test_a_run_with_kept_hidden_rows_is_the_run_without(cached: Path, finished: Path, made: Path) -> None:
    """Rows that were computed in other batches round otherwise; read from the file again, they are the same bits."""
    rows = cached.parent / "rows"
    assert sorted(file.name for file in rows.iterdir()) == ["about.json", "hidden.bin"]
    for ours, theirs in zip(metrics(cached), metrics(finished), strict=True):
        for one, other in zip(scalars(ours), scalars(theirs), strict=True):
            assert one[0] == other[0] and one[1] == pytest.approx(other[1], rel=1e-3, abs=1e-6), one[0]
    written = (rows / "hidden.bin").stat().st_mtime_ns
    again = cached.parent / "again"
    assert draft_head.main(command(made, again, "init=random", f"hidden_cache={rows}")) == 0
    assert (rows / "hidden.bin").stat().st_mtime_ns == written and metrics(again) == metrics(cached)


def test_hidden_rows_of_something_else_are_refused(
    cached: Path, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = shutil.copytree(cached.parent / "rows", tmp_path / "rows")
    asked = [*command(made, tmp_path / "out", "init=random"), f"hidden_cache={rows}"]
    other = weights.load(made / "model", dtype="float32")
    other.model.norm.weight.set_value(other.model.norm.weight[...] + 1.0)
    weights.export(other, tmp_path / "other", like=made / "model")
    about = json.loads((rows / "about.json").read_text())
    assert draft_head.main([*asked, "batch.length=16", "chunk_rows=16"]) == 2
    assert "has hidden rows of other data: length, shape differ; remove it" in capsys.readouterr().err
    (rows / "about.json").write_text(json.dumps(about | {"model": str(tmp_path / "other")}))
    assert draft_head.main([*asked, f"model={tmp_path / 'other'}"]) == 2
    assert "has hidden rows of another model (" in capsys.readouterr().err
    # what a stopped run has left is written anew, if there is room
    (rows / "about.json").unlink()
    monkeypatch.setattr("shutil.disk_usage", lambda path: types.SimpleNamespace(free=1000))
    assert draft_head.main(asked) == 2
    said = capsys.readouterr().err
    tokens, width = about["shape"]
    assert f"hidden rows of {tokens} tokens: 0.00 GiB in {rows}" in said
    assert f"hidden_cache={rows} needs {4 * tokens * width:,} bytes and 1,000 are free; give another" in said
    assert not (tmp_path / "out").exists()


def test_dry_run_says_what_it_would_do(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert draft_head.main(command(made, tmp_path / "dry", "--dry-run")) == 0
    said = capsys.readouterr()
    size = json.loads(said.out.splitlines()[-1])
    head = weights.load(made / "model", dtype="float32").head
    assert size["trained_parameters"] == sum(leaf.size for leaf in jax.tree.leaves(head))
    assert size["batch"] == [2, 2, LENGTH] and 0 < size["learned_tokens"] < 4 * LENGTH
    assert (size["data"]["lines"], size["data"]["done"]) == (62, 61) and "a conversation" not in said.err
    assert "learned tokens in green" in said.err
    parts = [size[name] for name in ("trunk_gib", "optimizer_gib", "logits_gib")]
    assert size["least_memory_gib"] == pytest.approx(sum(parts))
    # nothing stands in the way of the run itself
    assert not (tmp_path / "dry").exists()


def test_the_operations_of_27b_are_those_of_its_shapes() -> None:
    """In GFLOP: 48.7 of the trunk, 2.5 of the teacher's logits, 22.9 of three depths (15.3 of which their logits)."""
    config = ModelConfig.preset("qwen3.5-27b")
    model, head = jax.eval_shape(lambda: (Qwen35(config, nnx.Rngs(0)), MTPHead(config, nnx.Rngs(0))))
    flops = draft_head.flops_a_token(model, head, num_depths=3, teacher_ids=0)
    assert flops == pytest.approx(48.7e9 + 2.5e9 + 22.9e9, rel=0.02)
    fewer = draft_head.flops_a_token(model, head, num_depths=3, teacher_ids=10_000)
    assert flops - fewer == 3 * 2 * 2 * (config.vocab_size - 10_000) * config.hidden_size


def test_conversations_and_texts_train_too_and_a_resumed_run_needs_the_same(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever would change the data is refused: another file, template, tokenizer or switch."""
    model, out, data = tmp_path / "model", tmp_path / "out", tmp_path / "mixed.jsonl"
    shutil.copytree(made / "model", model)
    turns = [{"role": "user", "content": "Name it."}, {"role": "assistant", "content": "A lighthouse \U0001f600."}]
    mixed = [{"id": number, "messages": turns} for number in range(9)]
    mixed += [{"text": f"The city of {number}."} for number in range(9)]
    mixed.append({"messages": turns[:1]})
    replies = (made / "replies.jsonl").read_text()
    data.write_text(replies + "".join(json.dumps(line) + "\n" for line in mixed))

    def run(*more: str) -> tuple[int, dict[str, Any], str]:
        changed = [f"model={model}", f"data.path={data}", "steps=1", *more]
        status = draft_head.main([*command(made, out), *changed])
        said = capsys.readouterr()
        return status, json.loads(said.out.splitlines()[-1]) if said.out else {}, said.err

    status, size, shown = run("--dry-run", "--out", str(tmp_path / "dry"))
    assert status == 0 and "a conversation, around where the assistant begins" in shown
    assert "A lighthouse \U0001f600.<|im_end|>" in shown and "nothing learned" in shown
    status, said, _ = run()
    assert status == 0 and said["data"] == size["data"]
    assert (said["data"]["lines"], said["data"]["done"]) == (81, 79)
    assert said["data"]["refused"] == {"nothing learned": 2, "everything learned": 0, "cut away": 0}
    assert run("--resume")[0] == 0
    status, _, error = run("--resume", "data.learn_end_of_turn=false")
    assert status == 2 and ": data differ from" in error
    for file, names, change in (
        (data, "data_sha256", lambda text: text + json.dumps({"text": "One more line of it."}) + "\n"),
        (model / "chat_template.jinja", "template_sha256", lambda text: text + "{# #}"),
        (
            model / "tokenizer.json",
            "tokenizer_sha256",
            lambda text: text.replace('"!":0', '"!":1').replace('"\\"":1', '"\\"":0'),
        ),
    ):
        before = file.read_text()
        file.write_text(change(before))
        assert change(before) != before
        status, _, error = run("--resume")
        assert status == 2 and f": {names} differ from" in error
        file.write_text(before)
    assert run("--resume")[0] == 0


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("loss.kind=mse", "loss.kind='mse' must be one of ce, kl, tv, lk, e2e"),
        ("init=zero", "init='zero' must be one of checkpoint, random"),
        ("teacher_ids=63", "teacher_ids=63 must be 0, or from the 64 tokens of a part on a device to the model's 8192"),
        ("chunk_rows=48", "chunk_rows=48 must divide the 64 tokens of a part on a device"),
        ("batch.devices=3", "batch.parts=2 times batch.devices=3 must divide batch.rows=4"),
        ("batch.length=4096", "batch.length=4096 exceeds the model's 512"),
        ("loss.etaa=2", "eta"),
        ("data.path=nowhere.jsonl", "nowhere.jsonl"),
        ("data.learn_thoughts=true", "learn_thinking"),
        ("data.held_out_fraction=1.0", "data.held_out_fraction=1.0 must be inside (0, 1)"),
    ],
)
def test_a_wrong_setting_is_named(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str, message: str
) -> None:
    args = command(made, tmp_path / "out")
    assert draft_head.main([*args[:-2], setting, *args[-2:]]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_config_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert draft_head.main([CONFIG, "loss.eta=2.5", "--print-config"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"]["eta"] == 2.5
