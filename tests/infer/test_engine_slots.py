"""Whatever is asked of the engine holds for every token it gives back, whichever slot of a window the token is from.

Slot 0 is the prompt's own token, slots 1 to 3 are drafts or what the target says in their place, slot 4 is the bonus
token; `Reply.steps` tells them apart. Replies with drafts are held against plain decoding, and against a twin: float64
logits of the finished text, and a law of sampling that sorts and shares no code with the project.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer import decode
from infer.engine import Engine
from infer.packed import Packed
from infer.params import SamplingParams, TokenAutomaton
from infer.replies import Reply
from infer.speculative import stands_with
from mtp.kernels.sampling import Sampling, target_noise
from tests import oracle, rig
from tests.infer import small_models
from tests.infer.engines import CONFIG, answer, assert_as_new, engine, prompt
from tests.sampling_twin import adjusted, processed

K, REPLY, MIN_TOKENS, SEED = 3, 40, 25, 9
# `block` has all of this in common with `rejection` but the count.
LAWS = ("rejection", "coupled")
VOCABULARY, END = CONFIG.vocab_size, CONFIG.eos_token_ids[0]
PROMPT = prompt(4, 12)
# so low that replies repeat themselves, or penalties would have nothing to do
TEMPERATURE = 0.1
# The twin reads in float64, and in another order, what float32 has computed.
TOLERANCE = 1e-4
EVERY_DRAFT = {("draft", 1), ("draft", 2), ("draft", 3), ("bonus", 4)}
EVERY_SLOT = EVERY_DRAFT | {("own", 1), ("own", 2), ("own", 3)}


def ask(max_tokens: int = REPLY, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max_tokens, "ignore_eos": True, "seed": SEED, **fields})


def with_k(asked: Sequence[SamplingParams], k: int) -> list[SamplingParams]:
    return [replace(params, num_draft_tokens=k) for params in asked]


def slots(reply: Reply) -> list[tuple[str, int]]:
    """Where each token is from; behind a window of k, `own` is the target's word where a draft was refused."""
    found = [("first", 0)][: len(reply.token_ids)]
    for count in reply.steps:
        end = ("bonus" if count == K + 1 else "own", count)
        found += [*(("draft", slot) for slot in range(1, count)), end]
    assert len(found) == len(reply.token_ids)
    return found


def ids(replies: Sequence[Reply]) -> list[tuple[int, ...]]:
    return [reply.token_ids for reply in replies]


def both(asked: Sequence[SamplingParams], tokens: list[int] = PROMPT) -> tuple[list[Reply], list[Reply]]:
    """What coupled windows say, and plain decoding; they are the same and end alike."""
    ours, plain = (answer(engine(verify="coupled"), [tokens] * len(asked), with_k(asked, k)) for k in (K, 0))
    assert ids(ours) == ids(plain)
    assert [(r.finish_reason, r.error is None) for r in ours] == [(r.finish_reason, r.error is None) for r in plain]
    assert all(set(r.steps) <= {1} and not any(r.drafted) for r in plain)
    return ours, plain


# -- one feature a request ---------------------------------------------------------------------------------------------


@cache
def bare(temperature: float) -> Reply:
    """The reply to a request that asks for nothing."""
    return answer(engine(), [PROMPT], ask(temperature=temperature, num_draft_tokens=0))[0]


def common(temperature: float) -> list[int]:
    """Its tokens, the most frequent first."""
    return [token for token, _ in Counter(bare(temperature).token_ids).most_common()]


@cache
def automata() -> tuple[TokenAutomaton, TokenAutomaton]:
    """Three states that allow little, and four that allow much, such as the tokens that are common in bare replies."""
    rng = np.random.default_rng(1)
    tables = [np.full((states, VOCABULARY), -1, np.int32) for states in (3, 4)]
    for table, allowed in zip(tables, (30, 200), strict=True):
        for row in table:
            row[rng.choice(VOCABULARY, allowed, replace=False)] = rng.integers(0, len(table), allowed)
    tables[1][:, [*common(0.0), *common(TEMPERATURE)]] = [[1], [2], [3], [0]]
    return TokenAutomaton(tables[0], start=2), TokenAutomaton(tables[1])


