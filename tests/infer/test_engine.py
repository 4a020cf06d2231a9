"""The engine answers every request as if it were alone: whoever is beside it, wherever it lies, and whatever happens.

All on a two-layer model in float32. The reference of each test is the same request alone in an engine of its own.
"""

import threading
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from infer.engine import Engine
from infer.params import SamplingParams
from infer.replies import Reply
from infer.speculative import decode_turn
from mtp.draft_head import draft_distance, fp8_head
from tests.infer.engines import LAWS, answer, assert_as_new, engine, hopeful, loaded, prompt, requests

PLAIN: dict[str, Any] = {"num_draft_tokens": 0}


@cache
def alone(law: str, k: int = 3) -> tuple[Reply, ...]:
    """Each request in an engine that serves nothing else."""
    replies = []
    for tokens, params in zip(*requests(), strict=True):
        replies += answer(engine(verify=law, num_draft_tokens=k, snapshot_memory=0), [tokens], params)
    return tuple(replies)


def same(replies: list[Reply], expected: tuple[Reply, ...] | list[Reply]) -> None:
    assert [r.token_ids for r in replies] == [r.token_ids for r in expected]


@pytest.mark.parametrize("law", LAWS)
def test_a_full_batch_changes_no_reply(law: str) -> None:
    one = engine(verify=law)
    replies = answer(one, *requests())
    same(replies, alone(law))
    assert {r.finish_reason for r in replies} == {"length"}
    assert sum(sum(r.accepted) for r in replies) > 10
    # counts as well: nothing of a neighbour is in them
    assert [r.steps for r in replies] == [r.steps for r in alone(law)]
    assert [(r.drafted, r.accepted) for r in replies] == [(r.drafted, r.accepted) for r in alone(law)]
    assert_as_new(one)


def test_coupled_and_greedy_replies_are_those_of_plain_decoding() -> None:
    plain = alone("rejection", 0)
    same(list(alone("coupled")), plain)
    greedy = [i for i, p in enumerate(requests()[1]) if p.temperature == 0]
    for law in LAWS:
        same([alone(law)[i] for i in greedy], [plain[i] for i in greedy])
    # and under the other laws they differ, or this test would show nothing
    assert [r.token_ids for r in alone("rejection")] != [r.token_ids for r in plain]


@pytest.mark.parametrize("law", LAWS)
def test_another_lane_changes_no_reply(law: str) -> None:
    one = engine(verify=law)
    prompts, params = requests()
    # two that sit in the lanes before it
    for n in range(2):
        one.submit(prompt(50 + n, 9), SamplingParams(max_tokens=60, temperature=1.0, ignore_eos=True))
    stream = one.submit(prompts[2], params[2])
    while not stream.done:
        one.step()
    assert stream.result.reply.token_ids == alone(law)[2].token_ids


@pytest.mark.parametrize("law", LAWS)
def test_preemption_changes_no_reply(law: str) -> None:
    prompts = [prompt(20 + n, 12 + n) for n in range(4)]
    # 6 pages each when they are done, and the pool has 8
    params = [SamplingParams(temperature=n / 2, seed=n, max_tokens=80, ignore_eos=True) for n in range(4)]
    undisturbed = [answer(engine(verify=law), [p], s)[0] for p, s in zip(prompts, params, strict=True)]
    one = hopeful(verify=law)
    replies = answer(one, prompts, params)
    same(replies, undisturbed)
    assert one.stats.num_preemptions > 0 and sum(r.num_preemptions for r in replies) == one.stats.num_preemptions
    assert [r.steps for r in replies] == [r.steps for r in undisturbed]
    assert_as_new(one)


