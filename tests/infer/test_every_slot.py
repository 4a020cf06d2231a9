"""Whatever a request asks for holds for every token it gets, whichever slot of a window the token comes out of.

Lanes with one feature each, greedy and sampled, answer the same prompt: penalties, bias, token mask, min_tokens, and
all of them together. A scripted drafter offers plain decoding's own continuation, spoilt at a chosen place, so that
every slot emits: drafts 1 to 3, the token behind a rejection, the bonus token behind 0 to 3 drafts. The head's own
drafts are run too. What comes out is held against plain decoding, and against a float64 twin of the law that reads the
finished reply in one pass. A NaN, wherever it comes from, fails its own lane at the token where plain decoding fails.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer import decode, speculative
from infer.decode import FAILED, FULL, Emitted, Generation, Request
from infer.params import SamplingParams, TokenAutomaton
from infer.speculative import Proposal, Verification, decode_turn, stands_with
from mtp import cache as kv
from mtp import draft_head
from mtp.acceptance import Acceptance, accept
from mtp.draft_head import MTPHead, draft_rows
from mtp.kernels.sampling import History, Sampling, WindowNoise, target_noise
from mtp.model import Qwen35
from tests.infer.engines import CONFIG, POISON, loaded, prompt
from tests.sampling_twin import adjusted, processed

K, REPLY, TOP, MIN_TOKENS = 3, 45, 3, 30
# `block` shares all of this with `rejection` but the count, and takes as long to compile.
LAWS = ("rejection", "coupled")
VOCABULARY = CONFIG.vocab_size
PROMPT = prompt(4, 12)
CAPACITY = 64
# of the lanes that are not greedy: such that they repeat themselves, or penalties would have nothing to do
TEMPERATURE = 0.4
NUM_STOPS, NUM_STATES = 4, 48
# The twin reads in float64 what float32 has computed in another order of summation.
TOLERANCE = 1e-4
SLOTS = {
    *(("draft", i) for i in range(K)),
    *(("recovered", i) for i in range(K)),
    *(("bonus", i) for i in range(K + 1)),
}


# -- what the lanes ask for --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lanes:
    """Lanes that have read the prompt and chosen their first token."""

    params: tuple[SamplingParams, ...]
    request: Request
    gen: Generation

    def where(self, kept: Any) -> list[int]:
        """Numbers of the lanes whose parameters are so."""
        return [lane for lane, params in enumerate(self.params) if kept(params)]


def to_request(params: Sequence[SamplingParams]) -> tuple[Request, History]:
    """What these parameters mean, each in a lane of its own."""
    each = lambda name, dtype: jnp.asarray([getattr(p, name) for p in params], dtype)  # noqa: E731
    bias = np.zeros((len(params), VOCABULARY), np.float32)
    stops = np.full((len(params), NUM_STOPS), -1, np.int32)
    # row 0 allows everything; behind it the lanes' automata, one after the other, up to a fixed number of states
    table, states, used = np.full((NUM_STATES, VOCABULARY), -1, np.int32), np.zeros((len(params),), np.int32), 1
    table[0] = 0
    for lane, p in enumerate(params):
        for token, value in dict(p.logit_bias).items():
            bias[lane, token] = value
        stops[lane, : len(p.stop_token_ids)] = p.stop_token_ids
        if p.allowed is not None:
            moved = np.where(p.allowed.transitions < 0, -1, p.allowed.transitions + used)
            table[used : used + len(moved)] = moved
            states[lane] = used + p.allowed.start
            used += len(moved)
    names = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    request = Request(
        sampling=Sampling(
            **{name: each(name, jnp.float32) for name in names},
            top_k=each("top_k", jnp.int32),
            seed=each("seed", jnp.uint32),
            sample_index=each("sample_index", jnp.uint32),
            bias=jnp.asarray(bias),
        ),
        stop_ids=jnp.asarray(stops),
        min_tokens=each("min_tokens", jnp.int32),
        max_tokens=each("max_tokens", jnp.int32),
        num_draft_tokens=jnp.full((len(params),), K, jnp.int32),
        log_probs=jnp.asarray([-1 if p.logprobs is None else p.logprobs for p in params], jnp.int32),
        mask_table=jnp.asarray(table),
    )
    shape = (len(params), VOCABULARY)
    seen = jnp.zeros(shape, bool).at[:, jnp.asarray(PROMPT)].set(True)
    return request, History(seen, jnp.zeros(shape, jnp.int32), jnp.asarray(states))


@jax.jit
def first_tokens(model: Qwen35, head: MTPHead, request: Request, history: History) -> Generation:
    lanes = request.min_tokens.shape[0]
    per_lane = CAPACITY // 16
    sizes = dict(num_lanes=lanes, num_pages=lanes * per_lane, page_size=16, pages_per_lane=per_lane)
    empty = kv.init(CONFIG, **sizes, num_draft_tokens=K, dtype=jnp.float32)
    table = jnp.arange(lanes * per_lane, dtype=jnp.int32).reshape(lanes, per_lane)
    tokens = jnp.broadcast_to(jnp.asarray(PROMPT, jnp.int32)[None, :], (lanes, len(PROMPT)))
    lengths = jnp.full((lanes,), len(PROMPT), jnp.int32)
    hidden, filled = draft_head.prefill(model, head, replace(empty, page_table=table), tokens, lengths)
    gen = decode.begin(filled, 0, history=history, top=TOP)
    return decode.first_token(model, gen, request, hidden, lengths - 1, jnp.ones((lanes,), bool))


def start(params: Sequence[SamplingParams], poison: bool = False) -> Lanes:
    request, history = to_request(params)
    model = loaded(poison)
    return Lanes(tuple(params), request, first_tokens(model.model, model.head, request, history))


# -- what they say -----------------------------------------------------------------------------------------------------


@dataclass
class Said:
    """One lane's reply, token by token: where each came from, and what was told of it."""

    tokens: list[int] = field(default_factory=list)
    slots: list[tuple[str, int]] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)


