"""Fixed texts by teacher forcing, once as the stock arm reads them (a prefill) and once on the candidate's own path.

That path is generation's: windows of k + 1 rows over pages, with wrong drafts at pseudo-random rows, so that every
count from 0 to k of drafts is committed, state and all. Many texts are read at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from infer import batch, programs
from infer.decode import HONEST, Verbs
from infer.judge import scoring
from infer.params import SamplingParams
from mtp import cache as kv
from mtp.kernels.sampling import Sampling
from mtp.weights import Loaded

# Windows that one call runs, and rows of a chunk, a multiple of `scoring.BLOCK`.
SLAB, CHUNK = 16, 32


@dataclass(frozen=True)
class Text:
    """Something to read: at least two tokens."""

    id: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Reading:
    """Log-probabilities of a text's tokens behind the first, in nats."""

    log_probs: np.ndarray
    # how often 0..k drafts of a window were committed; empty for a plain reading
    committed: tuple[int, ...] = ()


def read_plainly(loaded: Loaded, texts: Sequence[Text], num_lanes: int) -> list[Reading]:
    """As the stock arm reads them, chunk by chunk."""
    found: list[Reading] = []
    for group, size in _groups(texts, num_lanes):
        cache = batch.make_cache(
            loaded.config, None, lanes=num_lanes, tokens=size, num_draft_tokens=0, dtype=_dtype(loaded)
        )
        judge_chunk = partial(scoring.judge_chunk, loaded.model, sampling=Sampling.alike(num_lanes))
        found += [Reading(one.log_prob) for one in teacher_force(judge_chunk, cache, [t.token_ids for t in group])]
    return found


def teacher_force[S](
    program: Callable[..., tuple[S, kv.Cache]], cache: kv.Cache, sequences: Sequence[Sequence[int]]
) -> list[S]:
    """Scores of every token behind the first of each sequence, read chunk by chunk; fields are numpy arrays [T].

    Args:
        program: from cache, tokens, how many of each lane, and targets, to scores [B, T] and the cache behind them.
        cache: holds what comes before each sequence, and room for it; lanes beyond the sequences stay idle. It is
            used up.
    """
    lanes = cache.lengths.shape[0]
    rows = [sequence[:-1] for sequence in sequences] + [()] * (lanes - len(sequences))
    behind = [sequence[1:] for sequence in sequences] + [()] * (lanes - len(sequences))
    parts: list[list[S]] = [[] for _ in sequences]
    for (tokens, count), (targets, _) in zip(batch.chunks(rows, CHUNK), batch.chunks(behind, CHUNK), strict=True):
        scores, cache = program(cache, jnp.asarray(tokens), jnp.asarray(count), jnp.asarray(targets))
        scores = jax.device_get(scores)
        for lane, (own, end) in enumerate(zip(parts, count, strict=False)):
            own.append(jax.tree.map(lambda x, lane=lane, end=end: x[lane, :end], scores))
    return [jax.tree.map(lambda *x: np.concatenate(x), *own) for own in parts]