def features(temperature: float) -> dict[str, dict[str, Any]]:
    """By name; bias and stop tokens are aimed at the bare reply."""
    usual = common(temperature)
    boost = np.random.default_rng(2).choice(VOCABULARY, 40)
    each: dict[str, dict[str, Any]] = {
        "presence": {"presence_penalty": 1.5},
        "frequency": {"frequency_penalty": 0.7},
        "repetition": {"repetition_penalty": 1.5},
        "bias": {"logit_bias": {int(t): 0.5 for t in boost} | {t: -100.0 for t in usual[:4]}},
        "mask": {"allowed": automata()[0]},
        "min_tokens": {"min_tokens": MIN_TOKENS, "stop_token_ids": tuple(usual[:3])},
    }
    filters = {"top_k": 3, "top_p": 0.4, "min_p": 0.5}
    together = {name: value for one in each.values() for name, value in one.items()}
    together |= {"allowed": automata()[1], "logit_bias": {usual[0]: 1.0, usual[1]: -1.0}, "presence_penalty": -0.5}
    each["all"] = together | {"top_k": 40, "top_p": 0.9, "min_p": 0.02}
    # alone they have nothing to do where the first choice is nearly sure
    return each | ({name: {"temperature": 1.0, name: value} for name, value in filters.items()} if temperature else {})


@cache
def asked() -> dict[tuple[str, float], SamplingParams]:
    """Each feature, greedy and sampled; what is asked of log-probabilities goes round."""
    cases = [(name, t, fields) for t in (0.0, TEMPERATURE) for name, fields in features(t).items()]
    return {
        (name, t): ask(**{"temperature": t, "logprobs": (2, 0, None)[number % 3], **fields})
        for number, (name, t, fields) in enumerate(cases)
    }


@cache
def said(way: str) -> dict[tuple[str, float], Reply]:
    """All of it in one engine: by `plain` decoding, or by a law."""
    one = engine(verify="coupled" if way == "plain" else way)
    wanted = with_k(list(asked().values()), 0 if way == "plain" else K)
    replies = answer(one, [PROMPT] * len(wanted), wanted)
    assert_as_new(one)
    return dict(zip(asked(), replies, strict=True))


# -- the twin ----------------------------------------------------------------------------------------------------------


@cache
def raw_logits(tokens: tuple[int, ...], start: int) -> np.ndarray:
    """Logits, float64, that token `start` of a text and all behind it are chosen from."""
    tensors, text = small_models.tensors(CONFIG, seed=3), CONFIG.to_hf()["text_config"]
    return oracle.unembed(oracle.trunk(np.array(tokens), tensors, text)[start - 1 : -1], tensors)


def raw_log_probs(reply: Reply, tokens: list[int]) -> np.ndarray:
    raw = raw_logits((*tokens, *reply.token_ids), len(tokens))
    raw = raw - raw.max(axis=-1, keepdims=True)
    return raw - np.log(np.exp(raw).sum(axis=-1, keepdims=True))


@cache
def noise(sample_index: int) -> np.ndarray:
    """[REPLY, V]: the target's, at the places of a reply."""
    lane = Sampling.alike(1, seed=SEED, sample_index=sample_index)
    places = len(PROMPT) + jnp.arange(REPLY, dtype=jnp.int32)[None, :]
    return np.asarray(jax.jit(target_noise, static_argnums=2)(lane, places, VOCABULARY), np.float64)[0]


