"""Chi-square of a million lanes through the jitted code with its real counter noise, seeds as lanes.

A Markov model over four letters generates three windows in a row, each starting where the last one stopped,
and plain tokens after them up to five tokens. The joint law of the five is compared with the target's. The
same statistic must condemn noise that is used twice, and a draft that is not drawn from the q of the ratio.
Everything is seeded; the critical value is passed by chance once in 10,000 times.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp.acceptance import LAWS, accept
from mtp.kernels.sampling import Sampling, WindowNoise, process_logits, sample, target_noise

NUM_LANES, NUM_WINDOWS, NUM_TOKENS, VOCAB, START = 2**20, 3, 5, 4, 100
CHUNK = 2**14


class SharedKey(WindowNoise):
    """Coins that are the uniform numbers behind the drafts' own Gumbel noise."""

    def coins(self, num_draft_tokens):
        first = [self.draft("rejection", i, VOCAB)[:, 0] for i in range(num_draft_tokens)]
        return jnp.stack([-jnp.expm1(-jnp.exp(-noise)) for noise in first], axis=1)


class AbsoluteCoins(WindowNoise):
    """Coins that belong to the draft's absolute position, so that the next window meets them again."""

    def coins(self, num_draft_tokens):
        each = [WindowNoise(self.sampling, self.position + 1 + i).coins(1) for i in range(num_draft_tokens)]
        return jnp.concatenate(each, axis=1)


@cache
def tables() -> tuple[jax.Array, ...]:
    """Target, draft and bfloat16 draft log-probabilities [V, V] by the last token; T = 0.8, top-p 0.97."""
    rng = np.random.default_rng(11)
    target = rng.normal(20, 1.2, (VOCAB, VOCAB)).astype(np.float32)
    draft = target + rng.normal(0, 0.9, (VOCAB, VOCAB)).astype(np.float32)
    sampling = Sampling.alike(1, temperature=0.8, top_p=0.97)
    rounded = jnp.asarray(draft).astype(jnp.bfloat16).astype(jnp.float32)
    rows = (process_logits(jnp.asarray(x)[None], sampling)[0] for x in (target, draft, rounded))
    return tuple(rows)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def generate(law: str, k: int, noise_of: type, num_lanes: int, target, draft, drawn_from):
    """[lanes, NUM_TOKENS] tokens after letter 0, speculative windows first and then plain decoding, in chunks
    that fit the cache; and the drafts accepted in each window.
    """
    seeds = jnp.arange(num_lanes, dtype=jnp.uint32).reshape(-1, CHUNK)
    one = partial(generate_chunk, law, k, noise_of, target, draft, drawn_from)
    tokens, num_accepted = jax.lax.map(one, seeds)
    return tokens.reshape(-1, NUM_TOKENS), num_accepted


def generate_chunk(law: str, k: int, noise_of: type, target, draft, drawn_from, seeds):
    """`generate` for one chunk of lanes."""
    sampling = Sampling(**(vars(Sampling.alike(CHUNK)) | {"seed": seeds}))
    columns = jnp.arange(NUM_TOKENS)[None, :]

    def put(tokens, at, token):
        return jnp.where(columns == at[:, None], token[:, None], tokens)

    def window(state, _):
        tokens, filled, last = state
        noise = noise_of(sampling, START + filled)
        drafts, context = [], last
        for i in range(k):
            context = sample(drawn_from[context], noise.draft(law, i, VOCAB))
            drafts.append(context)
        rows = jnp.stack([last, *drafts], axis=1)
        num_drafts = jnp.full_like(last, k)
        got = accept(law, target[rows], draft[rows[:, :-1]], rows[:, 1:], num_drafts, noise)
        for i in range(k):
            tokens = jnp.where((i < got.num_accepted)[:, None], put(tokens, filled + i, drafts[i]), tokens)
        tokens = put(tokens, filled + got.num_accepted, got.next_token)
        return (tokens, filled + got.num_accepted + 1, got.next_token), got.num_accepted

    def plain(state, _):
        tokens, filled, last = state
        noise = target_noise(sampling, (START + filled + 1)[:, None], VOCAB)[:, 0]
        token = sample(target[last], noise)
        return (put(tokens, filled, token), filled + 1, token), None

    zeros = jnp.zeros(CHUNK, jnp.int32)
    state = (jnp.zeros((CHUNK, NUM_TOKENS), jnp.int32), zeros, zeros)
    state, num_accepted = jax.lax.scan(window, state, length=NUM_WINDOWS)
    state, _ = jax.lax.scan(plain, state, length=NUM_TOKENS - NUM_WINDOWS)
    return state[0], num_accepted


def chi_square(tokens: np.ndarray, target: np.ndarray) -> tuple[float, float]:
    """(statistic, its critical value at 1e-4) of the joint law of all tokens of a lane."""
    expected = target[0]
    for _ in range(tokens.shape[1] - 1):
        expected = expected[..., None] * target
    expected = expected.ravel() * len(tokens)
    cells = np.ravel_multi_index(tuple(tokens.T), (VOCAB,) * tokens.shape[1])
    observed = np.bincount(cells, minlength=expected.size)
    assert not observed[expected == 0].any()
    rare = expected < 10
    expected, observed = (np.append(x[~rare], max(x[rare].sum(), 1e-9)) for x in (expected, observed))
    degrees = len(expected) - 1
    # Wilson and Hilferty's approximation; 3.719 is the normal quantile of 1 - 1e-4.
    critical = degrees * (1 - 2 / (9 * degrees) + 3.719 * np.sqrt(2 / (9 * degrees))) ** 3
    return float(np.sum((observed - expected) ** 2 / expected)), float(critical)


@cache
def texts(
    law: str, noise: type = WindowNoise, bf16_draft: bool = False, num_lanes: int = NUM_LANES
) -> tuple[np.ndarray, float]:
    """Tokens of all lanes, and the mean number of accepted drafts, at k = 2."""
    target, draft, rounded = tables()
    tokens, num_accepted = generate(law, 2, noise, num_lanes, target, draft, rounded if bf16_draft else draft)
    return np.asarray(tokens), float(np.mean(num_accepted))


def verdict(tokens: np.ndarray) -> float:
    """Chi-square over its critical value: above 1 is biased."""
    statistic, critical = chi_square(tokens, np.exp(np.asarray(tables()[0], np.float64)))
    print(f"chi-square {statistic:.1f}, critical {critical:.1f}")
    return statistic / critical


@pytest.mark.parametrize("law", LAWS)
def test_joint_law_over_three_windows(law):
    """Three windows and the plain tokens after them have the target's joint law; so have the first three."""
    tokens, accepted = texts(law)
    assert 0.5 < accepted < 2
    assert verdict(tokens) < 1
    assert verdict(tokens[:, :3]) < 1


def test_inference_C26_one_key_for_draft_and_coin_is_caught():
    """Coins that share the drafts' randomness bias the text."""
    assert verdict(texts("rejection", SharedKey, num_lanes=2**16)[0]) > 3


def test_coins_by_absolute_position_are_caught_under_block():
    """Block verification looks at coins beyond its stopping point, which the next window would meet again."""
    assert verdict(texts("block", AbsoluteCoins)[0]) > 2


def test_inference_C27_bf16_draft_against_float32_ratio_is_caught():
    """A draft drawn from rounded logits does not have the q of the ratio."""
    assert verdict(texts("rejection", bf16_draft=True)[0]) > 2