def listen(said: list[Said], emitted: Emitted) -> None:
    """Adds what one step emitted."""
    step = jax.tree.map(np.asarray, emitted)
    for lane, one in enumerate(said):
        accepted, drafted = step.num_accepted[lane], step.num_drafted[lane]
        assert accepted <= drafted and accepted <= step.count[lane]
        for row in range(step.count[lane]):
            end = "bonus" if accepted == drafted else "recovered"
            one.slots.append(("draft" if row < accepted else end, row))
            one.tokens.append(int(step.tokens[lane, row]))
            one.log_probs.append(float(step.log_probs[lane, row]))
            pairs = zip(step.top_tokens[lane, row].tolist(), step.top_log_probs[lane, row].tolist(), strict=True)
            one.top.append(dict(pairs))


def decoded(
    lanes: Lanes, law: str, k: int = K, *, poison: bool = False, head: MTPHead | None = None
) -> tuple[list[Said], Generation]:
    """The replies by `decode_turn`, with the head's own drafts; in turns of several steps."""
    model = loaded(poison)
    head = model.head if head is None else head
    said = [Said() for _ in lanes.params]
    gen, table = jax.tree.map(jnp.copy, lanes.gen), lanes.gen.cache.page_table
    listen(said, gen.emitted)
    steps = 0
    while bool(gen.live.any()):
        gen, packet = decode_turn(
            model.model, head, gen, lanes.request, table, jnp.int32(7), num_draft_tokens=k, law=law, max_steps=8
        )
        turn = packet.read(True)
        count = np.asarray(turn.emitted.count)
        steps += int(turn.num_steps)
        assert 0 < turn.num_steps <= 7 and not count[int(turn.num_steps) :].any()
        for number in range(int(turn.num_steps)):
            listen(said, jax.tree.map(lambda x, number=number: x[number], turn.emitted))
        np.testing.assert_array_equal(turn.status, gen.status)
        np.testing.assert_array_equal(turn.num_tokens, [len(one.tokens) for one in said])
    assert steps <= REPLY
    return said, gen


@jax.jit
def scripted_step(model: Qwen35, gen: Generation, request: Request, drafts: jax.Array, count: jax.Array) -> Generation:
    """One step of the shipped verbs, under `coupled`, with these drafts in place of the head's."""
    one_hot = jnp.log(jax.nn.one_hot(drafts, VOCABULARY, dtype=jnp.float32))
    room = jnp.maximum(request.max_tokens - gen.num_tokens - 1, 0)
    proposal = Proposal(drafts, one_hot, jnp.where(gen.live, jnp.minimum(count, room), 0))
    verification, cache = speculative.verify(model, gen, gen.cache, request, proposal)
    return speculative.accept_and_commit(gen, cache, request, proposal, verification, law="coupled")


