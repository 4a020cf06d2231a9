"""What passes over a fixed batch of texts share: caches, requests, prompts in chunks.

Scoring, the judge and the search for near-ties read texts that are there already; replies are made by `infer.engine`.
Lengths are rounded up to a few buckets, so that few programs are compiled.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from infer.decode import Request
from infer.params import SamplingParams
from mtp import cache as kv
from mtp.config import ModelConfig
from mtp.draft_head import MTPHead
from mtp.kernels.sampling import History, Sampling

PAGE_SIZE = 64
# Longer prompts are read in several chunks of the last length.
CHUNK_LENGTHS = (32, 128, 512)


def check_request(prompt: Sequence[int], params: SamplingParams, config: ModelConfig) -> None:
    """Raises ValueError (one line) if the model can't take this prompt, or not with so long a reply."""
    limit = config.max_position_embeddings
    if not prompt:
        raise ValueError("the prompt is empty: it needs at least one token")
    if len(prompt) + params.max_tokens > limit:
        raise ValueError(
            f"a prompt of {len(prompt)} tokens and a reply of up to {params.max_tokens} exceed the model's "
            f"max_position_embeddings={limit}; shorten the prompt or ask for fewer new tokens"
        )
    named = (*prompt, *params.stop_token_ids, *(token for token, _ in params.logit_bias))
    wrong = [i for i in named if not 0 <= i < config.vocab_size]
    if wrong:
        raise ValueError(f"token id {wrong[0]} is outside the vocabulary of {config.vocab_size}")


def bucket(size: int, smallest: int) -> int:
    """`smallest` doubled until it holds `size`."""
    return smallest << max(0, (-(-size // smallest) - 1).bit_length())


def chunk_lengths(size: int) -> list[int]:
    """Lengths, out of `CHUNK_LENGTHS`, of the chunks that `size` tokens are read in; the last may be part empty."""
    whole, rest = divmod(size, CHUNK_LENGTHS[-1])
    return [CHUNK_LENGTHS[-1]] * whole + [length for length in CHUNK_LENGTHS if length >= rest > 0][:1]


def make_cache(
    config: ModelConfig, head: MTPHead | None, *, lanes: int, tokens: int, num_draft_tokens: int, dtype: DTypeLike
) -> kv.Cache:
    """A cache whose lanes hold up to `tokens` tokens each, rounded up to a bucket, with all pages assigned."""
    pages = bucket(tokens, 2 * PAGE_SIZE) // PAGE_SIZE
    cache = kv.init(
        config,
        num_lanes=lanes,
        num_pages=lanes * pages,
        page_size=PAGE_SIZE,
        pages_per_lane=pages,
        num_draft_tokens=num_draft_tokens,
        dtype=dtype,
        with_head=head is not None,
    )
    return replace(cache, page_table=jnp.arange(lanes * pages, dtype=jnp.int32).reshape(lanes, pages))


def make_request(
    params: Sequence[SamplingParams], stop_ids: Sequence[int], vocab_size: int, usable: int | None = None
) -> Request:
    """What the lanes are asked for, on the device. Tokens from `usable` on are never chosen: they have no text."""

    def lanes(name: str, dtype: DTypeLike) -> jax.Array:
        return jnp.asarray([getattr(p, name) for p in params], dtype)

    usable = vocab_size if usable is None else usable
    stops = [(*p.stop_token_ids, *(() if p.ignore_eos else stop_ids)) for p in params]
    width = bucket(max(len(ids) for ids in stops), 4)
    bias = np.zeros((len(params), vocab_size), np.float32)
    bias[:, usable:] = -np.inf
    for lane, p in enumerate(params):
        for token, value in p.logit_bias:
            bias[lane, token] += np.float32(value)
    return Request(
        sampling=Sampling(
            temperature=lanes("temperature", jnp.float32),
            top_k=lanes("top_k", jnp.int32),
            top_p=lanes("top_p", jnp.float32),
            min_p=lanes("min_p", jnp.float32),
            seed=lanes("seed", jnp.uint32),
            sample_index=lanes("sample_index", jnp.uint32),
            presence_penalty=lanes("presence_penalty", jnp.float32),
            frequency_penalty=lanes("frequency_penalty", jnp.float32),
            repetition_penalty=lanes("repetition_penalty", jnp.float32),
            bias=jnp.asarray(bias) if bias.any() else None,
        ),
        stop_ids=jnp.asarray([(*ids, *[-1] * (width - len(ids))) for ids in stops], jnp.int32),
        min_tokens=lanes("min_tokens", jnp.int32),
        max_tokens=lanes("max_tokens", jnp.int32),
        num_draft_tokens=lanes("num_draft_tokens", jnp.int32),
        log_probs=jnp.full((len(params),), -1, jnp.int32),
    )


def make_history(prompt: Sequence[int], reply: Sequence[int], vocab_size: int) -> History:
    """What the penalties of one lane look back on, as of the last token of `reply`; nothing is masked."""
    seen = np.zeros((1, vocab_size), bool)
    seen[0, list(prompt)] = True
    counts = np.bincount(np.asarray(reply, np.int64), minlength=vocab_size)[None].astype(np.int32)
    return History(jnp.asarray(seen), jnp.asarray(counts), jnp.zeros((1,), jnp.int32))


def chunks(prompts: Sequence[Sequence[int]], length: int | None = None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tokens [B, T] and how many of them each lane reads [B], chunk by chunk; all of one length if that is given."""
    longest, start = max(len(prompt) for prompt in prompts), 0
    for size in chunk_lengths(longest) if length is None else [length] * -(-longest // length):
        tokens = np.zeros((len(prompts), size), np.int32)
        parts = [prompt[start : start + size] for prompt in prompts]
        for lane, part in enumerate(parts):
            tokens[lane, : len(part)] = part
        yield tokens, np.array([len(part) for part in parts], np.int32)
        start += size
