"""What broke for others when many requests met speculation, provoked here one kind after the other.

The engines are those of `tests.infer.engines`: two layers, float32, three lanes, eight pages. Numbers are those of the
reports that the kinds come from.
"""

import gc
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer import engine as engine_module
from infer import programs
from infer.engine import Engine
from infer.params import SamplingParams, TokenAutomaton
from infer.replies import Reply
from infer.speculative import decode_turn
from mtp import attention
from mtp import cache as kv
from tests.infer.engines import CONFIG, POISON, answer, assert_as_new, engine, hopeful, loaded, prompt

coupled = partial(engine, verify="coupled")


def ask(max_tokens: int = 16, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_tokens": max_tokens, "ignore_eos": True, **fields})


def log_probs(reply: Reply) -> list[float]:
    assert reply.log_probs is not None
    return [one.log_prob for one in reply.log_probs]


def live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def test_fault_5_a_preempted_lane_resumes_from_its_own_state() -> None:
    """vllm-metal #488: it resumed from the state of whoever had been there."""
    one = coupled()
    stream = one.submit(prompt(1, 20), ask(40))
    for _ in range(3):
        one.step()
    job = next(iter(one.scheduler.live))
    one._park(job)
    # somebody else uses its lane and its pages meanwhile
    other = one.submit(prompt(2, 30), ask(30, seed=9))
    reply = stream.result.reply
    assert reply.num_preemptions == 1
    assert reply.token_ids == answer(coupled(), [prompt(1, 20)], ask(40))[0].token_ids
    assert other.result.reply.token_ids == answer(coupled(), [prompt(2, 30)], ask(30, seed=9))[0].token_ids


def test_fault_7_an_offload_path_that_is_not_used_changes_nothing() -> None:
    """vllm #53505: a connector without a single hit corrupted replies."""
    prompts = [prompt(n, 24 + n) for n in range(3)]
    with_it, without = coupled(), coupled(snapshot_memory=0)
    ours, theirs = answer(with_it, prompts, ask()), answer(without, prompts, ask())
    assert with_it.stats.prefix_entries > 0 == with_it.stats.prefix_hits == with_it.stats.num_preemptions
    assert without.stats.prefix_entries == 0
    assert [r.token_ids for r in ours] == [r.token_ids for r in theirs]


@pytest.mark.parametrize("k", [0, 3])
def test_fault_13_prefix_cache_and_drafts_together_equal_each_alone(k: int) -> None:
    """vllm #43559: right with either, a fifth of the answers lost with both."""
    shared = prompt(7, 20)
    prompts = [[*shared, 100 + n, *prompt(n, 6)] for n in range(3)]
    params = ask(12, logprobs=0, temperature=0.0)
    plain, drafting = (SamplingParams(**{**vars(params), "num_draft_tokens": n}) for n in (0, k))
    neither = answer(coupled(snapshot_memory=0), prompts, plain)
    cold = answer(coupled(snapshot_memory=0), prompts, drafting)
    hot = coupled()
    warm = answer(hot, prompts, drafting)
    # the prefix was read once, though the continuations part at the very next token
    assert [r.cached_tokens for r in warm] == [0, 20, 20] and hot.stats.prefix_hits == 2
    for replies in (warm, cold):
        for one, other in zip(replies, neither, strict=True):
            assert one.token_ids == other.token_ids
            np.testing.assert_allclose(log_probs(one), log_probs(other), atol=1e-5)


def test_fault_18_and_19_without_drafts_a_step_is_plain_decoding_and_the_heads_key_value_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vllm #47277: the cost stayed with zero drafts; sglang #39515: another attention was chosen in silence."""
    attended: list[int] = []
    honest = attention.paged_attention

    def noted(queries: jax.Array, *args: Any) -> jax.Array:
        attended.append(queries.shape[1])
        return honest(queries, *args)

    monkeypatch.setattr(attention, "paged_attention", noted)

    def lower(one: Engine, k: int, primed: bool = True) -> tuple[float, list[int]]:
        attended.clear()
        call = decode_turn.lower(
            one.loaded.model,
            one.head if primed else None,
            one.gen,
            one.request,
            one._current_table(),
            np.int32(1),
            num_draft_tokens=k,
            law="rejection",
            # of no other test, so that it is traced here
            max_steps=2,
        )
        return call.cost_analysis()["flops"], list(attended)

    plain, calls = lower(coupled(num_draft_tokens=0), 0)
    # the same lanes and windows without the head: what is left is what the head costs
    unprimed, _ = lower(coupled(), 0, primed=False)
    primed, same_calls = lower(coupled(), 0)
    drafting, more_calls = lower(coupled(), 3)
    width, head = CONFIG.hidden_size, 2 * CONFIG.num_key_value_heads * CONFIG.head_dim
    # fc and the key and value projections of the head's layer, on three lanes of up to four rows
    write = 2 * 3 * 4 * (2 * width * width + width * head)
    assert 0.5 * write < primed - unprimed < 1.5 * write
    assert plain <= unprimed and primed < plain + 1.5 * write < drafting
    # the one attention there is, by rows: the trunk's layer alone without drafts
    assert calls == same_calls == [1] and more_calls == [4, 1, 1, 4]


def test_fault_18_an_engine_that_could_draft_runs_the_plain_program_when_nobody_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[int] = []
    turn = Engine._turn

    def noted(self: Engine, k: int, *args: Any) -> Any:
        ran.append(k)
        return turn(self, k, *args)

    monkeypatch.setattr(Engine, "_turn", noted)
    reply = answer(coupled(), [prompt(1, 9)], ask(12, num_draft_tokens=0))[0]
    assert set(ran) == {0} and not any(reply.drafted)


@pytest.mark.parametrize("k", range(8))
def test_fault_20_every_k_at_tiny_pools_works_or_is_refused_with_numbers(k: int) -> None:
    """vllm #57721: a bare assertion in the planning of pages."""
    page_bytes = engine().page_bytes
    for memory in (0, page_bytes - 1, page_bytes):
        try:
            one = engine(num_draft_tokens=k, num_pages=None, kv_memory=memory)
        except ValueError as error:
            assert "bytes hold no page: one of 16 tokens takes" in str(error)
            continue
        pages = one.stats.num_pages
        with pytest.raises(ValueError, match=rf"need {pages + 1} pages of 16 tokens and the pool has {pages}"):
            one.submit([1] * 10, ask(16 * pages - 9))
        # on a pool that the request fills to its last token
        if k == 3:
            reply = answer(one, [prompt(3, 10)], ask(16 * pages - 10, temperature=0.0))[0]
            assert reply.token_ids == answer(engine(), [prompt(3, 10)], ask(6, temperature=0.0))[0].token_ids
        one.close()


def test_fault_21_lanes_cost_what_the_formula_says() -> None:
    """sglang #23643: 12 GB of scratch for lanes that never speculate."""
    c = CONFIG
    taken, pages = [], []
    for k in (0, 3):
        before = live_bytes()
        one = engine(num_draft_tokens=k)
        taken.append(live_bytes() - before)
        pages.append(one.page_bytes)
        assert taken[-1] == sum(leaf.nbytes for leaf in jax.tree.leaves((one.gen, one.request)))
        rows = k + 1
        state = c.linear_num_value_heads * c.linear_value_head_dim * c.linear_key_head_dim * 4
        conv = (c.linear_conv_kernel_dim - 1) * c.conv_channels * 4
        pending = rows * (c.conv_channels + 2 * c.linear_num_value_heads) * 4
        newest = rows * (c.hidden_size + 1) * 4
        table = (6 + 3) * 4
        assert one.state_bytes == 8 * one.page_bytes + 3 * (state + conv + pending + newest + table)
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(one.gen.cache))
        assert held == one.state_bytes
        one.close()
    # three more rows a lane: what is pending and newest, what a step emits with its 20 best, and counts by position
    row = c.conv_channels + 2 * c.linear_num_value_heads + c.hidden_size + 1 + 2 + 2 * 20 + 2
    assert taken[1] - taken[0] == 8 * (pages[1] - pages[0]) + 3 * 3 * row * 4