# Every number of drafts offered with every number of them right: each slot of the window emits in one round.
CYCLE = [(offered, right) for offered in range(K + 1) for right in range(offered + 1)]


def scripted(lanes: Lanes, truth: list[Said], poison: bool = False, steps: int | None = None) -> tuple[Any, Generation]:
    """The replies with drafts that are right up to the place that `CYCLE` says, each lane at another place in it."""
    model = loaded(poison).model
    said, gen, number = [Said() for _ in truth], lanes.gen, 0
    listen(said, gen.emitted)
    while bool(gen.live.any()) and number != steps:
        plan = [CYCLE[(number + lane) % len(CYCLE)] for lane in range(len(truth))]
        drafts = np.zeros((len(truth), K), np.int32)
        for lane, ((_, right), one) in enumerate(zip(plan, truth, strict=True)):
            done = len(said[lane].tokens)
            ahead = np.asarray([*one.tokens[done : done + K], *[0] * K][:K])
            drafts[lane] = np.where(np.arange(K) < right, ahead, (ahead + 1) % VOCABULARY)
        offered = jnp.asarray([offered for offered, _ in plan], jnp.int32)
        gen = scripted_step(model, gen, lanes.request, jnp.asarray(drafts), offered)
        listen(said, gen.emitted)
        number += 1
    return said, gen


# -- the lanes of most tests -------------------------------------------------------------------------------------------


def random_automaton(seed: int) -> TokenAutomaton:
    """Four states that allow thirty tokens each."""
    rng = np.random.default_rng(seed)
    table = np.full((4, VOCABULARY), -1, np.int32)
    for row in table:
        row[rng.choice(VOCABULARY, 30, replace=False)] = rng.integers(0, 4, 30)
    return TokenAutomaton(table, start=2)


@cache
def featureless() -> tuple[list[int], list[int]]:
    """The greedy and the sampled reply to a request that asks for nothing."""
    asked = [SamplingParams(max_tokens=REPLY, temperature=t, seed=9, logprobs=None) for t in (0.0, TEMPERATURE) * 8]
    said, _ = decoded(start(asked), "rejection", 0)
    assert all(np.isnan(one.log_probs).all() for one in said), "nobody has asked for log-probabilities"
    return said[0].tokens, said[1].tokens


def features(reply: Sequence[int], seed: int) -> dict[str, dict[str, Any]]:
    """By name, what breaks with this reply; the bias and the end tokens are aimed at it."""
    rng = np.random.default_rng(seed)
    common = list(dict.fromkeys(reply))[:6]
    bias = {token: -100.0 for token in common} | {int(t): 0.5 for t in rng.choice(VOCABULARY, 40)}
    each: dict[str, dict[str, Any]] = {
        "none": {},
        "presence": {"presence_penalty": 1.5},
        "frequency": {"frequency_penalty": 0.7},
        "repetition": {"repetition_penalty": 1.5},
        "bias": {"logit_bias": bias},
        "mask": {"allowed": random_automaton(seed)},
        "min_tokens": {"min_tokens": MIN_TOKENS, "stop_token_ids": tuple(common[:3])},
    }
    # an automaton that allows what is common in the reply, so that all the others have something to do
    chain = random_automaton(seed + 1).transitions.copy()
    chain[:, common] = [[1], [2], [3], [0]]
    together = {name: value for one in each.values() for name, value in one.items()}
    together |= {"allowed": TokenAutomaton(chain), "logit_bias": {common[0]: 1.0, common[1]: -1.0}}
    each["all"] = together | {"top_k": 40, "top_p": 0.95, "min_p": 0.01, "presence_penalty": -0.5}
    return each


NAMES = ("none", "presence", "frequency", "repetition", "bias", "mask", "min_tokens", "all")


