"""The state under speculation equals plain decoding's after every step, whatever is accepted.

A scripted drafter proposes plain decoding's own continuation, spoilt from a chosen place on, so that the shipped verbs
accept just as many drafts as the script says. A second cache follows by plain decoding; after each step the two are
compared, pending rows folded: recurrent state, convolution rows, keys and values, and the next logits.

Tolerance 2e-5: both are float32, and sum in another order where a window is wider than one row.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.decode import Generation, Request, begin
from infer.speculative import Proposal, accept_and_commit, decode_loop, draft, verify
from mtp import cache as kv
from mtp import weights
from mtp.kernels.gated_delta import fold_pending
from mtp.model import Qwen35, forward
from tests import rig

K, LANES = rig.NUM_DRAFT_TOKENS, 4
REPLY, CAPACITY = 2100, 2200
TOLERANCE = 2e-5


@cache
def continuation() -> tuple[Request, Generation, np.ndarray]:
    """Four lanes after their prompts, and each lane's greedy reply of 2,100 tokens by plain decoding."""
    asked = rig.request(LANES, REPLY)
    start = rig.started(asked, *rig.prompts([9, 5, 14, 1]), capacity=CAPACITY, max_reply=REPLY)
    model = rig.loaded()
    copy = jax.tree.map(jnp.copy, start)
    gen = decode_loop(model.model, model.head, copy, asked, jnp.int32(9999), num_draft_tokens=0)
    return asked, start, np.asarray(gen.tokens)


@jax.jit
def scripted_step(model: Qwen35, gen: Generation, request: Request, drafts: jax.Array, count: jax.Array) -> Generation:
    """One step of the shipped verbs with these drafts in place of the head's."""
    one_hot = jax.nn.one_hot(drafts, rig.CONFIG.vocab_size, dtype=jnp.float32)
    proposal = Proposal(drafts, jnp.log(one_hot), jnp.where(gen.live, count, 0))
    verification, cache = verify(model, gen, gen.cache, request, proposal)
    return accept_and_commit(gen, cache, request, proposal, verification, law="rejection")


@jax.jit
def follow(model: Qwen35, gen: Generation, request: Request, lanes: jax.Array) -> Generation:
    """One plain step of some lanes; the others rest."""
    status = gen.status
    gen = rig.plain_step(model, None, replace(gen, status=jnp.where(lanes, status, 0)), request)
    return replace(gen, status=status)


@jax.jit
def settle(model: Qwen35, cache: kv.Cache) -> tuple[list[jax.Array], list[jax.Array], jax.Array]:
    mixers = [layer.linear_attn for layer in model.layers if layer.linear_attn is not None]
    folded = [
        fold_pending(d.state, d.conv, d.pending, cache.num_pending, mixer.conv1d.weight[...])
        for d, mixer in zip(cache.delta, mixers, strict=True)
    ]
    ones = jnp.ones_like(cache.lengths)
    hidden, _ = forward(model, cache, cache.last_token[:, None], ones, keep=False)
    return [state for state, _ in folded], [conv for _, conv in folded], model.unembed(hidden)


@jax.jit
def distance(model: Qwen35, ours: kv.Cache, plain: kv.Cache) -> dict[str, jax.Array]:
    """Largest difference a lane of each part; keys and values up to the lane's length."""
    a, b = settle(model, ours), settle(model, plain)
    gap = lambda x, y: jnp.max(jnp.abs(x - y).reshape(LANES, -1), axis=1)  # noqa: E731
    largest = lambda xs, ys: jnp.max(jnp.stack([gap(x, y) for x, y in zip(xs, ys, strict=True)]), axis=0)  # noqa: E731
    size = ours.attention[0].keys.shape[1]
    index = jnp.arange(ours.page_table.shape[1] * size, dtype=jnp.int32)[None, :, None, None]
    held = index < ours.lengths[:, None, None, None]

    def entries(cache: kv.Cache) -> list[jax.Array]:
        pools = [pool for pages in cache.attention for pool in (pages.keys, pages.values)]
        gathered = [pool[cache.page_table].reshape(LANES, -1, *pool.shape[2:]) for pool in pools]
        return [jnp.where(held, x, 0.0) for x in gathered]

    return dict(
        state=largest(a[0], b[0]),
        conv=largest(a[1], b[1]),
        pages=largest(entries(ours), entries(plain)),
        logits=gap(a[2], b[2]),
        lengths=jnp.abs(ours.lengths - plain.lengths),
    )