def adjusted_by(params: SamplingParams, raw: np.ndarray, reply: Sequence[int]) -> np.ndarray:
    """Logits behind this much of a reply, before temperature and filters."""
    forbidden = list(params.stop_token_ids) if len(reply) < params.min_tokens else []
    if params.allowed is not None:
        forbidden += np.flatnonzero(params.allowed.transitions[params.allowed.walk(reply)] < 0).tolist()
    bias = np.zeros(VOCABULARY)
    for token, value in dict(params.logit_bias).items():
        bias[token] = value
    penalties = {name: getattr(params, f"{name}_penalty") for name in ("presence", "frequency", "repetition")}
    return adjusted(raw, PROMPT, reply, bias=bias, forbidden=forbidden, **penalties)


def check_against_twin(reply: Reply, params: SamplingParams, own_picks: bool = True) -> None:
    """Every token is the twin's pick with the noise of its place; without `own_picks`, one that the twin might pick."""
    raw = raw_logits((*PROMPT, *reply.token_ids), len(PROMPT))
    for n, (token, slot) in enumerate(zip(reply.token_ids, slots(reply), strict=True)):
        logits = adjusted_by(params, raw[n], reply.token_ids[:n])
        if params.temperature == 0:
            assert logits[token] >= logits.max() - TOLERANCE, (n, slot)
            continue
        chance = processed(logits, params.temperature, params.top_k, params.top_p, params.min_p)
        assert chance[token] > 0, (n, slot)
        if own_picks:
            with np.errstate(divide="ignore"):
                value = np.log(chance) + noise(params.sample_index)[n]
            assert value[token] >= value.max() - TOLERANCE, (n, slot)


# -- tests -------------------------------------------------------------------------------------------------------------


def test_each_feature_changes_the_reply() -> None:
    """What the tests below need to mean anything."""
    for case, params in asked().items():
        reply = said("plain")[case]
        assert reply.token_ids != bare(params.temperature).token_ids[: len(reply.token_ids)], case
    assert all(len(set(bare(t).token_ids)) < 2 * REPLY / 3 for t in (0.0, TEMPERATURE))


@pytest.mark.parametrize("law", LAWS)
def test_fault_35_36_37_every_feature_holds_in_every_slot(law: str) -> None:
    """vllm #42744, sglang #8734, omlx #2399: min_p and bias at the first row only; penalties, grammar and budget
    dropped; the bonus token by the raw first choice."""
    ours, plain = said(law), said("plain")
    for case, params in asked().items():
        if params.temperature == 0 or law == "coupled":
            assert ours[case].token_ids == plain[case].token_ids, case
            assert ours[case].finish_reason == plain[case].finish_reason, case
    for name in {name for name, _ in asked()}:
        found = set[tuple[str, int]]().union(*(slots(ours[case]) for case in asked() if case[0] == name))
        assert found >= EVERY_DRAFT, (name, EVERY_DRAFT - found)
    assert set[tuple[str, int]]().union(*map(slots, ours.values())) >= EVERY_SLOT


@pytest.mark.parametrize("way", ["plain", *LAWS])
def test_every_token_is_one_that_an_independent_law_allows(way: str) -> None:
    """And under `plain` and `coupled` it is that law's own pick."""
    for case, params in asked().items():
        check_against_twin(said(way)[case], params, own_picks=way in ("plain", "coupled"))


@pytest.mark.parametrize("way", ["plain", *LAWS])
def test_fault_35_36_a_forbidden_token_is_said_in_no_slot(way: str) -> None:
    """A bias of -100, counted by slot, and stop tokens before `min_tokens`."""
    counted = {name: Counter[tuple[str, int]]() for name in ("bias", "min_tokens", "looked at")}
    for (name, temperature), reply in said(way).items():
        unwanted = {
            "bias": common(temperature)[:4],
            "min_tokens": common(temperature)[:3],
        }.get(name, [])
        for n, (token, slot) in enumerate(zip(reply.token_ids, slots(reply), strict=True)):
            if unwanted and (name == "bias" or n < MIN_TOKENS):
                counted["looked at"][slot] += 1
                counted[name][slot] += token in unwanted
        if name == "min_tokens":
            assert len(reply.token_ids) == REPLY or reply.token_ids[-1] in unwanted
            assert (reply.finish_reason == "stop") == (reply.token_ids[-1] in unwanted)
    assert not counted["bias"].total() and not counted["min_tokens"].total()
    assert set(counted["looked at"]) >= (EVERY_DRAFT if way != "plain" else {("own", 1)})
    # they are what a reply that asks for nothing says most
    assert all(sum(t in common(x)[:3] for t in bare(x).token_ids) > 5 for x in (0.0, TEMPERATURE))