@cache
def featured() -> Lanes:
    """Each feature greedy, then each sampled; what they ask of log-probabilities goes round."""
    params = []
    for temperature, reply in zip((0.0, TEMPERATURE), featureless(), strict=True):
        for number, fields in enumerate(features(reply, 20).values()):
            ask = (3, 0, None, 1)[(number + (temperature > 0)) % 4]
            params.append(
                SamplingParams(
                    max_tokens=REPLY, temperature=temperature, seed=9, ignore_eos=True, logprobs=ask, **fields
                )
            )
    return start(params)


@cache
def plain() -> list[Said]:
    """What plain decoding says."""
    said, gen = decoded(featured(), "rejection", 0)
    assert (np.asarray(gen.status) != FAILED).all()
    return said


@cache
def by_script() -> list[Said]:
    return scripted(featured(), plain())[0]


@cache
def by_head(law: str) -> list[Said]:
    return decoded(featured(), law)[0]


# -- the twin ----------------------------------------------------------------------------------------------------------


@jax.jit
def read(model: Qwen35, tokens: jax.Array) -> jax.Array:
    """Raw logits [B, T, V] of finished texts, read in one pass without a head."""
    lanes = tokens.shape[0]
    sizes = dict(num_lanes=lanes, num_pages=lanes, page_size=CAPACITY, pages_per_lane=1)
    empty = kv.init(CONFIG, **sizes, num_draft_tokens=0, dtype=jnp.float32, with_head=False)
    own = replace(empty, page_table=jnp.arange(lanes, dtype=jnp.int32)[:, None])
    hidden, _ = draft_head.prefill(model, None, own, tokens, jnp.full((lanes,), tokens.shape[1], jnp.int32))
    return model.unembed(hidden)


def raw_logits(said: list[Said]) -> np.ndarray:
    """[B, REPLY, V]: those that token n of each reply was chosen from."""
    texts = [[*PROMPT, *one.tokens, *[0] * (REPLY - len(one.tokens))] for one in said]
    return np.asarray(read(loaded().model, jnp.asarray(texts, jnp.int32)))[:, len(PROMPT) - 1 : -1]


def twin_logits(raw: np.ndarray, params: SamplingParams, reply: Sequence[int]) -> np.ndarray:
    """Logits [V] of the token behind this much of a reply, in float64, before temperature."""
    forbidden = set(params.stop_token_ids) if len(reply) < params.min_tokens else set()
    if params.allowed is not None:
        state = params.allowed.walk(reply)
        forbidden |= set(np.flatnonzero(params.allowed.transitions[state] < 0).tolist())
    bias = np.zeros(len(raw))
    for token, value in dict(params.logit_bias).items():
        bias[token] = value
    return adjusted(
        raw,
        PROMPT,
        reply,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        repetition=params.repetition_penalty,
        bias=bias,
        forbidden=forbidden,
    )


def twin_law(raw: np.ndarray, params: SamplingParams, reply: Sequence[int]) -> np.ndarray:
    """Probabilities [V], in float64."""
    filters = (params.temperature, params.top_k, params.top_p, params.min_p)
    return processed(twin_logits(raw, params, reply), *filters)


def check_against_twin(lanes: Lanes, said: list[Said], own_picks: bool) -> None:
    """Each token may be said; if `own_picks`, sampled ones are what the twin picks with the noise of their place."""
    raw = raw_logits(said)
    places = np.broadcast_to(len(PROMPT) + np.arange(REPLY, dtype=np.int32), (len(said), REPLY))
    noise = np.asarray(target_noise(lanes.request.sampling, jnp.asarray(places), VOCABULARY), np.float64)
    for lane, (one, params) in enumerate(zip(said, lanes.params, strict=True)):
        for n, (token, slot) in enumerate(zip(one.tokens, one.slots, strict=True)):
            where = f"lane {lane}, token {n} from {slot}"
            before = one.tokens[:n]
            if params.temperature == 0:
                logits = twin_logits(raw[lane, n], params, before)
                assert logits[token] >= logits.max() - TOLERANCE, where
                continue
            chance = twin_law(raw[lane, n], params, before)
            assert chance[token] > 0, where
            if own_picks:
                with np.errstate(divide="ignore"):
                    value = np.log(chance) + noise[lane, n]
                assert value[token] >= value.max() - TOLERANCE, where