def test_fault_22_300_random_events_on_the_model_leave_pool_and_lanes_as_they_began() -> None:
    """vllm #12432 and others: slots lost, or falsely reported lost, when requests came and went at odd moments."""
    rng = np.random.default_rng(5)
    one = hopeful(verify="coupled", poison=True)
    alone = coupled(poison=True)
    streams: list[tuple[Any, list[int], SamplingParams]] = []
    reasons = {"length": 0, "abort": 0, "error": 0}
    parked = 0
    for number in range(300):
        event = rng.integers(0, 7)
        if event <= 1 and len(one.scheduler.waiting) < 6:
            tokens = prompt(int(rng.integers(4)), int(rng.integers(1, 50)))
            if rng.random() < 0.2:
                tokens[int(rng.integers(len(tokens)))] = POISON
            params = ask(int(rng.integers(1, 40)), seed=number, temperature=float(rng.integers(0, 2)))
            streams.append((one.submit(tokens, params), tokens, params))
        elif event == 2 and streams:
            # the newest may wait, be read, or answer
            one.abort(streams[-1 - int(rng.integers(min(4, len(streams))))][0].id)
        elif event == 3 and one.scheduler.live:
            # whether the pool would have run dry just here is the scheduler's affair
            one._park(one.scheduler.live[-1])
            parked += 1
        else:
            one.step()
    one.drain()
    for place, (stream, tokens, params) in enumerate(streams):
        reply = stream.result.reply
        reasons[reply.finish_reason] += 1
        assert reply.error is None or POISON in [*tokens, *reply.token_ids]
        if place % 8 == 0:
            expected = answer(alone, [tokens], params)[0]
            assert reply.token_ids == expected.token_ids[: len(reply.token_ids)]
            assert reply.finish_reason in ("abort", expected.finish_reason)
    assert min(reasons.values()) > 3 and one.stats.num_preemptions >= parked > 10
    assert_as_new(one)
    assert sorted(one.scheduler.pool._free) == list(range(8)) and not one.scheduler.pool._holders