@pytest.mark.parametrize("law", LAWS)
def test_a_neighbours_abort_changes_no_reply(law: str) -> None:
    prompts, params = requests()
    for after in (1, 3):
        one = engine(verify=law)
        streams = [one.submit(p, s) for p, s in zip(prompts, params, strict=True)]
        for _ in range(after):
            one.step()
        for gone in (0, 2, 5):
            one.abort(streams[gone].id)
        one.drain()
        for n, stream in enumerate(streams):
            reply = stream.result.reply
            if n in (0, 2, 5):
                assert reply.finish_reason == "abort" or reply.token_ids == alone(law)[n].token_ids
                assert reply.token_ids == alone(law)[n].token_ids[: len(reply.token_ids)]
            else:
                assert reply.token_ids == alone(law)[n].token_ids
        assert_as_new(one)


@pytest.mark.parametrize("law", LAWS)
def test_a_cached_prefix_changes_no_reply(law: str) -> None:
    one = engine(verify=law)
    for tokens, params, expected in zip(*requests(), alone(law), strict=True):
        cold, warm = (answer(one, [tokens], params)[0] for _ in range(2))
        same([cold, warm], [expected, expected])
        assert (cold.cached_tokens, warm.cached_tokens) == (0, len(tokens))
    assert_as_new(one)


def test_another_chunk_size_changes_no_reply() -> None:
    same(answer(engine(verify="coupled", chunk_lengths=(5,)), *requests()), alone("coupled"))


def test_exact_runs_plain_decoding_in_the_window_program_and_gives_the_same_text() -> None:
    one = engine(verify="coupled", exact=True)
    prompts, params = requests()
    plain = [SamplingParams(**{**vars(p), "num_draft_tokens": 0}) for p in params]
    ours, theirs = answer(one, prompts, params), answer(one, prompts, plain)
    same(ours, theirs)
    assert all(not any(r.drafted) for r in theirs) and any(any(r.accepted) for r in ours)


def test_nothing_compiles_after_warm_up() -> None:
    one = hopeful()
    one.warm_up()
    answer(one, *requests())
    answer(one, [prompt(0, 5)] * 3, SamplingParams(max_tokens=80, ignore_eos=True, temperature=1.0, n=2))
    assert one.stats.num_preemptions > 0 and one.stats.prefix_hits > 0
    assert one.stats.compilations == 0 and one.stats.warm


def test_streaming_hands_out_every_token_once_in_pieces_of_one_to_several() -> None:
    """FAULTS 53: a reader of the stream must not count on one token at a time."""
    one = engine()
    prompts, params = requests()
    streams = [one.submit(p, s) for p, s in zip(prompts, params, strict=True)]
    for stream, expected in zip(streams, alone("rejection"), strict=True):
        deltas = list(stream)
        assert [t for d in deltas for t in d.token_ids] == list(expected.token_ids)
        assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + ["length"]
        assert {d.request_id for d in deltas} == {stream.id}
    assert max(len(d.token_ids) for d in deltas) > 1
    everything = engine()
    ids = [everything.submit(p, s).id for p, s in zip(prompts, params, strict=True)]
    got: dict[int, list[int]] = {i: [] for i in ids}
    for delta in everything:
        got[delta.request_id] += delta.token_ids
    assert list(got.values()) == [list(r.token_ids) for r in alone("rejection")]


def test_n_replies_share_their_prompt_and_differ() -> None:
    one = engine()
    result = one.generate([prompt(1, 40)], SamplingParams(temperature=1.0, max_tokens=8, n=4, ignore_eos=True))[0]
    assert len({r.token_ids for r in result.replies}) == 4
    assert [r.cached_tokens for r in result.replies] == [0, 40, 40, 40]
    singles = [SamplingParams(temperature=1.0, max_tokens=8, sample_index=i, ignore_eos=True) for i in range(4)]
    same(answer(one, [prompt(1, 40)] * 4, singles), list(result.replies))


