"""Timed passes: the same requests through an engine of each arm, and what the clock and the counters said.

An arm's figures are raw: seconds, tokens, steps. Whatever is derived from them (rates, ratios, medians) is derived
where the record is scored. Reply lengths are fixed, so that both arms emit the same number of tokens.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from infer import floor
from infer.engine import Engine
from infer.judge.config import Workload
from infer.params import SamplingParams
from infer.replies import Reply
from mtp.weights import Loaded

# The smallest upper bound of the buckets by context; each is twice the one before.
SMALLEST_CONTEXT = 64
# Points of a curve in the record.
CURVE_POINTS = 200


@dataclass(frozen=True)
class TimedRequest:
    """A prompt and the exact length of its reply."""

    prompt: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True)
class Sample:
    """How a pass stood after one turn."""

    # since the first submission
    seconds: float
    # of all replies, as the host has seen them
    tokens: int
    live: int
    waiting: int
    # share of the pool's pages that live requests hold
    fill: float


def make_requests(workload: Workload, stream: Sequence[int], seed: int) -> list[TimedRequest]:
    """The requests of one pass: prompts cut from a stream of tokens at places drawn with `seed`, replies of lengths
    spread evenly over `reply_tokens` and its stagger, in a drawn order.

    Raises:
        ValueError: the stream is shorter than a prompt.
    """
    if len(stream) < workload.prompt_tokens:
        raise ValueError(
            f"the texts hold {len(stream)} tokens and a prompt takes prompt_tokens={workload.prompt_tokens}"
        )
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, len(stream) - workload.prompt_tokens + 1, workload.num_requests)
    share = np.linspace(1 - workload.stagger, 1 + workload.stagger, workload.num_requests)
    lengths = rng.permutation(np.maximum(1, np.rint(share * workload.reply_tokens).astype(int)))
    return [
        TimedRequest(tuple(stream[start : start + workload.prompt_tokens]), int(length))
        for start, length in zip(starts, lengths, strict=True)
    ]


def measure(
    engine: Engine, workload: Workload, requests: Sequence[TimedRequest], sampling: dict[str, Any], *, seed: int
) -> dict[str, Any]:
    """Runs the requests through a warm engine and returns an arm's raw figures.

    Args:
        sampling: fields of `SamplingParams` that all requests share.

    Raises:
        ValueError: the workload's window never opened: nobody waited, or the pool never filled.
    """
    before = engine.stats
    begun = time.perf_counter()
    streams = [
        engine.submit(
            request.prompt,
            SamplingParams(**sampling, max_tokens=request.num_tokens, ignore_eos=True, seed=seed, sample_index=number),
        )
        for number, request in enumerate(requests)
    ]

    def sample() -> Sample:
        now = engine.stats
        held = now.num_pages - now.free_pages - now.prefix_pages
        return Sample(
            time.perf_counter() - begun,
            now.decode_tokens - before.decode_tokens,
            now.live,
            now.waiting,
            held / now.num_pages,
        )

    samples = [sample()]
    while engine.busy:
        engine.step()
        samples.append(sample())
    after = engine.stats
    replies = [stream.result.reply for stream in streams]
    failed = next((reply for reply in replies if reply.finish_reason != "length"), None)
    if failed is not None:
        raise ValueError(f"a timed reply ended by {failed.finish_reason}: {failed.error}")
    seconds, tokens = timed(samples, workload)
    steps = after.full_steps - before.full_steps
    return {
        "wall_seconds": seconds,
        "wall_tokens": tokens,
        "decode_seconds": after.full_seconds - before.full_seconds,
        "decode_tokens": after.full_tokens - before.full_tokens,
        "num_verify_steps": sum(reply.num_verify_steps for reply in replies),
        "drafted": _columns(reply.drafted for reply in replies),
        "accepted": _columns(reply.accepted for reply in replies),
        "by_context": by_context(replies),
        "fill": curve(samples),
        "num_preemptions": after.num_preemptions - before.num_preemptions,
        "step_seconds": (after.full_seconds - before.full_seconds) / steps if steps else None,
    }


def timed(samples: Sequence[Sample], workload: Workload) -> tuple[float, int]:
    """Seconds and tokens of the part of a pass that counts.

    Raises:
        ValueError: there is no such part.
    """
    last = samples[-1].tokens
    if workload.window == "whole":
        end = next(sample for sample in samples if sample.tokens == last)
        return end.seconds, last
    if workload.window == "refill":
        if not any(sample.waiting for sample in samples[1:]):
            raise ValueError(f"nobody ever waits: {workload.num_requests} requests don't refill the lanes")
        busy = max(number for number, sample in enumerate(samples) if sample.waiting)
        end = samples[min(busy + 1, len(samples) - 1)]
        return end.seconds, end.tokens
    inside = [sample.waiting > 0 and sample.fill >= workload.full_share for sample in samples]
    pairs = [
        (early, late)
        for early, late, first, second in zip(samples, samples[1:], inside, inside[1:], strict=False)
        if first and second
    ]
    if not pairs:
        fullest = max(sample.fill for sample in samples if sample.waiting or sample is samples[0])
        raise ValueError(
            f"the pool is never {workload.full_share:.0%} full while requests wait (at most {fullest:.0%}): "
            "make it smaller or send more requests"
        )
    seconds = sum(late.seconds - early.seconds for early, late in pairs)
    return seconds, sum(late.tokens - early.tokens for early, late in pairs)


def by_context(replies: Sequence[Reply]) -> list[dict[str, int]]:
    """Tokens and verify steps by the number of tokens before the step; each bucket's `context` is its upper bound."""
    found: dict[int, list[int]] = {}
    for reply in replies:
        context = reply.prompt_tokens + 1
        for count in reply.steps:
            bound = SMALLEST_CONTEXT << max(0, (-(-context // SMALLEST_CONTEXT) - 1).bit_length())
            bucket = found.setdefault(bound, [0, 0])
            bucket[0] += count
            bucket[1] += 1
            context += count
    return [{"context": bound, "tokens": tokens, "steps": steps} for bound, (tokens, steps) in sorted(found.items())]


def curve(samples: Sequence[Sample]) -> list[list[float]]:
    """Seconds and fill, thinned out to `CURVE_POINTS` points."""
    chosen = np.unique(np.linspace(0, len(samples) - 1, min(CURVE_POINTS, len(samples))).astype(int))
    return [[round(samples[i].seconds, 4), round(samples[i].fill, 4)] for i in chosen]


def plain_floor(loaded: Loaded, workload: Workload) -> float | None:
    """Seconds that an H200 needs at least for one plain step (see `infer.floor`). None on other devices."""
    if "H200" not in jax.devices()[0].device_kind:
        return None
    terms = floor.step_terms(
        loaded.config,
        loaded.model,
        None,
        num_lanes=workload.lanes,
        context=workload.prompt_tokens + workload.reply_tokens / 2,
        num_draft_tokens=0,
    )
    return floor.whole(terms)


def _columns(rows: Any) -> list[int]:
    """Sums by position."""
    return [int(total) for total in np.sum(list(rows), axis=0)]