def read_in_windows(
    loaded: Loaded, texts: Sequence[Text], num_lanes: int, *, num_draft_tokens: int, seed: int, verbs: Verbs = HONEST
) -> list[Reading]:
    """As the candidate reads them. The first token is a prefill of its own, all others come from windows.

    Args:
        seed: of the counts that are committed and of the wrong drafts.
    """
    found: list[Reading] = []
    for number, (group, size) in enumerate(_groups(texts, num_lanes)):
        rng = np.random.default_rng((seed, number))
        cache = batch.make_cache(
            loaded.config,
            None,
            lanes=num_lanes,
            tokens=size,
            num_draft_tokens=num_draft_tokens,
            dtype=_dtype(loaded),
        )
        ids = np.zeros((num_lanes, size + num_draft_tokens + 1), np.int32)
        lengths = np.ones((num_lanes,), np.int32)
        for lane, text in enumerate(group):
            ids[lane, : len(text.token_ids)], lengths[lane] = text.token_ids, len(text.token_ids)
        one = np.ones((num_lanes,), np.int32)
        first, cache = programs.score_chunk(loaded.model, None, cache, ids[:, :1], one, ids[:, 1:2])
        gen = programs.start_scoring(cache, jnp.asarray(ids[:, 1]), max_reply=1)
        # the target's own law: nothing filtered, no token forbidden
        own = SamplingParams(temperature=1.0, max_tokens=size + 1, num_draft_tokens=num_draft_tokens)
        request = batch.make_request([own] * num_lanes, (), loaded.config.vocab_size)
        windows = _windows(rng, ids, lengths, num_draft_tokens, loaded.config.vocab_size)
        committed, pieces = windows.num_committed, []
        for start in range(0, len(committed), SLAB):
            slab = jax.tree.map(lambda x, start=start: jnp.asarray(x[start : start + SLAB], jnp.int32), windows)
            log_probs, gen = scoring.read_windows(loaded.model, gen, request, slab, verbs=verbs)
            pieces.append(log_probs)
        log_probs, first = np.concatenate(jax.device_get(pieces)), np.asarray(first)
        for lane in range(len(group)):
            kept = [log_probs[w, lane, :count] for w, count in enumerate(committed[:, lane])]
            counts = np.bincount(committed[:, lane], minlength=num_draft_tokens + 2)[1:]
            found.append(Reading(np.concatenate([first[lane], *kept]), tuple(int(n) for n in counts)))
    return found


def compare(texts: Sequence[Text], stock: Sequence[Reading], candidate: Sequence[Reading]) -> list[dict[str, Any]]:
    """The record's figures of each text."""
    rows: list[dict[str, Any]] = []
    for text, plain, own in zip(texts, stock, candidate, strict=True):
        gap = np.abs(own.log_probs.astype(np.float64) - plain.log_probs)
        rows.append(
            {
                "id": text.id,
                "num_tokens": len(gap),
                "sum_abs_diff": float(gap.sum()),
                "max_abs_diff": float(gap.max()),
                "sum_log_prob_stock": float(plain.log_probs.sum(dtype=np.float64)),
                "sum_log_prob_candidate": float(own.log_probs.sum(dtype=np.float64)),
                "committed": list(own.committed),
            }
        )
    return rows


def _windows(
    rng: np.random.Generator, ids: np.ndarray, lengths: np.ndarray, k: int, vocab_size: int
) -> scoring.Windows:
    """All windows of all lanes, as numpy arrays; empty ones fill the last slab. All counts 1..k + 1 of rows are equally
    likely to be kept."""
    lanes = len(ids)
    place = np.ones((lanes,), np.int64)
    lane = np.arange(lanes)[:, None]
    made: list[tuple[np.ndarray, ...]] = []
    while np.any(place < lengths - 1) or len(made) % SLAB:
        left = lengths - 1 - place
        num_drafts = np.clip(left - 1, 0, k)
        committed = np.where(left > 0, 1 + (rng.random(lanes) * (num_drafts + 1)).astype(np.int64), 0)
        index = np.minimum(place[:, None] + 1 + np.arange(k + 1)[None, :], ids.shape[1] - 1)
        targets = ids[lane, index]
        # any token but the text's own
        wrong = (targets[:, :k] + rng.integers(1, vocab_size, (lanes, k))) % vocab_size
        right = np.arange(k)[None, :] < committed[:, None] - 1
        made.append((np.where(right, targets[:, :k], wrong), num_drafts, targets, committed))
        place = place + committed
    return scoring.Windows(*(np.stack(x) for x in zip(*made, strict=True)))


def _groups(texts: Sequence[Text], num_lanes: int) -> list[tuple[Sequence[Text], int]]:
    """Texts that are read together, each group with the length of the longest of all, so that one program serves."""
    size = max(len(text.token_ids) for text in texts)
    return [(texts[start : start + num_lanes], size) for start in range(0, len(texts), num_lanes)]


def _dtype(loaded: Loaded) -> Any:
    return loaded.model.embed_tokens.weight.dtype