def spoil(truth: np.ndarray, produced: np.ndarray, accept: np.ndarray) -> np.ndarray:
    """K drafts a lane: plain decoding's next tokens, the first wrong one behind `accept` of them."""
    drafts = np.stack([truth[lane, n : n + K] for lane, n in enumerate(produced)])
    wrong = np.arange(K)[None, :] >= accept[:, None]
    return np.where(wrong, (drafts + 1) % rig.CONFIG.vocab_size, drafts).astype(np.int32)


def run_script(script: Iterator[tuple[np.ndarray, np.ndarray]], compare_every: int = 1) -> list[dict[str, np.ndarray]]:
    """Follows a script of (drafts offered, accepted) a lane, checks counts and tokens, returns the distances."""
    model = rig.loaded().model
    asked, gen, truth = continuation()
    plain, measured = gen, []
    for number, (offered, accepted) in enumerate(script):
        before = np.asarray(gen.num_tokens)
        gen = scripted_step(model, gen, asked, jnp.asarray(spoil(truth, before, accepted)), jnp.asarray(offered))
        after = np.asarray(gen.num_tokens)
        np.testing.assert_array_equal(after - before, np.minimum(offered, accepted) + 1)
        for step in range(K + 1):
            lanes = np.asarray(plain.num_tokens) < after
            if not lanes.any():
                break
            assert step <= K
            plain = follow(model, plain, asked, jnp.asarray(lanes))
        if number % compare_every == 0:
            measured.append({name: np.asarray(x) for name, x in distance(model, gen.cache, plain.cache).items()})
    for lane, reply in enumerate(rig.replies(gen)):
        assert reply == truth[lane, : len(reply)].tolist()
    return measured


def assert_equal_to_plain(measured: list[dict[str, np.ndarray]]) -> None:
    for number, gaps in enumerate(measured):
        assert gaps["lengths"].max() == 0
        for name in ("state", "conv", "pages", "logits"):
            assert gaps[name].max() <= TOLERANCE, f"step {number}: {name} differs by {gaps[name]}"


def each(*values: int) -> np.ndarray:
    return np.asarray(values, np.int32)


def test_every_order_of_accepted_counts() -> None:
    """Each of the 4 counts follows each other, every lane at another place of the cycle."""
    # every ordered pair of 0..3 once: a de Bruijn cycle
    cycle = [0, 0, 1, 0, 2, 0, 3, 1, 1, 2, 1, 3, 2, 2, 3, 3]
    full = each(K, K, K, K)
    turns = range(len(cycle) + 1)
    script = ((full, each(*(cycle[(t + 5 * lane) % 16] for lane in range(LANES)))) for t in turns)
    assert_equal_to_plain(run_script(script))


