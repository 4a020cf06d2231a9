"""Replies of both arms to the same prompts, scored by the stock model; and where texts that must be equal part.

Two kinds of sums come out. By prompt, for comparing the arms: log-probability, first choices, length. By slot of the
window, for one arm alone: each token's log-probability less its expectation, and so on, whose sums are martingales if
and only if the tokens follow the law they should (`scoring.TokenScores`). A token's slot is the number of drafts that
stood before it in its window. Under `rejection` and `coupled` that is known before the token is drawn; under `block`
the count is decided by what comes later as well, so only window starts have a slot of their own and the rest is one.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from infer import batch, programs
from infer.engine import Engine
from infer.judge import texts
from infer.judge.scoring import DraftScores, TokenScores, judge_chunk, judge_drafts
from infer.params import SamplingParams
from infer.replies import Reply
from mtp import cache as kv
from mtp.kernels.sampling import Sampling
from mtp.weights import Loaded

NUM_BINS = 20
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Prompt:
    """What replies are drawn from."""

    id: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Law:
    """How tokens are chosen: fields of `SamplingParams`, the tokens that end a reply, and the first id that has no
    text and is never chosen."""

    sampling: dict[str, Any]
    stop_ids: tuple[int, ...]
    usable_tokens: int


def seed_of(*parts: object) -> int:
    """A seed for these words and numbers, the same everywhere and, for all that matters, different for others."""
    digest = hashlib.blake2s("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "little")


def draw(
    engine: Engine,
    prompts: Sequence[Prompt],
    law: Law,
    *,
    repetitions: int,
    max_tokens: int,
    seed: Sequence[object],
    progress: Progress | None = None,
) -> list[list[Reply]]:
    """`repetitions` replies to each prompt, by prompt.

    Args:
        seed: words that tell this draw from every other; the prompt's id is added to them.
        progress: called with the number of tokens that each turn has brought.
    """
    streams = [
        engine.submit(
            prompt.token_ids,
            SamplingParams(
                **law.sampling,
                max_tokens=max_tokens,
                stop_token_ids=law.stop_ids,
                n=repetitions,
                seed=seed_of(*seed, prompt.id),
            ),
        )
        for prompt in prompts
    ]
    while engine.busy:
        deltas = engine.step()
        if progress is not None:
            progress(sum(len(delta.token_ids) for delta in deltas))
    drawn = [list(stream.result.replies) for stream in streams]
    failed = next((reply for replies in drawn for reply in replies if reply.error is not None), None)
    if failed is not None:
        raise ValueError(f"a reply failed: {failed.error}")
    return drawn


def score(
    loaded: Loaded, prompts: Sequence[Prompt], drawn: Sequence[Sequence[Reply]], law: Law, num_lanes: int
) -> list[list[TokenScores]]:
    """The stock model's scores of every reply token, by prompt and reply, fields as numpy arrays.

    `num_lanes` replies are read at once, those of similar length together.
    """
    program = partial(judge_chunk, loaded.model, sampling=_sampling(loaded, law, num_lanes))
    return _read(program, replace(loaded, head=None), prompts, drawn, num_lanes)


def score_drafts(
    loaded: Loaded, prompts: Sequence[Prompt], drawn: Sequence[Sequence[Reply]], law: Law, num_lanes: int
) -> list[list[DraftScores]]:
    """How every reply token compares with what the head would have drafted in its place; otherwise as `score`."""
    program = partial(judge_drafts, loaded.model, loaded.head, sampling=_sampling(loaded, law, num_lanes))
    return _read(program, loaded, prompts, drawn, num_lanes)


def _sampling(loaded: Loaded, law: Law, num_lanes: int) -> Sampling:
    params = [SamplingParams(**law.sampling, num_draft_tokens=0)] * num_lanes
    return batch.make_request(params, (), loaded.config.vocab_size, law.usable_tokens).sampling


def _read[S](
    program: Callable[..., tuple[S, kv.Cache]],
    loaded: Loaded,
    prompts: Sequence[Prompt],
    drawn: Sequence[Sequence[Reply]],
    num_lanes: int,
) -> list[list[S]]:
    """A program's scores of the replies, their prompts read before."""
    work = [(place, number, reply) for place, replies in enumerate(drawn) for number, reply in enumerate(replies)]
    work.sort(key=lambda item: (len(item[2].token_ids), item[:2]))
    size = max(len(prompts[place].token_ids) + len(reply.token_ids) for place, _, reply in work)
    found: list[list[S | None]] = [[None] * len(replies) for replies in drawn]
    for start in range(0, len(work), num_lanes):
        group = work[start : start + num_lanes]
        cache = batch.make_cache(
            loaded.config,
            loaded.head,
            lanes=num_lanes,
            tokens=size,
            num_draft_tokens=0,
            dtype=loaded.model.embed_tokens.weight.dtype,
        )
        before = [prompts[place].token_ids[:-1] for place, _, _ in group] + [()] * (num_lanes - len(group))
        for tokens, count in batch.chunks(before, texts.CHUNK):
            cache = programs.read_chunk(loaded.model, loaded.head, cache, jnp.asarray(tokens), jnp.asarray(count))
        sequences = [(prompts[place].token_ids[-1], *reply.token_ids) for place, _, reply in group]
        scores = texts.teacher_force(program, cache, sequences)
        for (place, number, _), one in zip(group, scores, strict=True):
            found[place][number] = one
    return found