def test_log_probs_are_the_targets_own_and_the_same_from_any_slot() -> None:
    prompts, params = requests()
    asked = [SamplingParams(**{**vars(p), "logprobs": 3}) for p in params]
    ours, plain = answer(engine(verify="coupled"), prompts, asked), answer(engine(**PLAIN), prompts, asked)
    for one, other in zip(ours, plain, strict=True):
        assert one.log_probs is not None and other.log_probs is not None
        assert [x.token for x in one.log_probs] == list(one.token_ids)
        np.testing.assert_allclose(
            [x.log_prob for x in one.log_probs], [x.log_prob for x in other.log_probs], atol=1e-4
        )
        for x in one.log_probs:
            assert len(x.top) == 3 and x.top[0][1] >= x.top[1][1] >= x.top[2][1] >= -25
            assert x.log_prob <= x.top[0][1] + 1e-6
    assert all(r.log_probs is None for r in alone("coupled"))


def test_times_add_up() -> None:
    reply = answer(engine(), *requests())[-1]
    assert reply.queue_seconds > 0 and reply.prefill_seconds > 0 and reply.decode_seconds > 0
    assert reply.acceptance_length == pytest.approx((len(reply.token_ids) - 1) / reply.num_verify_steps)


BAD: tuple[tuple[dict[str, Any], dict[str, Any], list[int], str], ...] = (
    ({}, {}, [], "the prompt is empty"),
    ({}, {}, [512], "token id 512 is outside the vocabulary of 512"),
    ({}, {"max_tokens": 90}, [1] * 7, r"7 tokens .* up to 90 exceed this engine's max_length=96"),
    ({}, {"verify": "block"}, [1], "'block' is not this engine's law, 'rejection'"),
    ({}, {"num_draft_tokens": 4}, [1], "num_draft_tokens=4 exceeds the 3"),
    ({}, {"num_draft_tokens": "auto"}, [1], "needs an engine made with it"),
    ({}, {"stop": ("x",)}, [1], "stop strings need a tokenizer"),
    ({}, {"logit_bias": {600: 1.0}}, [1], "outside the vocabulary of 512"),
)


@pytest.mark.parametrize("options, fields, tokens, message", BAD)
def test_bad_requests_are_refused_before_they_touch_anything(
    options: dict[str, Any], fields: dict[str, Any], tokens: list[int], message: str
) -> None:
    one = engine(**options)
    good = one.submit(prompt(0, 5), SamplingParams(max_tokens=4))
    with pytest.raises(ValueError, match=message):
        one.submit(tokens, SamplingParams(**{"max_tokens": 4, **fields}))
    with pytest.raises(ValueError, match=message):
        one.generate([[1, 2], tokens], SamplingParams(**{"max_tokens": 4, **fields}))
    assert len(good.result.reply.token_ids) == 4
    assert_as_new(one)


def test_a_request_larger_than_the_pool_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"need 9 pages of 16 tokens and the pool has 8"):
        engine(max_length=300).submit([1] * 7, SamplingParams(max_tokens=130))


IMPOSSIBLE: tuple[tuple[dict[str, Any], str], ...] = (
    ({"max_lanes": 0}, "max_lanes=0 must be at least 1"),
    ({"num_draft_tokens": 9}, "num_draft_tokens=9 must be an integer from 0 to 7"),
    ({"num_pages": None, "kv_memory": 100}, r"kv_memory=100 bytes hold no page: one of 16 tokens takes \d+ bytes"),
    ({"kv_memory": 100, "num_pages": 1}, "say the same thing"),
    ({"max_length": 513}, "max_length=513 must be from 2 to the model's 512 positions"),
    ({"verify": "argmax"}, "must be one of rejection, block, coupled"),
    ({"draft": "int4"}, "draft='int4' must be one of auto, fp8, bf16"),
    ({"chunk_lengths": (32, 8)}, "must be ascending"),
)