def random_script(tokens: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Until each lane has surely drawn `tokens` tokens or more: k and the accepted count change each step and lane."""
    rng = np.random.default_rng(seed)
    produced = np.ones(LANES, np.int64)
    while produced.max() + K + 1 < tokens:
        offered = rng.integers(0, K + 1, LANES).astype(np.int32)
        accepted = rng.integers(0, K + 1, LANES).astype(np.int32)
        produced += np.minimum(offered, accepted) + 1
        yield offered, accepted


def test_inference_A9_A10_random_windows_for_2000_tokens_without_growing_error() -> None:
    """A window of another size each step and lane (A9), over a run long enough to degenerate (A10)."""
    measured = run_script(random_script(2000, seed=0), compare_every=10)
    assert_equal_to_plain(measured)
    early, late = (np.mean([gaps["state"].max() for gaps in part]) for part in (measured[:40], measured[-40:]))
    print(f"mean largest error of the state: first 40 comparisons {early:.2e}, last 40 {late:.2e}")
    # a committed error would add up over the steps; rounding forgets with the state's decay
    assert late <= 2 * early + 1e-7


def test_inference_A1_a_step_without_drafts_reads_the_accepted_state() -> None:
    script = ((each(*[k] * 4), each(2, 0, 3, 1)) for k in (3, 0, 1, 3, 0, 0, 2, 3))
    assert_equal_to_plain(run_script(script))


@pytest.mark.parametrize("accepted", [1, 2, 3])
def test_inference_A4_convolution_rows_roll_back_with_the_state(accepted: int) -> None:
    """The committed convolution rows are plain decoding's, bit for bit where the rows entered in equal windows."""
    measured = run_script((each(3, 3, 3, 3), each(*[accepted] * 4)) for _ in range(3))
    assert_equal_to_plain(measured)


def test_inference_A8_two_steps_after_prefill() -> None:
    """Nothing of the prefill is done twice: the first steps behind it draft one token each."""
    assert_equal_to_plain(run_script((each(1, 1, 1, 1), each(a, 1 - a, a, 1 - a)) for a in (1, 0, 1)))


def test_inference_A2_a_prefilling_lane_beside_verifying_lanes() -> None:
    """A lane that reads its prompt while others verify, and those others, are as if alone."""
    model = rig.loaded()
    asked, gen, truth = continuation()
    newcomer = jnp.asarray([0, 0, 11, 0], jnp.int32)
    tokens, _ = rig.prompts([11] * 4, seed=8)
    admitted = replace(
        gen.cache, **{n: getattr(kv.release(gen.cache, 2), n) for n in ("lengths", "delta", "num_recent")}
    )
    _, beside = rig.prefill(model.model, model.head, admitted, tokens, newcomer)
    alone = rig.prefill(model.model, model.head, rig.lanes(LANES, CAPACITY), tokens, newcomer)[1]
    for name, x, y in (
        ("state", beside.delta[0].state[2], alone.delta[0].state[2]),
        ("conv", beside.delta[0].conv[2], alone.delta[0].conv[2]),
        ("hidden", beside.recent_hidden[2, 0], alone.recent_hidden[2, 0]),
    ):
        np.testing.assert_array_equal(x, y, err_msg=name)
    others = np.array([0, 1, 3])
    drafts = jnp.asarray(spoil(truth, np.ones(LANES, int), each(2, 2, 2, 2)))
    stepped = [
        scripted_step(model.model, replace(gen, cache=cache), asked, drafts, jnp.asarray(each(3, 3, 0, 3)))
        for cache in (gen.cache, beside)
    ]
    for a, b in zip(*(jax.tree.leaves((g.cache.delta, g.tokens)) for g in stepped), strict=True):
        np.testing.assert_array_equal(a[others], b[others])


def test_inference_A5_a_resumed_lane_continues_from_its_snapshot() -> None:
    """Taken off in mid-reply, its lane used by another request, put back on another lane: the reply is unchanged."""
    model = rig.loaded()
    asked, gen, truth = continuation()
    loop = partial(decode_loop, model.model, model.head, num_draft_tokens=K)
    gen = loop(jax.tree.map(jnp.copy, gen), asked, jnp.int32(9))
    kept, count = kv.snapshot(gen.cache, 1), int(gen.num_tokens[1])
    # another request spoils lane 1, in pages of its own
    spare = gen.cache.page_table[3]
    cache = kv.admit(gen.cache, 1, spare)
    tokens, lengths = rig.prompts([30] * 4, seed=3)
    _, cache = rig.prefill(model.model, model.head, cache, tokens, jnp.where(jnp.arange(4) == 1, lengths, 0))
    cache = kv.restore(kv.release(cache, 1), 0, kept)
    gen = replace(
        gen,
        cache=cache,
        status=jnp.asarray([1, 0, 0, 0], jnp.int32),
        tokens=gen.tokens.at[0].set(gen.tokens[1]),
        num_tokens=gen.num_tokens.at[0].set(count),
    )
    gen = loop(gen, asked, jnp.int32(20))
    reply = rig.replies(gen)[0]
    assert len(reply) > count + 19
    assert reply == truth[1, : len(reply)].tolist()


def test_inference_A12_many_turns_equal_one_cold_prompt() -> None:
    """A conversation continued turn by turn on kept state ends where the whole text read at once ends."""
    model = rig.loaded()
    asked, gen, truth = continuation()
    loop = partial(decode_loop, model.model, model.head, num_draft_tokens=K)
    tokens, lengths = rig.prompts([9, 5, 14, 1])
    transcript = [tokens[lane, : lengths[lane]].tolist() for lane in range(LANES)]
    gen = jax.tree.map(jnp.copy, gen)
    for turn in range(4):
        gen = loop(gen, asked, jnp.int32(3))
        question, _ = rig.prompts([6] * LANES, seed=20 + turn)
        # a turn starts with the reply's last token, which no cache holds yet
        chunk = jnp.concatenate([gen.cache.last_token[:, None], question], axis=1)
        for lane, reply in enumerate(rig.replies(gen)):
            transcript[lane] += reply + question[lane].tolist()
        hidden, cache = rig.prefill(model.model, model.head, gen.cache, chunk, jnp.full((LANES,), 7, jnp.int32))
        gen = replace(gen, cache=cache)
        gen = rig.first_token(model.model, gen, asked, hidden, jnp.full((LANES,), 6, jnp.int32), jnp.ones(LANES, bool))
    sizes = [len(text) for text in transcript]
    cold = np.zeros((LANES, max(sizes)), np.int32)
    for lane, text in enumerate(transcript):
        cold[lane, : len(text)] = text
    fresh = rig.started(asked, jnp.asarray(cold), jnp.asarray(sizes, jnp.int32), CAPACITY, REPLY)
    np.testing.assert_array_equal(gen.cache.lengths, fresh.cache.lengths)
    np.testing.assert_allclose(gen.cache.recent_hidden[:, 0], fresh.cache.recent_hidden[:, 0], rtol=0, atol=TOLERANCE)
    assert_equal_to_plain([{n: np.asarray(x) for n, x in distance(model.model, gen.cache, fresh.cache).items()}])
    # the head has read the same rows: it drafts the same tokens from the same law
    proposals = [propose(model.model, model.head, g, asked) for g in (gen, fresh)]
    np.testing.assert_allclose(proposals[0].log_probs, proposals[1].log_probs, rtol=0, atol=1e-4)


@jax.jit
def propose(model: Qwen35, head, gen: Generation, request: Request) -> Proposal:  # noqa: ANN001
    """The head's own drafts and their law at temperature 1."""
    request = replace(request, sampling=replace(request.sampling, temperature=jnp.ones(LANES, jnp.float32)))
    return draft(model, head, gen, request, num_draft_tokens=K, law="coupled")[0]


def test_raising_k_after_500_tokens_drafts_as_if_it_had_never_been_0() -> None:
    model = rig.loaded()
    asked, start, _ = continuation()
    gens = []
    for k in (0, K):
        gen = jax.tree.map(jnp.copy, start)
        limited = replace(asked, max_tokens=jnp.full((LANES,), 501, jnp.int32))
        gens.append(decode_loop(model.model, model.head, gen, limited, jnp.int32(9999), num_draft_tokens=k))
    assert all(int(n) == 501 for gen in gens for n in gen.num_tokens)
    gens = [replace(gen, status=jnp.full((LANES,), 1, jnp.int32)) for gen in gens]
    kept, always = (propose(model.model, model.head, gen, asked) for gen in gens)
    np.testing.assert_array_equal(kept.tokens, always.tokens)
    np.testing.assert_allclose(kept.log_probs, always.log_probs, rtol=0, atol=1e-4)


def test_inference_B25_the_head_is_primed_by_prefill() -> None:
    """Drafts behind a prompt read in one chunk and in chunks of 5 (the last of k + 1) are the same, and
    differ from those of a head that has not seen the prompt."""
    model = rig.loaded()
    asked = rig.request(LANES, 8)
    tokens, lengths = rig.prompts([24] * LANES, seed=4)
    laws = {}
    for chunk in (24, 5):
        cache = rig.lanes(LANES, 64)
        for at in range(0, 24, chunk):
            part = tokens[:, at : at + chunk]
            size = jnp.full((LANES,), part.shape[1], jnp.int32)
            part = jnp.pad(part, ((0, 0), (0, chunk - part.shape[1])))
            hidden, cache = rig.prefill(model.model, model.head, cache, part, size)
        gen = rig.first_token(model.model, begin(cache, 8), asked, hidden, size - 1, jnp.ones(LANES, bool))
        laws[chunk] = propose(model.model, model.head, gen, asked).log_probs
    np.testing.assert_allclose(laws[5], laws[24], rtol=0, atol=1e-4)
    blind = replace(gen.cache, draft=jax.tree.map(jnp.zeros_like, gen.cache.draft))
    unprimed = propose(model.model, model.head, replace(gen, cache=blind), asked).log_probs
    assert float(jnp.abs(unprimed - laws[24]).max()) > 1e-2


def window_logits(model: Qwen35, cache: kv.Cache, tokens: np.ndarray, rows: int) -> np.ndarray:
    """Logits of lane 0 for these tokens, read through windows of `rows` rows behind the cache, all of them kept."""
    out = []
    for at in range(0, len(tokens), rows):
        window = jnp.broadcast_to(jnp.asarray(tokens[at : at + rows], jnp.int32), (LANES, rows))
        count = jnp.full((LANES,), rows, jnp.int32)
        hidden, cache = read_window(model, cache, window, count)
        cache = kv.commit(cache, hidden, window, count)
        out.append(hidden[:1])
    return np.asarray(model.unembed(jnp.concatenate(out, axis=1)))[0]


@jax.jit
def read_window(model: Qwen35, cache: kv.Cache, window: jax.Array, count: jax.Array) -> tuple[jax.Array, kv.Cache]:
    return forward(model, cache, window, count, keep=False)


def test_inference_C41_wide_and_narrow_windows_choose_the_same_token_but_for_near_ties() -> None:
    """Rows of a window of 4 against windows of 1: logits within 2e-5, so a choice may differ only where the two best
    lie closer than twice that. Margins below 1e-3 must occur, or the text has nothing to flip."""
    model = rig.loaded().model
    _, gen, truth = continuation()
    text = truth[0, :240]
    narrow, wide = (window_logits(model, gen.cache, text, rows) for rows in (1, K + 1))
    assert np.abs(narrow - wide).max() <= TOLERANCE
    best = np.sort(narrow, axis=-1)[:, -2:]
    margin = best[:, 1] - best[:, 0]
    assert margin.min() < 1e-3
    differs = narrow.argmax(axis=-1) != wide.argmax(axis=-1)
    assert (margin[differs] <= 2 * TOLERANCE).all()


def test_inference_C42_bf16_prefill_in_any_chunks_stays_within_the_bound() -> None:
    """bf16 logits of 130 tokens read in chunks of 7, 64 and whole, against float32: each within 0.03, and no chunking
    further from it than 1.5 times the whole. Logits reach 2; bf16 keeps 8 bits through 4 layers."""
    config, tensors = rig.CONFIG, rig.tensors()
    tokens, _ = rig.prompts([130], seed=6)
    logits = {}
    for dtype, chunks in ((jnp.float32, (130,)), (jnp.bfloat16, (130, 64, 7))):
        model = weights.from_tensors(config, tensors, dtype)
        for chunk in chunks:
            cache, hidden = rig.lanes(1, 144, dtype), []
            for at in range(0, 130, chunk):
                part = tokens[:, at : at + chunk]
                size = jnp.full((1,), part.shape[1], jnp.int32)
                rows, cache = rig.prefill(
                    model.model, model.head, cache, jnp.pad(part, ((0, 0), (0, chunk - part.shape[1]))), size
                )
                hidden.append(rows[:, : part.shape[1]])
            logits[dtype.__name__, chunk] = np.asarray(model.model.unembed(jnp.concatenate(hidden, axis=1)))
    exact = logits["float32", 130]
    error = {chunk: np.abs(logits["bfloat16", chunk] - exact).max() for chunk in (130, 64, 7)}
    print(f"largest bf16 error by chunk: {error}")
    assert max(error.values()) <= 0.03
    assert max(error.values()) <= 1.5 * error[130]
