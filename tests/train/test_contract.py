"""The demo's head wins with the right reading, and a head that was made for another is caught by the name of that."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer

from mtp import weights
from mtp.draft_head import MTPHead
from mtp.layers import Linear, rotary_angles, rotate
from mtp.model import Qwen35
from tests.infer import small_models
from tests.train.test_unroll import PACKED, params, tokens, trained  # noqa: F401 (fixtures)
from train import contract, evaluate
from train.contract import MEANINGS, READINGS, Contract
from train.head_data import Sequences
from train.sequences import Sequence
from train.step import Params
from train.unroll import Packing

PROMPT, LENGTH = 8, 64


@cache
def texts() -> list[list[int]]:
    """Two dozen held-out texts of the demo's domains."""
    tokenizer = Tokenizer.from_file(str(small_models.demo_file("tokenizer.json")))
    lines = Path(contract.__file__).parents[1].joinpath("infer/judge/data/texts.jsonl").read_text().splitlines()
    ids = (tokenizer.encode(json.loads(line)["text"]).ids[:LENGTH] for line in lines)
    return [one for one in ids if len(one) == LENGTH][:24]


@cache
def demo() -> weights.Loaded:
    return weights.load("demo", dtype=jnp.float32)


def probed(head: MTPHead, model: Qwen35) -> Contract:
    """In batches of a row, as the command has them."""
    replies = Sequences(tuple(Sequence.reply(one[:PROMPT], one[PROMPT:]) for one in texts()), LENGTH)
    return contract.probe(head, model, replies.batches(1), chunk_rows=LENGTH)


def with_turned_queries(head: MTPHead, model: Qwen35, back: int) -> MTPHead:
    """Turns the queries back by rotary positions in q_proj; the norm between must not tell the dims of a pair apart."""
    made: MTPHead = jax.tree.map(jnp.copy, head)
    layer, config = made.layers[0].self_attn, model.config
    half, heads = config.rotary_dim // 2, config.num_attention_heads
    norm = layer.q_norm.weight[...]
    both = (norm[:half] + norm[half : 2 * half]) / 2
    layer.q_norm.weight.set_value(jnp.concatenate([both, both, norm[2 * half :]]))
    weight = layer.q_proj.weight[...]
    queries, gates = jnp.split(weight.reshape(heads, 2 * config.head_dim, -1), 2, axis=1)
    angles = rotary_angles(jnp.full((1, 1), -back, jnp.int32), config)
    # each column of the matrix is a query of every head, at one position
    columns = queries.transpose(2, 0, 1)[:, None]
    turned = rotate(columns, jnp.broadcast_to(angles, (len(columns), *angles.shape[1:])))[:, 0].transpose(1, 2, 0)
    layer.q_proj.weight.set_value(jnp.concatenate([turned, gates], axis=1).reshape(weight.shape))
    return made


def with_a_steep_final_norm(head: MTPHead, model: Qwen35) -> tuple[MTPHead, Qwen35]:
    """A target with the demo's laws and a steep final norm, and a head that finds its old rows before that norm."""
    slope = jnp.exp(jax.random.normal(jax.random.key(0), (model.config.hidden_size,)))
    made, steep = jax.tree.map(jnp.copy, (head, model))
    for norm in (made.norm.weight, steep.norm.weight):
        norm.set_value((1 + norm[...]) * slope - 1)
    steep.lm_head = nnx.data(Linear(*model.unembedding.shape, nnx.Rngs(0), jnp.float32))
    steep.lm_head.weight.set_value(model.unembedding / slope[None])
    return made, steep