@pytest.mark.parametrize("way", ["plain", *LAWS])
def test_log_probs_are_those_of_a_full_forward_pass_in_every_slot(way: str) -> None:
    """Within 1e-4 of a float64 log-softmax of the finished text's raw logits."""
    found: set[tuple[str, int]] = set()
    for case, params in asked().items():
        reply = said(way)[case]
        if params.logprobs is None:
            assert reply.log_probs is None
            continue
        assert reply.log_probs is not None and len(reply.log_probs) == len(reply.token_ids)
        for row, token, one in zip(raw_log_probs(reply, PROMPT), reply.token_ids, reply.log_probs, strict=True):
            assert one.token == token and abs(one.log_prob - row[token]) < 1e-4
            assert len(one.top) == params.logprobs
            best = np.sort(row)[::-1]
            for place, (candidate, value) in enumerate(one.top):
                assert abs(value - row[candidate]) < 1e-4 and abs(value - best[place]) < 1e-4
        found |= set(slots(reply))
    assert found >= (EVERY_SLOT if way != "plain" else {("own", 1)})


def test_a_preempted_reply_keeps_its_penalties_and_its_place_in_the_grammar() -> None:
    """Each feature alone, taken off its lane in the middle of the reply, while what it counts is on the device."""
    one = engine(verify="coupled")
    for case, params in asked().items():
        stream = one.submit(PROMPT, replace(params, num_draft_tokens=K))
        while not any(len(work.token_ids) > 1 for work in stream._works):
            one.step()
        (job,) = one.scheduler.live
        one._park(job)
        reply = stream.result.reply
        assert reply.num_preemptions == 1 and reply.token_ids == said("coupled")[case].token_ids, case
    assert_as_new(one)


def test_n_replies_are_the_plain_replies_of_their_sample_indices() -> None:
    """Each with penalties of its own reply, from every slot."""
    params = ask(temperature=TEMPERATURE, frequency_penalty=0.7, sample_index=5, n=4, num_draft_tokens=K)
    together = engine(verify="coupled").generate([PROMPT], params)[0].replies
    ours, _ = both([replace(params, n=1, sample_index=5 + i) for i in range(4)])
    assert ids(together) == ids(ours) and len(set(ids(together))) == 4
    assert {slot for reply in together for slot in slots(reply)} >= EVERY_DRAFT
    for index, reply in enumerate(together):
        check_against_twin(reply, replace(params, n=1, sample_index=5 + index))


# -- where a reply ends ------------------------------------------------------------------------------------------------


def last_slots(replies: Sequence[Reply]) -> set[int]:
    return {slots(reply)[-1][1] for reply in replies}


def test_a_stop_token_ends_the_reply_in_every_slot() -> None:
    """Each of the tokens 1 to 16 of a reply as its stop token in turn."""
    whole = answer(engine(), [PROMPT], ask(temperature=1.0, num_draft_tokens=0))[0].token_ids
    stops = whole[1:17]
    ours, _ = both([ask(temperature=1.0, stop_token_ids=(stop,)) for stop in stops])
    for stop, reply in zip(stops, ours, strict=True):
        assert reply.token_ids == whole[: whole.index(stop) + 1] and reply.finish_reason == "stop"
    assert last_slots(ours) == {1, 2, 3, 4}