def slots(steps: Sequence[int], law: str) -> np.ndarray:
    """The slot of each reply token: the first token, and each step's first, have 0."""
    ordinals = np.concatenate([[0], *[np.arange(count) for count in steps]]).astype(int)
    return np.minimum(ordinals, 1) if law == "block" else ordinals


class Clusters:
    """Sums by prompt of one arm under one workload."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self.ids = [prompt.id for prompt in prompts]
        self.counts = np.zeros((4, len(prompts)), int)
        self.log_prob = np.zeros(len(prompts))

    def add(self, place: int, reply: Reply, scores: TokenScores) -> None:
        """Takes in one reply to prompt number `place`."""
        ended = reply.finish_reason == "stop"
        self.counts[:, place] += (1, len(reply.token_ids), int(np.sum(scores.not_first)), int(ended))
        self.log_prob[place] += np.sum(scores.log_prob, dtype=np.float64)

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return int(self.counts[1].sum())

    def record(self) -> dict[str, Any]:
        """The record's figures."""
        replies, tokens, not_first, ended = self.counts.tolist()
        return {
            "prompt": self.ids,
            "num_replies": replies,
            "num_tokens": tokens,
            "sum_log_prob": self.log_prob.tolist(),
            "num_not_first": not_first,
            "sum_length": tokens,
            "num_ended": ended,
        }


class Martingale:
    """Sums by slot of one arm."""

    def __init__(self, num_slots: int, seed: int) -> None:
        """`seed` is of the randomness within a token's own probability."""
        self.num_tokens = np.zeros(num_slots, int)
        # excess and variance of the log-probability, and of being the first choice
        self.sums = np.zeros((4, num_slots))
        self.pit = np.zeros((num_slots, NUM_BINS), int)
        self.rng = np.random.default_rng(seed)

    def add(self, reply: Reply, scores: TokenScores, law: str) -> None:
        """Takes in one reply."""
        slot = slots(reply.steps, law)
        place = scores.below + self.rng.random(len(slot)) * scores.mass
        bins = np.clip((place * NUM_BINS).astype(int), 0, NUM_BINS - 1)
        np.add.at(self.num_tokens, slot, 1)
        np.add.at(self.pit, (slot, bins), 1)
        for row, values in zip(
            self.sums, (scores.excess, scores.variance, scores.first_excess, scores.first_variance), strict=True
        ):
            np.add.at(row, slot, values.astype(np.float64))

    def record(self) -> dict[str, Any]:
        """The record's figures."""
        excess, variance, first_excess, first_variance = self.sums.tolist()
        return {
            "slot": list(range(len(self.num_tokens))),
            "num_tokens": self.num_tokens.tolist(),
            "sum_log_prob_excess": excess,
            "var_log_prob": variance,
            "sum_first_excess": first_excess,
            "var_first": first_variance,
            "pit_counts": self.pit.tolist(),
        }


def differences(
    loaded: Loaded,
    prompts: Sequence[Prompt],
    stock: Sequence[Sequence[Reply]],
    candidate: Sequence[Sequence[Reply]],
    law: Law,
    seeds: Sequence[int],
) -> list[dict[str, Any]]:
    """Where the candidate's replies first leave the stock arm's, and by how much the stock arm's best token lay above
    the second there: of each prompt's first reply."""
    rows: list[dict[str, Any]] = []
    for prompt, ours, theirs, seed in zip(prompts, candidate, stock, seeds, strict=True):
        plain, own = theirs[0].token_ids, ours[0].token_ids
        place = next((i for i, (a, b) in enumerate(zip_longest(own, plain)) if a != b), None)
        margin = None
        if place is not None:
            margin = decision_margin(loaded, [*prompt.token_ids, *plain[:place]], law, seed, place)
        rows.append({"prompt": prompt.id, "num_tokens": len(plain), "first_difference": place, "margin": margin})
    return rows


def decision_margin(loaded: Loaded, token_ids: Sequence[int], law: Law, seed: int, produced: int) -> float:
    """How far plain decoding's choice behind these tokens, of which `produced` are the reply's, lies above the second:
    in logits when greedy, else in log-probability plus noise."""
    cache = batch.make_cache(
        loaded.config,
        None,
        lanes=1,
        tokens=len(token_ids),
        num_draft_tokens=0,
        dtype=loaded.model.embed_tokens.weight.dtype,
    )
    for tokens, count in batch.chunks([token_ids], texts.CHUNK):
        cache = programs.read_chunk(loaded.model, None, cache, jnp.asarray(tokens), jnp.asarray(count))
    params = SamplingParams(**law.sampling, seed=seed, num_draft_tokens=0)
    request = batch.make_request([params], law.stop_ids, loaded.config.vocab_size, law.usable_tokens)
    margin = programs.decision_margin(loaded.model, cache, request, jnp.full((1,), produced, jnp.int32))
    return float(jax.device_get(margin)[0])
