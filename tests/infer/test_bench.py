"""The benchmark's own arithmetic, a run of it on a tiny model, and that a wrong kernel is not timed."""

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console

from infer import bench, floor
from mtp import cache as kv
from mtp.draft_head import fp8_head
from tests.infer import engines


def made(draft: str = "bf16") -> bench.Bench:
    return bench.Bench(engines.loaded(), jnp.dtype("float32"), "rejection", 3.3, 1.0, draft)


@pytest.mark.parametrize("draft", ["auto", "fp8"])
def test_floors_count_every_byte_once(draft: str) -> None:
    c, loaded = engines.CONFIG, engines.loaded()
    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))  # noqa: E731
    lanes, context = 5, 100
    terms = made(draft).floor(lanes, context, 3)["terms_ms"]
    weights = size(loaded.model) - loaded.model.embed_tokens.weight.nbytes
    assert terms["weights"] == pytest.approx(1e3 * weights / floor.READ)
    assert terms["matrices"] == pytest.approx(1e3 * 2 * lanes * 4 * weights / 4 / floor.MATRIX)
    delta = c.layer_types.count("linear_attention")
    state = lanes * delta * c.linear_num_value_heads * c.linear_value_head_dim * c.linear_key_head_dim * 4
    assert terms["state"] == pytest.approx(1e3 * 2 * state / floor.COPY)
    held = 2 * lanes * context * c.num_key_value_heads * c.head_dim * 4
    assert terms["keys and values"] == pytest.approx(1e3 * held * (c.num_hidden_layers - delta) / floor.READ)
    table = loaded.model.unembedding.size * 4
    head = size(loaded.head) + table
    if draft == "fp8":
        matrices = sum(x.size for x in jax.tree.leaves(loaded.head) if x.ndim == 2)
        head = matrices + sum(x.size * 4 for x in jax.tree.leaves(loaded.head) if x.ndim == 1)
        # codes, and a float32 scale for each output channel
        head += sum(x.shape[0] * 4 for x in jax.tree.leaves(loaded.head) if x.ndim == 2)
        head += table // 4 + 4 * c.vocab_size
    assert terms["drafting"] == pytest.approx(1e3 * 3 * (head + held) / floor.READ)
    whole = made(draft).floor(lanes, context, 0)
    assert whole["terms_ms"]["drafting"] == 0 and whole["floor_ms"] < made(draft).floor(lanes, context, 3)["floor_ms"]


def test_memory_terms_are_those_of_real_arrays() -> None:
    """Weights, fp8 head and lanes of the small model, allocated; 40 tokens are three pages of 16."""
    c, loaded = engines.CONFIG, engines.loaded()
    sizes = dict(num_lanes=1, num_pages=3, page_size=16, pages_per_lane=3, dtype=jnp.float32)
    size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))  # noqa: E731
    for k in (0, 3):
        once, lane = floor.memory_terms(c, num_draft_tokens=k, length=40, page_size=16, dtype="float32")
        assert once["weights"] == size(loaded.model)
        cache = kv.init(c, num_draft_tokens=k, with_head=k > 0, **sizes)
        small = ("page_table", "lengths", "num_pending", "recent_hidden", "recent_tokens", "num_recent")
        held = size(cache) - sum(size(getattr(cache, name)) for name in small)
        names = ("keys and values", "keys and values of the head", "committed state", "pending rows")
        assert sum(lane[name] for name in names) == held
        assert lane["logits"] == lane["laws of the target"] == (k + 1) * c.vocab_size * 4
        assert lane["laws of the drafts"] == k * c.vocab_size * 4
    assert once["draft head"] == size(fp8_head(loaded.head, loaded.model))


def test_memory_of_27b_needs_no_device(capsys: pytest.CaptureFixture[str]) -> None:
    """54 GB of weights are counted and not made; three drafts cost at most 8 % of the lanes of 4,096 tokens."""
    assert bench.main(["memory", "--model", "random:qwen3.5-27b"]) == 0
    stock, ours = json.loads(capsys.readouterr().out.splitlines()[-1])["arms"]
    assert stock["lanes"] > ours["lanes"] >= 0.92 * stock["lanes"]
    assert ours["once"]["weights"] == stock["once"]["weights"] == pytest.approx(2 * 26.9e9, rel=0.01)