@pytest.mark.parametrize("options, message", IMPOSSIBLE)
def test_limits_that_cannot_work_are_refused_at_start(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine(**options)


def test_an_fp8_head_drafts_a_little_differently_and_changes_no_reply() -> None:
    one = engine(draft="fp8", verify="coupled")
    assert {x.dtype.name for x in jax.tree.leaves(one.head)} == {"float8_e4m3fn", "float32"}
    assert 0 < float(draft_distance(loaded().head, one.head, loaded().model)) < 0.1
    replies = answer(one, *requests())
    same(replies, alone("coupled"))
    assert sum(sum(reply.accepted) for reply in replies) > 0
    assert_as_new(one)


def test_an_fp8_head_that_drafts_other_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = fp8_head
    wrong = nnx.clone(loaded().head)
    wrong.fc.weight.set_value(-wrong.fc.weight[...])
    monkeypatch.setattr("infer.engine.fp8_head", lambda head, model: honest(wrong, model))
    with pytest.raises(ValueError, match=r"fp8 draft head would draft from laws 0\.\d+ away .* use draft='bf16'"):
        engine(draft="fp8")


def test_kv_memory_buys_pages_and_says_what_one_takes() -> None:
    one = engine(num_pages=None, kv_memory=10 * engine().page_bytes + 5)
    assert one.stats.num_pages == 10
    # two layers with pages (attention and MTP), keys and values, 16 tokens, one head of 16, float32
    assert one.page_bytes == 2 * 2 * 16 * 16 * 4


def test_an_interrupt_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine()
    calls = iter(range(100))
    look = Engine._look

    def interrupted(self: Engine, flight: Any) -> Any:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return look(self, flight)

    monkeypatch.setattr(Engine, "_look", interrupted)
    with pytest.raises(KeyboardInterrupt):
        answer(one, *requests())
    monkeypatch.undo()
    one.drain()
    assert_as_new(one)
    same(answer(one, *requests()), alone("rejection"))


def test_the_host_goes_on_while_the_call_that_decodes_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it may come back only when its loop has ended; what the turn before brought is taken in meanwhile."""
    ask = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    calm = answer(engine(), [prompt(1, 9)], ask)[0].token_ids
    free = threading.Event()

    def blocking(*args: Any, **options: Any) -> Any:
        assert free.wait(30)
        return decode_turn(*args, **options)

    monkeypatch.setattr("infer.engine.decode_turn", blocking)
    one = engine()
    stream = one.submit(prompt(1, 9), ask)
    free.set()
    one.step()
    jax.block_until_ready(one.gen)
    free.clear()
    brought = one.step()
    (delta,) = brought
    # the first token came with the step before
    assert len(delta.token_ids) >= 4 and delta.token_ids == calm[1 : 1 + len(delta.token_ids)]
    assert one._launched is not None and not one._launched.done()
    free.set()
    assert stream.result.reply.token_ids == calm
    one.close()


def test_what_fails_while_decoding_says_so_each_time_and_the_engine_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise RuntimeError("RESOURCE_EXHAUSTED: no room")

    monkeypatch.setattr("infer.engine.decode_turn", broken)
    one = engine()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no room"):
            answer(one, [prompt(1, 9)], SamplingParams(max_tokens=8))
    one.close()
    assert one.request.stop_ids.is_deleted()


def test_an_interrupt_while_a_call_blocks_starts_nothing_by_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that wait are admitted only once the lanes are there to be written to."""
    one, join = engine(), Engine._join
    ask = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    expected = [answer(engine(), [prompt(n, 9)], ask)[0].token_ids for n in range(3)]
    streams, coins = [one.submit(prompt(0, 9), ask)], iter(np.random.default_rng(0).random(200) < 0.6)

    def interrupted(self: Engine) -> None:
        if self._launched is not None and next(coins, False):
            raise KeyboardInterrupt
        join(self)

    monkeypatch.setattr(Engine, "_join", interrupted)
    interrupts = 0
    for _ in range(300):
        try:
            one.step()
        except KeyboardInterrupt:
            interrupts += 1
            if len(streams) < 3:
                streams.append(one.submit(prompt(len(streams), 9), ask))
    assert interrupts >= 3 and all(stream.done for stream in streams)
    assert [stream.result.reply.token_ids for stream in streams] == expected