def test_fault_23_memory_is_flat_over_500_requests() -> None:
    """llama.cpp #23635: memory grew with every prefill."""
    # so few that the budget, not the eight pages, decides how many are kept
    one = coupled(snapshot_memory=2 * engine().snapshot_bytes)
    sizes = []
    for batch in range(10):
        answer(one, [prompt(50 * batch + n, 1 + n % 40) for n in range(50)], ask(2 + batch % 3))
        sizes.append(live_bytes())
    assert len(one.scheduler.prefixes) == 2
    assert max(sizes[1:]) == min(sizes[1:])
    assert_as_new(one)


def test_fault_24_acceptance_can_be_told_by_context_length() -> None:
    """vllm #47602: it fell with the context, and no figure showed it."""
    # behind the first token below 40 only one may follow, which the head knows as well: from there every draft stands
    table = np.zeros((2, CONFIG.vocab_size), np.int32)
    table[0, :40] = 1
    table[1] = -1
    table[1, 7] = 1
    reply = answer(engine(), [prompt(3, 30)], ask(60, allowed=TokenAutomaton(table)))[0]
    turning = next(n for n, token in enumerate(reply.token_ids) if token < 40)
    # number of the first reply token of each step
    starts = np.cumsum([1, *reply.steps])
    assert starts[-1] == len(reply.token_ids) == 60
    early = [step for step, start in zip(reply.steps, starts, strict=False) if start + step <= turning]
    late = [step for step, start in zip(reply.steps, starts, strict=False) if turning < start and start + 4 <= 60]
    assert len(early) > 2 and len(late) > 4
    assert np.mean(early) < 3 and set(late) == {4}


def test_fault_40_a_seed_means_the_same_alone_in_company_and_after_preemption() -> None:
    """vllm #6038 and others: seeds ignored, constant, or mixed with the neighbours'."""
    alone = answer(engine(), [prompt(4, 20)], ask(40, seed=11))[0]
    others = [prompt(60 + n, 20) for n in range(3)]
    one = hopeful()
    crowd = answer(one, [*others, prompt(4, 20)], [*(ask(60, seed=n) for n in range(3)), ask(40, seed=11)])
    assert one.stats.num_preemptions > 0
    assert crowd[-1].token_ids == alone.token_ids
    assert answer(engine(), [prompt(4, 20)], ask(40, seed=12))[0].token_ids != alone.token_ids