def tokens_of(said: list[Said]) -> list[list[int]]:
    return [one.tokens for one in said]


# -- tests -------------------------------------------------------------------------------------------------------------


def test_each_feature_changes_the_reply_and_plain_decoding_has_the_twins_law() -> None:
    """What the tests below need to mean anything."""
    for half, reply in enumerate(featureless()):
        assert len(set(reply)) > 10 or half == 0
        for number, name in enumerate(NAMES):
            same = plain()[half * len(NAMES) + number].tokens == reply
            assert same == (name == "none"), name
    check_against_twin(featured(), plain(), own_picks=True)


def test_inference_C35_C36_C37_features_hold_in_every_slot() -> None:
    """All slots emit in every lane, and emit plain decoding's tokens, which are the twin's own picks."""
    said = by_script()
    assert tokens_of(said) == tokens_of(plain())
    for lane, one in enumerate(said):
        # a lane that ends at a stop token has said less
        assert set(one.slots) == SLOTS or len(one.tokens) < REPLY, f"lane {lane}: {SLOTS - set(one.slots)}"
    assert set().union(*(one.slots for one in said if len(one.tokens) < REPLY)) == SLOTS
    check_against_twin(featured(), said, own_picks=True)


@pytest.mark.parametrize("law", LAWS)
def test_inference_C35_C36_C37_features_hold_for_drafts_of_the_head(law: str) -> None:
    """Greedy replies are plain decoding's under every law, sampled ones under `coupled`; elsewhere they keep to what
    the twin's law allows."""
    lanes, said = featured(), by_head(law)
    equal = lanes.where(lambda p: p.temperature == 0 or law == "coupled")
    assert [said[lane].tokens for lane in equal] == [plain()[lane].tokens for lane in equal]
    check_against_twin(lanes, said, own_picks=law == "coupled")
    for half in (said[: len(NAMES)], said[len(NAMES) :]):
        # fewer than k drafts are offered only close to a reply's end
        assert {slot for one in half for slot in one.slots} >= SLOTS - {("bonus", i) for i in range(K)}


def test_inference_C35_C36_a_biased_token_is_never_said_and_min_tokens_never_ends_early() -> None:
    """Counted by slot, over all ways of decoding."""
    lanes = featured()
    counted: set[tuple[str, int]] = set()
    for said in (plain(), by_script(), *(by_head(law) for law in LAWS)):
        for one, p in zip(said, lanes.params, strict=True):
            unwanted = {token for token, value in dict(p.logit_bias).items() if value == -100}
            early = set(p.stop_token_ids)
            for n, token in enumerate(one.tokens):
                assert token not in unwanted and (n >= p.min_tokens or token not in early), one.slots[n]
                if unwanted or (early and n < p.min_tokens):
                    counted.add(one.slots[n])
            if early:
                assert len(one.tokens) >= MIN_TOKENS
                assert len(one.tokens) == REPLY or one.tokens[-1] in early
    assert counted == SLOTS


def test_inference_C37_two_letters_by_turns_in_every_slot() -> None:
    """A grammar that allows `a` then `b` says abab..., whatever the drafts are; also where drafts break it."""
    table = np.full((2, VOCABULARY), -1, np.int32)
    table[0, 100], table[1, 200] = 1, 0
    only = SamplingParams(max_tokens=REPLY, temperature=1.0, allowed=TokenAutomaton.allow([100, 200], VOCABULARY))
    by_turns = replace(only, allowed=TokenAutomaton(table))
    lanes = start([only, by_turns] * 8)
    said, _ = decoded(lanes, "rejection")
    wrong = [Said(tokens=[7] * REPLY) for _ in said]
    spoilt, _ = scripted(lanes, wrong)
    for replies in (said, spoilt):
        assert all(one.tokens == ([100, 200] * REPLY)[:REPLY] for one in replies[1::2])
        assert all(set(one.tokens) == {100, 200} for one in replies[0::2])
    # one token is all the head and the target can choose: every draft stands
    assert {slot for one in said[1::2] for slot in one.slots} >= {("draft", i) for i in range(K)}
    assert {slot for one in spoilt for slot in one.slots} == {("recovered", 0), ("bonus", 0)}