def test_max_tokens_ends_the_reply_in_every_slot() -> None:
    whole = answer(engine(), [PROMPT], ask(temperature=1.0, num_draft_tokens=0))[0].token_ids
    ours, _ = both([ask(length, temperature=1.0) for length in range(1, 17)])
    for length, reply in enumerate(ours, start=1):
        assert reply.token_ids == whole[:length] and reply.finish_reason == "length"
    assert last_slots(ours) == {0, 1, 2, 3, 4}


def test_fault_36_37_min_tokens_puts_the_end_off_by_just_so_many_in_every_slot() -> None:
    """A bias makes the end token the only choice, and for so long it is none."""
    for temperature in (0.0, 1.0):
        lengths = range(14)
        ours, _ = both(
            [
                ask(temperature=temperature, ignore_eos=False, logit_bias={END: 100.0}, min_tokens=length)
                for length in lengths
            ]
        )
        for length, reply in zip(lengths, ours, strict=True):
            assert reply.token_ids.index(END) == length == len(reply.token_ids) - 1
            assert reply.finish_reason == "stop"
        assert last_slots(ours) == {0, 1, 2, 3, 4}


def test_ignore_eos_goes_on_behind_an_end_token_from_any_slot() -> None:
    biased = ask(temperature=1.0, logit_bias={END: 4.0})
    through, _ = both([replace(biased, sample_index=i) for i in range(12)])
    cut, _ = both([replace(biased, sample_index=i, ignore_eos=False) for i in range(12)])
    for whole, short in zip(through, cut, strict=True):
        end = whole.token_ids.index(END)
        assert len(whole.token_ids) == REPLY and whole.finish_reason == "length"
        assert short.token_ids == whole.token_ids[: end + 1] and short.finish_reason == "stop"
    ends = {
        slot
        for reply in through
        for token, (_, slot) in zip(reply.token_ids[:-1], slots(reply), strict=False)
        if token == END
    }
    assert ends >= {1, 2, 3, 4}


# -- grammars ----------------------------------------------------------------------------------------------------------


def grammar(rows: Sequence[dict[int, int]], start: int = 0) -> TokenAutomaton:
    """From what each state allows: token to next state."""
    table = np.full((len(rows), VOCABULARY), -1, np.int32)
    for row, allowed in zip(table, rows, strict=True):
        for token, state in allowed.items():
            row[token] = state
    return TokenAutomaton(table, start)


@pytest.mark.parametrize("law", LAWS)
def test_fault_37_two_letters_by_turns(law: str) -> None:
    """Only one token is possible at each place: all drafts stand, and the bonus token keeps to it too."""
    turns, pair = grammar([{100: 1}, {200: 0}]), TokenAutomaton.allow([100, 200], VOCABULARY)
    wanted = [ask(29, temperature=t, allowed=allowed) for t in (0.0, 1.0) for allowed in (turns, pair)]
    replies = answer(engine(verify=law), [PROMPT] * len(wanted), with_k(wanted, K))
    for reply, params in zip(replies, wanted, strict=True):
        if params.allowed is turns:
            assert reply.token_ids == ((100, 200) * 15)[:29]
            assert reply.steps == (4,) * 7
        assert set(reply.token_ids) <= {100, 200}
    assert ids(replies[::2]) == ids(answer(engine(), [PROMPT] * 2, with_k(wanted[::2], 0)))


@pytest.mark.parametrize("law", LAWS)
def test_fault_37_a_grammar_that_ends_in_the_end_token(law: str) -> None:
    """a, then pairs of b and a while they last, then the end; several letters for each of them."""
    a, b = range(100, 106), range(200, 206)
    pairs = grammar([dict.fromkeys(a, 1), dict.fromkeys(b, 0) | {END: 2}, {END: 2}])
    wanted = [ask(temperature=1.0, ignore_eos=False, allowed=pairs, sample_index=i) for i in range(30)]
    if law == "coupled":
        replies, _ = both(wanted)
    else:
        replies = answer(engine(verify=law), [PROMPT] * len(wanted), with_k(wanted, K))
    for reply in replies:
        pairs.walk(reply.token_ids)
        assert (reply.finish_reason == "stop") == (reply.token_ids[-1] == END)
        assert END not in reply.token_ids[:-1]
    ended = [reply for reply in replies if reply.finish_reason == "stop"]
    # an end stands at an odd place of the reply: behind the first token it may be in any slot
    assert last_slots(ended) == {1, 2, 3, 4}
    assert {slot for reply in replies for slot in slots(reply)} >= EVERY_DRAFT