def test_fault_50_a_host_that_is_late_at_odd_moments_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm #50021: with asynchronous scheduling a buffer was overwritten while the device still read it."""
    prompts = [prompt(n, 10 + 9 * n) for n in range(5)]
    params = [ask(24, seed=n) for n in range(5)]
    calm = answer(engine(), prompts, params)
    rng = np.random.default_rng(0)
    for name in ("_current_table", "_row", "_send", "_look", "_read_chunk"):
        honest = getattr(Engine, name)

        def late(self: Engine, *args: Any, honest: Any = honest, **options: Any) -> Any:
            time.sleep(float(rng.choice([0.0, 0.0, 0.01])))
            found = honest(self, *args, **options)
            time.sleep(float(rng.choice([0.0, 0.0, 0.01])))
            return found

        monkeypatch.setattr(Engine, name, late)
    assert [r.token_ids for r in answer(engine(), prompts, params)] == [r.token_ids for r in calm]


def test_fault_50_what_the_device_was_given_is_never_written_to_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other half: a host array may be read long after the call that got it."""
    given: list[tuple[np.ndarray, bytes]] = []

    def watch(place: Any, name: str) -> None:
        honest = getattr(place, name)

        def noted(*args: Any, **options: Any) -> Any:
            arrays = (leaf for leaf in jax.tree.leaves((args, options)) if isinstance(leaf, np.ndarray))
            given.extend((array, array.tobytes()) for array in arrays)
            return honest(*args, **options)

        monkeypatch.setattr(place, name, noted)

    watched = [(engine_module, "decode_turn"), (jnp, "asarray")]
    watched += [(programs, name) for name in ("admit_lane", "end_lanes", "read_prompts", "start_lanes", "fetch_pages")]
    watched += [(programs, "fill_pages")]
    for place, name in watched:
        watch(place, name)
    one = engine()
    streams = [one.submit(prompt(n, 10 + 9 * n), ask(24, seed=n)) for n in range(5)]
    for _ in range(4):
        one.step()
    one._park(one.scheduler.live[-1])
    assert all(len(stream.result.reply.token_ids) == 24 for stream in streams)
    shapes = {array.shape for array, _ in given}
    # the page table, rows of prompts, what lanes want to draft, blocks of pages
    assert {(3, 6), (2, 32), (3,), (engine_module.PAGE_BLOCK,)} <= shapes
    assert all(array.tobytes() == then for array, then in given)


def test_fault_52_the_same_greedy_text_has_the_same_steps_every_time() -> None:
    """vllm #53436: the same text at T = 0, with large differences in speed."""
    one = engine()
    replies = [answer(one, [prompt(8, 12)], ask(24, temperature=0.0))[0] for _ in range(20)]
    assert len({(r.token_ids, r.steps, r.accepted) for r in replies}) == 1


def test_a_nan_fails_its_request_by_name_and_never_reaches_another() -> None:
    clean = [prompt(n, 20 + n) for n in range(3)]
    expected = answer(coupled(poison=True), clean, ask(20))
    one = coupled(poison=True)
    poisoned = one.submit([*prompt(9, 18), POISON, 5], ask(20))
    # this one runs into it on its own: the bias makes it say the word
    midway = one.submit(prompt(10, 9), ask(20, logit_bias={POISON: 100.0}))
    beside = [one.submit(tokens, ask(20)) for tokens in clean]
    assert [s.result.reply.token_ids for s in beside] == [r.token_ids for r in expected]
    for stream, said in ((poisoned, 0), (midway, 1)):
        reply = stream.result.reply
        assert reply.finish_reason == "error" and len(reply.token_ids) == said
        assert f"request {stream.id}: reply token {said} has no finite logits" in str(reply.error)
    # its lane, its pages and what it left of its prompt serve others now
    one.drain()
    again = answer(one, clean, ask(20))
    assert [r.token_ids for r in again] == [r.token_ids for r in expected]
    follower = one.submit([*prompt(9, 18), 6, 7], ask(20))
    assert (
        follower.result.reply.token_ids == answer(coupled(poison=True), [[*prompt(9, 18), 6, 7]], ask(20))[0].token_ids
    )
    assert not any(POISON in entry.tokens for entry in one.scheduler.prefixes._entries.values())
    assert_as_new(one)