def test_inference_C31_drafts_obey_the_same_law_and_declare_it() -> None:
    """The law q that each draft is recorded with is the twin's, made of the head's own logits and the drafts before."""
    lanes, model = featured(), loaded()
    said, gen = scripted(lanes, plain(), steps=5)
    proposal, raw = proposed(model.model, model.head, gen, lanes.request)
    drafts, count = np.asarray(proposal.tokens), np.asarray(proposal.count)
    assert (count == K).all()
    noise = [WindowNoise(lanes.request.sampling, gen.cache.lengths).draft("block", i, VOCABULARY) for i in range(K)]
    for lane, params in enumerate(lanes.params):
        for i in range(K):
            reply = [*said[lane].tokens, *drafts[lane, :i].tolist()]
            logits, q = np.asarray(raw)[lane, i], np.exp(np.asarray(proposal.log_probs[lane, i], np.float64))
            np.testing.assert_allclose(q, twin_law(logits, params, reply), atol=1e-5, err_msg=f"lane {lane} draft {i}")
            assert drafts[lane, i] == np.argmax(np.log(np.maximum(q, 1e-300)) + np.asarray(noise[i])[lane])


@jax.jit
def proposed(model: Qwen35, head: MTPHead, gen: Generation, request: Request) -> tuple[Proposal, jax.Array]:
    """A proposal under `block`, and the raw logits [B, k, V] of the head on just these drafts."""
    proposal, _ = speculative.draft(model, head, gen, request, num_draft_tokens=K, law="block")
    cache, rows = gen.cache, []
    tokens, hidden, starts, count = cache.recent_tokens, cache.recent_hidden, cache.lengths - cache.num_recent + 1, None
    for i in range(K):
        hidden, cache = draft_rows(head, model, cache, tokens, hidden, starts, cache.num_recent if i == 0 else count)
        if i == 0:
            hidden = jnp.take_along_axis(hidden, (cache.num_recent - 1)[:, None, None], axis=1)
        rows.append(model.unembed(hidden)[:, 0])
        tokens, starts, count = proposal.tokens[:, i : i + 1], cache.lengths + 1 + i, jnp.ones_like(cache.lengths)
    return proposal, jnp.stack(rows, axis=1)


@pytest.mark.parametrize("way", ["plain", "script", *LAWS])
def test_inference_D48_log_probs_are_those_of_the_raw_logits_in_every_slot(way: str) -> None:
    """Within 1e-4 of a log-softmax, in float64, of the finished reply read in one pass; and so are the best ones."""
    lanes = featured()
    said = {"plain": plain, "script": by_script}.get(way, lambda: by_head(way))()
    raw = raw_logits(said).astype(np.float64)
    raw -= raw.max(axis=-1, keepdims=True)
    law = raw - np.log(np.exp(raw).sum(axis=-1, keepdims=True))
    for lane, (one, p) in enumerate(zip(said, lanes.params, strict=True)):
        want = [law[lane, n, token] for n, token in enumerate(one.tokens)]
        if p.logprobs is not None:
            np.testing.assert_allclose(one.log_probs, want, atol=TOLERANCE)
            assert np.std(one.log_probs) > 0.1
        for n, best in enumerate(one.top if p.logprobs else []):
            np.testing.assert_allclose(list(best.values()), np.sort(law[lane, n])[: -TOP - 1 : -1], atol=TOLERANCE)
            np.testing.assert_allclose(list(best.values()), [law[lane, n, t] for t in best], atol=TOLERANCE)


# -- NaN ---------------------------------------------------------------------------------------------------------------