@pytest.mark.parametrize("law", LAWS)
def test_a_place_where_nothing_is_allowed_fails_by_name(law: str) -> None:
    """The grammar allows nothing but the end, and `min_tokens` forbids it: what comes before stands, nothing else is
    said, and who is beside it does not notice."""
    longest = 7
    chain = [{100 + s: s + 1, 200 + s: s + 1} for s in range(longest)] + [{END: longest}]
    one = engine(verify=law)
    beside = ask(temperature=1.0, sample_index=3)
    neighbour = one.submit(PROMPT, beside)
    for length in range(longest + 1):
        dead_end = grammar(chain, start=longest - length)
        for temperature in (0.0, 1.0):
            wanted = ask(temperature=temperature, ignore_eos=False, allowed=dead_end, min_tokens=length + 1)
            ours, plain = (answer(one, [PROMPT], replace(wanted, num_draft_tokens=k))[0] for k in (K, 0))
            for reply in (ours, plain):
                assert reply.finish_reason == "error" and len(reply.token_ids) == length
                assert f"reply token {length} has no finite logits, or none is allowed" in str(reply.error)
                assert dead_end.walk(reply.token_ids) == longest
            if law == "coupled" or temperature == 0:
                assert ours.token_ids == plain.token_ids
            # one token less and the end may be said
            may_end = replace(wanted, min_tokens=length, num_draft_tokens=K)
            sound = answer(one, [PROMPT], may_end)[0]
            assert (sound.finish_reason, sound.token_ids[-1], len(sound.token_ids)) == ("stop", END, length + 1)
    alone = answer(engine(verify=law), [PROMPT], beside)[0]
    assert neighbour.result.reply.token_ids == alone.token_ids and alone.finish_reason == "length"
    assert_as_new(one)


# -- a broken head -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", LAWS)
def test_a_broken_head_costs_speed_and_no_reply(law: str) -> None:
    """Weights of NaN draft nothing: what is said is plain decoding's, under every law."""
    cases = [case for case in asked() if case[0] in ("mask", "all")]
    plain = [said("plain")[case] for case in cases]
    one = engine(verify=law)
    one._head = Packed(jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), one.head))
    replies = answer(one, [PROMPT] * len(cases), with_k([asked()[case] for case in cases], K))
    assert ids(replies) == ids(plain)
    assert [r.finish_reason for r in replies] == [r.finish_reason for r in plain]
    assert not any(any(r.drafted) for r in replies)


# -- synthetic acceptance ----------------------------------------------------------------------------------------------


@cache
def synthetic() -> Engine:
    """Three tokens and a bit a step, whatever the drafts are worth; many lanes, for many windows are to be counted."""
    return engine(max_lanes=16, num_pages=96, synthetic_acceptance=3.13)


def test_synthetic_acceptance_solves_its_polynomial() -> None:
    assert stands_with(3.13) == pytest.approx(0.838, abs=5e-4)
    for length in (1.0, 1.2, 2.0, 3.13, 3.3, 3.9, 4.0):
        p = stands_with(length)
        assert 0 <= p <= 1 and 1 + p + p**2 + p**3 == pytest.approx(length, abs=1e-9)
    for length in (0.99, 4.01, float("nan")):
        with pytest.raises(ValueError, match="must be from 1 to 4 tokens a step"):
            stands_with(length)