@pytest.mark.parametrize("after", range(6))
def test_an_abort_at_any_point_returns_everything(after: int) -> None:
    one = coupled()
    streams = [one.submit(prompt(n, 60), ask(30)) for n in range(5)]
    for _ in range(after):
        one.step()
    for stream in streams:
        one.abort(stream.id)
        one.abort(stream.id)
    reasons = [s.result.reply.finish_reason for s in streams]
    assert "abort" in reasons and set(reasons) <= {"abort", "length"}
    assert [d.finish_reason for d in streams[-1]][-1] == "abort" == reasons[-1]
    one.drain()
    assert_as_new(one)


def test_the_length_of_a_prefix_hit_does_not_depend_on_k() -> None:
    found = set()
    for k in (0, 1, 3):
        one = coupled()
        answer(one, [prompt(5, 37)], ask(8, num_draft_tokens=k))
        reply = answer(one, [[*prompt(5, 37), 3, 4]], ask(8, num_draft_tokens=k))[0]
        found.add((reply.cached_tokens, reply.token_ids))
    assert len(found) == 1 and next(iter(found))[0] == 37


def test_snapshots_every_so_many_tokens_serve_prompts_that_part_in_between() -> None:
    one = coupled(snapshot_every=16)
    answer(one, [prompt(6, 45)], ask(4))
    reply = answer(one, [[*prompt(6, 39), 1, 2, 3]], ask(16))[0]
    assert reply.cached_tokens == 32
    assert reply.token_ids == answer(coupled(), [[*prompt(6, 39), 1, 2, 3]], ask(16))[0].token_ids
    with pytest.raises(ValueError, match="delta-rule layers"):
        kept = programs.take_snapshot(one.gen.cache, np.int32(0))[0]
        kv.restore(one.gen.cache, 0, jax.tree_util.tree_map(lambda x: x, kv.Snapshot(**{**vars(kept), "delta": ()})))


def test_auto_gives_the_same_text_whatever_k_it_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = answer(coupled(), [prompt(n, 12) for n in range(3)], ask(40, num_draft_tokens=0))
    one = coupled(num_draft_tokens="auto")
    chosen: list[int] = []
    turn = Engine._turn

    def noted(self: Engine, k: int, *args: Any) -> Any:
        chosen.append(k)
        return turn(self, k, *args)

    monkeypatch.setattr(Engine, "_turn", noted)
    # costs a step that no clock of this machine decides
    monkeypatch.setattr(one.policy, "choose", cycle((0, 3, 1, 2)).__next__)
    replies = answer(one, [prompt(n, 12) for n in range(3)], ask(40))
    assert [r.token_ids for r in replies] == [r.token_ids for r in plain]
    assert set(chosen) == {0, 1, 2, 3}


@contextmanager
def running(code: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()


def test_loaded_models_of_these_tests_are_what_they_say() -> None:
    assert bool(jnp.isnan(loaded(True).model.embed_tokens.weight[POISON]).all())
    assert bool(jnp.isfinite(loaded(True).model.lm_head.weight[...]).all())
    assert bool(jnp.isfinite(loaded().model.embed_tokens.weight[...]).all())


def test_a_request_that_can_not_be_placed_ends_by_name_and_frees_its_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the turn brings says so to whoever runs the engine, and to whoever iterates the request."""
    one, place = engine(), Engine._place

    def broken(self: Engine, admission: Any) -> None:
        if len(admission.job.prompt) == 13:
            raise RuntimeError("no room on the device")
        place(self, admission)

    monkeypatch.setattr(Engine, "_place", broken)
    good, bad = one.submit(prompt(1, 9), ask(6)), one.submit(prompt(1, 13), ask(6))
    deltas = list(one)
    (said,) = [delta for delta in deltas if delta.request_id == bad.id]
    assert said.finish_reason == "error" and list(bad) == [said]
    assert bad.result.reply.error == f"request {bad.id} could not be placed: no room on the device"
    assert len(good.result.reply.token_ids) == 6
    assert_as_new(one)