@cache
def near_poison() -> Lanes:
    """Sixteen lanes that shun the poisonous token, but for four that have to say it as their 6th .. 9th."""
    params = []
    for lane in range(16):
        fields: dict[str, Any] = {"logit_bias": {POISON: -100.0}}
        if lane < 4:
            chain = np.tile(np.arange(1, lane + 8, dtype=np.int32)[:, None], (1, VOCABULARY))
            chain[:, POISON] = -1
            chain[lane + 5], chain[lane + 5, POISON], chain[-1] = -1, lane + 6, lane + 6
            fields = {"allowed": TokenAutomaton(chain)}
        temperature = (0.0, 0.9)[lane // 2 % 2]
        params.append(SamplingParams(max_tokens=30, temperature=temperature, seed=lane, ignore_eos=True, **fields))
    return start(params, poison=True)


@pytest.mark.parametrize("law", ["plain", "script", *LAWS])
def test_a_nan_fails_its_own_lane_where_plain_decoding_fails(law: str) -> None:
    """The token whose embedding is NaN is said, the one behind it is not, from whichever slot; nobody else notices."""
    lanes = near_poison()
    truth, _ = decoded(lanes, "rejection", 0, poison=True)
    if law == "script":
        said, gen = scripted(lanes, truth, poison=True)
        assert len({said[lane].slots[-1] for lane in range(4)}) > 1
    else:
        said, gen = decoded(lanes, LAWS[0] if law == "plain" else law, 0 if law == "plain" else K, poison=True)
    for lane, one in enumerate(said):
        if lane < 4:
            assert one.tokens.index(POISON) == len(one.tokens) - 1 == lane + 5
            assert gen.cache.lengths[lane] == len(PROMPT) + lane + 5
        assert int(gen.status[lane]) == (FAILED if lane < 4 else FULL)
        if lanes.params[lane].temperature == 0 or law in ("plain", "script", "coupled"):
            assert one.tokens == truth[lane].tokens
    # the same requests with a sound embedding: the healthy lanes say the same
    clean = Lanes(lanes.params, lanes.request, start(lanes.params).gen)
    healthy = decoded(clean, "rejection", 0)[0]
    assert tokens_of(truth[4:]) == tokens_of(healthy[4:])


@pytest.mark.parametrize("k", [0, K])
def test_a_nan_in_a_lanes_state_fails_that_lane_alone(k: int) -> None:
    """Nothing more is said or committed there."""
    lanes = featured()
    delta = tuple(replace(d, state=d.state.at[5].set(jnp.nan)) for d in lanes.gen.cache.delta)
    sick = replace(lanes, gen=replace(lanes.gen, cache=replace(lanes.gen.cache, delta=delta)))
    said, gen = decoded(sick, "coupled", k)
    assert said[5].tokens == plain()[5].tokens[:1]
    assert (int(gen.status[5]), int(gen.num_tokens[5]), int(gen.cache.lengths[5])) == (FAILED, 1, len(PROMPT))
    others = [lane for lane in range(16) if lane != 5]
    assert [said[lane].tokens for lane in others] == [plain()[lane].tokens for lane in others]
    assert (np.asarray(gen.status)[others] != FAILED).all()


@pytest.mark.parametrize("bias", [np.nan, np.inf, -np.inf])
def test_a_lane_without_a_law_fails_at_its_first_token(bias: float) -> None:
    """Not finite, or nothing left to choose: it says nothing, commits nothing and never becomes live."""
    request, history = to_request(featured().params)
    changed = request.sampling.bias.at[3].set(bias)
    model, bad = loaded(), replace(request, sampling=replace(request.sampling, bias=changed))
    gen = first_tokens(model.model, model.head, bad, history)
    assert int(gen.status[3]) == FAILED and int(gen.emitted.count[3]) == 0 and int(gen.num_tokens[3]) == 0
    others = np.arange(16) != 3
    firsts = [one.tokens[0] for one in plain()]
    assert np.asarray(gen.emitted.tokens[:, 0])[others].tolist() == np.asarray(firsts)[others].tolist()
    assert (np.asarray(gen.emitted.count)[others] == 1).all()


def test_a_rejected_draft_that_is_poison_costs_nothing() -> None:
    """Rows before it stand, its rows in the pages are never read, and the reply goes on as plain decoding's."""
    params = [SamplingParams(max_tokens=30, seed=n, ignore_eos=True, logit_bias={POISON: -100.0}) for n in range(16)]
    lanes = start([replace(p, temperature=n / 10) for n, p in enumerate(params)], poison=True)
    truth, _ = decoded(lanes, "rejection", 0, poison=True)
    said, gen = [Said() for _ in params], lanes.gen
    listen(said, gen.emitted)
    for number in range(30):
        place = (np.arange(16) + number) % K
        drafts = np.full((16, K), POISON, np.int32)
        for lane, one in enumerate(truth):
            right = one.tokens[len(said[lane].tokens) :][: place[lane]]
            drafts[lane, : len(right)] = right
        gen = scripted_step(loaded(True).model, gen, lanes.request, jnp.asarray(drafts), jnp.full((16,), K, jnp.int32))
        listen(said, gen.emitted)
    assert tokens_of(said) == tokens_of(truth) and (np.asarray(gen.status) == FULL).all()
    assert {slot for one in said for slot in one.slots} >= {("recovered", i) for i in range(K)}


def test_a_broken_head_costs_drafts_and_no_reply() -> None:
    """A head of NaN drafts nothing."""
    head = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), loaded().head)
    said, gen = decoded(featured(), "coupled", head=head)
    assert tokens_of(said) == tokens_of(plain()) and not np.asarray(gen.drafted).any()