@pytest.fixture(scope="module")
def replies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("contract") / "replies.jsonl"
    lines = [{"prompt_token_ids": one[:PROMPT], "token_ids": one[PROMPT:], "steps": [1]} for one in texts()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    about = {"dtype": "float32", "draft_tokens": 3, "temperature": 1.0}
    path.with_name(path.name + ".about.json").write_text(json.dumps(about))
    return path


def run(capsys: pytest.CaptureFixture[str], *command: object) -> tuple[int, dict[str, Any], str]:
    status = evaluate.main(["probe-contract", *map(str, command)])
    said = capsys.readouterr()
    return status, json.loads(said.out) if said.out else {}, said.err


def test_the_demo_reads_what_it_was_trained_on(replies: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said, table = run(capsys, "demo", replies, "--chunk-rows", LENGTH)
    found = said["contract"]
    assert status == 0 and said["passed"] and said["winner"] is None
    assert list(found["readings"]) == list(READINGS) and all(name in table for name in READINGS)
    assert found["sequences"] == len(texts()) and found["drafts"] == len(texts()) * (LENGTH - PROMPT)
    right = found["readings"]["right"]["overlap"]
    assert right > 0.5 and right == max(row["overlap"] for row in found["readings"].values())
    verdicts = {name: row["verdict"] for name, row in found["readings"].items()}
    assert verdicts["halves swapped"] == verdicts["the row before"] == "loses"
    status, again, error = run(capsys, "demo", replies, "--chunk-rows", LENGTH, "--json")
    assert status == 0 and again == said and error == ""


def test_a_checkpoint_with_swapped_halves_is_caught(
    replies: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = demo()
    fc = weights.to_tensors(source)["mtp.fc.weight"]
    swapped = contract.swap_halves(source.head)
    np.testing.assert_array_equal(swapped.fc.weight[...], np.roll(fc, fc.shape[1] // 2, axis=1))
    # the head that was given is as it was
    np.testing.assert_array_equal(source.head.fc.weight[...], fc)
    out = weights.export(weights.Loaded(source.config, source.model, swapped), tmp_path / "out", like="demo")
    status, said, error = run(capsys, out, replies, "--chunk-rows", LENGTH, "--json")
    assert status == 1 and not said["passed"] and said["winner"] == "halves swapped"
    assert error.startswith("the head drafts best with this reading: halves swapped (0.") and error.count("\n") == 1
    assert "swap the halves of mtp.fc.weight's columns" in error


@pytest.mark.parametrize(("back", "made_for"), [(1, "queries one ahead"), (-1, "queries one behind")])
def test_the_positions_that_a_head_was_made_for_draft_best(back: int, made_for: str) -> None:
    """The demo's head hardly cares: what it was made for is first, and by so little that no difference is told."""
    head, model = demo().head, demo().model
    found = probed(with_turned_queries(head, model, back), model)
    accepted = found.acceptance
    assert max(accepted, key=lambda name: accepted[name]) == made_for
    # as the right reading of the head before, but for what its norm has lost
    assert accepted[made_for] == pytest.approx(probed(head, model).acceptance["right"], abs=0.005)
    assert found.verdicts[made_for] == "no difference" and found.complaint is None


def test_a_head_that_was_trained_on_rows_before_the_final_norm_is_caught() -> None:
    head, model = demo().head, demo().model
    found = probed(*with_a_steep_final_norm(head, model))
    assert found.winner == "before the final norm"
    assert found.acceptance[found.winner] == pytest.approx(probed(head, model).acceptance["right"], abs=0.01)
    assert found.complaint and "it was trained on hidden rows from before the trunk's final norm" in found.complaint


def test_the_right_reading_is_the_first_draft_of_the_unrolled_head(
    params: Params,  # noqa: F811
    tokens: np.ndarray,  # noqa: F811
) -> None:
    """And positions off by one everywhere are no mistake: float32, 1e-5."""
    hidden, (first, *_) = trained(params, tokens[None], PACKED)
    packing = Packing.of(jnp.asarray(PACKED))
    later = replace(packing, positions=packing.positions + 1)
    draft = jax.jit(contract.draft_once, static_argnames="ahead")
    inside = np.flatnonzero(PACKED[0, :-1] == PACKED[0, 1:])
    for one in (packing, later):
        rows = draft(params.head, params.model, tokens[None], hidden, one)
        np.testing.assert_allclose(np.asarray(rows)[0, inside], np.asarray(first)[0, inside], atol=1e-5)
    rows = draft(params.head, params.model, tokens[None], hidden, packing, ahead=1)
    assert np.abs(np.asarray(rows - first))[0, inside].max() > 1e-3


def sums(leads: list[list[float]]) -> Contract:
    """Sequences of ten drafts, by how many more of them the right reading gets accepted than each wrong one."""
    overlap = 5.0 - np.array([[0.0, *lead] for lead in leads])
    return Contract(np.full(len(leads), 10.0), overlap, overlap)


def test_what_is_clear_depends_on_how_sequences_differ() -> None:
    """The same mean over sequences that agree, and over ones that do not; one sequence decides nothing."""
    agreeing = sums([[1, -1, 0.01, 2, -2]] * 8)
    assert list(agreeing.verdicts.values()) == ["loses", "wins", "loses", "loses", "wins"]
    # of two that win, the one that is accepted more
    assert agreeing.winner == list(MEANINGS)[4]
    assert agreeing.lead["halves swapped"] == pytest.approx((-0.1, 0.0))
    torn = sums([[4, -4, 0.02, 2, 2], [-2, 2, -0.02, 2, 2]] * 4)
    assert list(torn.verdicts.values()) == ["undecided", "undecided", "no difference", "loses", "loses"]
    assert torn.winner is None
    assert torn.complaint == (
        "the right reading does not clearly beat: before the final norm, halves swapped; more replies are needed"
    )
    # the mean's own error of eight values
    values = np.array([4, -2] * 4) / 10
    assert torn.lead["before the final norm"][1] == pytest.approx(values.std(ddof=1) / np.sqrt(8))
    single = sums([[1, 1, 1, 1, -3]])
    assert (
        set(single.verdicts.values()) == {"undecided"}
        and single.figures()["readings"]["halves swapped"]["error"] is None
    )


def test_replies_without_a_draft_are_refused() -> None:
    replies = Sequences((Sequence.reply(range(3), ()),), LENGTH)
    with pytest.raises(ValueError, match="no draft to probe the head with"):
        contract.probe(demo().head, demo().model, replies.batches(1), chunk_rows=LENGTH)