def test_synthetic_acceptance_is_the_same_chance_for_every_k_and_leaves_the_cache_sound() -> None:
    """Mean tokens of over 450 windows of each k within three standard errors of 1 + p + .. + p^k; the raw
    log-probabilities are those of the very text that came out."""
    one, p, length = synthetic(), stands_with(3.13), 64
    for k in (1, 2, 3):
        params = ask(length, temperature=1.0, num_draft_tokens=k, n=8 * (k + 1), logprobs=0)
        replies = one.generate([PROMPT], params)[0].replies
        # so many windows surely end before the reply does, which would cut them
        whole = (length - 1) // (k + 1)
        counts = np.array([reply.steps[:whole] for reply in replies])
        chance = [*(p**j * (1 - p) for j in range(k)), p**k]
        mean = sum((j + 1) * c for j, c in enumerate(chance))
        spread = sum((j + 1) ** 2 * c for j, c in enumerate(chance)) - mean**2
        assert counts.size > 450 and mean == pytest.approx(sum(p**j for j in range(k + 1)))
        assert abs(counts.mean() - mean) < 3 * (spread / counts.size) ** 0.5, k
        # windows of one reply and of several are independent of each other
        assert abs(counts.var() / spread - 1) < 0.2
        for reply in replies[:4]:
            assert reply.log_probs is not None
            law = raw_log_probs(reply, PROMPT)
            want = law[np.arange(len(law)), list(reply.token_ids)]
            np.testing.assert_allclose([x.log_prob for x in reply.log_probs], want, atol=1e-4)
    plain = ask(temperature=1.0, num_draft_tokens=0)
    assert ids(answer(one, [PROMPT], plain)) == ids(answer(engine(), [PROMPT], plain))


def test_synthetic_lengths_follow_the_replaced_count() -> None:
    """A lane's cache holds its prompt and its reply but the last token, whenever one looks."""
    one = synthetic()
    streams = [one.submit(prompt(n, 5 + n), ask(64, temperature=n / 8, sample_index=n)) for n in range(16)]
    looked_at = 0
    while one.busy:
        one.step()
        for job in one.scheduler.live:
            if job.started:
                produced = int(one.gen.num_tokens[job.lane])
                assert int(one.gen.cache.lengths[job.lane]) == len(job.prompt) + produced - 1
                looked_at += produced > 1
    assert looked_at > 16
    assert all(len(stream.result.reply.token_ids) == 64 for stream in streams)
    assert_as_new(one)


def test_tokens_without_text_are_never_chosen_and_never_listed() -> None:
    """A model that likes a token without text best: neither the reply nor its alternatives name it."""
    usable = 300
    reply = answer(engine(usable_tokens=usable), [PROMPT], ask(temperature=1.0, logprobs=5))[0]
    listed = [token for entry in reply.log_probs for token, _ in entry.top]
    assert len(listed) == 5 * len(reply.token_ids) and max(*listed, *reply.token_ids) < usable
    free = answer(engine(), [PROMPT], ask(temperature=1.0, logprobs=5))[0]
    assert any(token >= usable for entry in free.log_probs for token, _ in entry.top)


@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_logit_that_is_not_finite_makes_its_row_unsound_and_no_other(bad: float, temperature: float) -> None:
    """Wherever it stands in a row of 8,192, with a bias as every request has one: a maximum may miss a NaN there."""
    size, places = 8192, (0, 5, 4096, 8191)
    logits = np.random.default_rng(0).normal(size=(1, len(places) + 1, size)).astype(np.float32)
    for row, place in enumerate(places):
        logits[0, row, place] = bad
    sampling = replace(Sampling.alike(1, temperature=temperature), bias=jnp.zeros((1, size), jnp.float32))
    asked = replace(rig.request(1, 9), sampling=sampling)
    gen = decode.begin(rig.lanes(1, 16), 0)
    law = jax.jit(decode.law_of_rows)
    _, sound = law(jnp.asarray(logits), gen, asked, jnp.zeros((1,), jnp.int32), decode.not_before(1, len(places) + 1))
    assert sound[0].tolist() == [False] * len(places) + [True]