# -- synthetic acceptance ----------------------------------------------------------------------------------------------


@jax.jit
def decide(
    gen: Generation, request: Request, proposal: Proposal, verification: Verification
) -> tuple[Acceptance, Generation]:
    """The natural outcome of a window, and what is made of it."""
    noise = WindowNoise(request.sampling, gen.cache.lengths)
    laws = (verification.log_probs, proposal.log_probs)
    natural = accept("rejection", *laws, proposal.tokens, proposal.count, noise)
    after = speculative.accept_and_commit(gen, gen.cache, request, proposal, verification, law="rejection")
    return natural, after


@pytest.mark.parametrize("length", [1.0, 3.13, 4.0])
def test_synthetic_acceptance_replaces_the_count_and_nothing_else(length: float) -> None:
    """Of each lane's drafts those before the first coin of 1 - p stand, and the natural next token follows."""
    lanes, rng = featured(), np.random.default_rng(1)
    p = jnp.float32(stands_with(length))
    seeds = replace(lanes.request.sampling, seed=jnp.arange(16, dtype=jnp.uint32))
    # none of these tokens ends a reply
    request = replace(
        lanes.request, synthetic_acceptance=p, sampling=seeds, stop_ids=jnp.full((16, NUM_STOPS), -1, jnp.int32)
    )
    draw = lambda rows: jnp.asarray(rng.normal(0, 2, (16, rows, VOCABULARY)), jnp.float32)  # noqa: E731
    offered = jnp.asarray(np.arange(16) % (K + 1), jnp.int32)
    drafts = jnp.asarray(rng.integers(0, VOCABULARY, (16, K)), jnp.int32)
    proposal, logits = Proposal(drafts, jax.nn.log_softmax(draw(K)), offered), draw(K + 1)
    hidden = jnp.zeros((16, K + 1, CONFIG.hidden_size), jnp.float32)
    verification = Verification(logits, jax.nn.log_softmax(logits), jnp.ones((16, K + 1), bool), hidden)
    natural, after = decide(lanes.gen, request, proposal, verification)
    coins = np.asarray(WindowNoise(seeds, lanes.gen.cache.lengths).synthetic(K)) < float(p)
    stand = np.cumprod(coins & (np.arange(K)[None, :] < np.asarray(offered)[:, None]), axis=1).sum(axis=1)
    assert after.emitted.num_accepted.tolist() == stand.tolist()
    assert (np.asarray(after.cache.lengths - lanes.gen.cache.lengths) == stand + 1).all()
    for lane, count in enumerate(stand):
        said = np.asarray(after.emitted.tokens)[lane, : count + 1].tolist()
        assert said == [*np.asarray(drafts)[lane, :count].tolist(), int(natural.next_token[lane])]


def test_synthetic_coins_give_the_mean_that_is_asked_for() -> None:
    """At L = 3.13 the mean of 9,600 windows of three drafts lies within five standard errors of it."""
    seeds = replace(featured().request.sampling, seed=jnp.arange(16, dtype=jnp.uint32))
    toss = jax.jit(lambda at: WindowNoise(seeds, jnp.full((16,), at, jnp.int32)).synthetic(K))
    coins = np.concatenate([np.asarray(toss(jnp.int32(at))) for at in range(600)]) < stands_with(3.13)
    counts = 1 + np.cumprod(coins, axis=1).sum(axis=1)
    assert abs(counts.mean() - 3.13) < 5 * counts.std() / len(counts) ** 0.5