def test_steps_of_a_tiny_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(engines.CONFIG.to_hf()))
    command = ["step", "--model", f"random:{path}", "--lanes", "2", "--contexts", "16", "--repeats", "1"]
    assert bench.main([*command, "--k", "3", "--acceptance", "2.5"]) == 0
    (step,) = json.loads(capsys.readouterr().out.splitlines()[-1])["steps"]
    assert (step["lanes"], step["context"], step["k"]) == (2, 16, 3)
    # synthetic: 40 steps of two lanes of a mean of 2.5 tokens, standard deviation 1.2
    assert step["tokens_a_step"] == pytest.approx(2.5, abs=4 * 1.2 / np.sqrt(2 * 40))
    assert step["step_ms"] > step["floor_ms"] > 0


def test_prompts_of_a_tiny_model_are_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three lanes of 20 tokens in chunks of 2 x 16: four calls, which read 60 tokens; bounds count no embedding."""
    read: list[int] = []
    honest = bench.programs.read_prompts

    def counted(*arguments: Any) -> Any:
        read.append(int(arguments[-1].sum()))
        return honest(*arguments)

    monkeypatch.setattr(bench.programs, "read_prompts", counted)
    one = bench.measure_prefill(made(), 3, 20, 16, 2, 1)
    assert read == [32, 16, 8, 4] * 2
    layers = sum(x.size for x in jax.tree.leaves(engines.loaded().model.layers))
    assert one["floor_seconds"] == pytest.approx(2 * 60 * layers / floor.MATRIX)
    assert one["tokens_a_second"] == pytest.approx(60 / one["seconds"]) and one["first_seconds"] > one["seconds"]


def test_a_compiled_steps_instructions_are_told_apart_by_scope() -> None:
    """Each verb and each part has some, by the named scopes of the code."""
    one = made()
    gen, request = one.lanes(2, 16, 3, 64)
    program = one.program(gen, request, 3)
    scopes = set(bench.scopes_of(program.compiled.as_text()).values())
    trunk = {f"verify {part}" for part in ("attention_layer", "delta_layer", "mlp", "unembed", "law")}
    assert trunk | {"draft mlp", "draft unembed", "draft law", "accept_and_commit"} <= scopes
    assert "draft delta_layer" not in scopes and program.temporary_bytes > 0


def test_a_step_that_does_not_fit_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> Any:
        raise ValueError("RESOURCE_EXHAUSTED: out of memory\nwhile allocating")

    monkeypatch.setattr(bench, "measure_step", full)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(engines.CONFIG.to_hf()))
    assert bench.main(["step", "--model", f"random:{path}", "--lanes", "7", "--k", "3", "--contexts", "100"]) == 0
    said = capsys.readouterr()
    (step,) = json.loads(said.out.splitlines()[-1])["steps"]
    sizes = dict(num_draft_tokens=3, length=100, page_size=bench.PAGE_SIZE, dtype="float32")
    once, lane = floor.memory_terms(engines.CONFIG, **sizes)
    assert step["needed_bytes"] == sum(once.values()) + 7 * sum(lane.values())
    assert step["error"] == "RESOURCE_EXHAUSTED: out of memory" and "needs 0.00 GiB" in said.err


def test_a_wrong_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(turns: int, implementation: str) -> Any:
        return jnp.ones(3) * (1.1 if implementation == "mosaic" else 1.0)

    case = bench.Case("op", "shape", run, 8, floor.READ, 0.01)
    monkeypatch.setitem(bench.OPS, "gated_delta", lambda lanes: iter([case]))
    args = argparse.Namespace(ops=["gated_delta"], lanes=[1], implementations=["xla", "mosaic"])
    right, wrong = bench.run_kernels(args, rich.console.Console(quiet=True))["kernels"]
    assert right["error"] == 0 and "microseconds" in right
    assert "microseconds" not in wrong and wrong["failure"] == "differs from its definition by 1.0e-01: not timed"


def test_what_can_not_be_measured_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench.main(["kernels", "--ops", "gated_delta,softmax"])
    assert stopped.value.code == 2 and "'softmax' is none of gated_delta, paged_attention" in capsys.readouterr().err


def test_a_trace_without_a_gpu_is_refused(tmp_path: Path) -> None:
    with jax.profiler.trace(str(tmp_path)):
        jax.block_until_ready(jnp.ones(3) + 1)
    with pytest.raises(ValueError, match="shows no GPU at work; a profile needs one, and this is cpu"):
        bench.device_rows(tmp_path, {})
