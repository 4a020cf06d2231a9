"""Generates replies to a fixed batch of prompts: prefill, first token, then the decode loop, read every few steps.

It is the driver for one prompt or a file of them; nothing enters or leaves the batch under way. Prompt, reply and chunk
lengths are rounded up to a few buckets, so that few programs are compiled, and that is done and timed before the clock
of the replies starts.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from infer import programs
from infer.decode import RUNNING, STOPPED, Generation, Request
from infer.params import LAWS, SamplingParams
from infer.speculative import decode_loop
from infer.tokenizer import TextStream, Tokenizer
from mtp import cache as kv
from mtp.config import ModelConfig
from mtp.draft_head import MTPHead
from mtp.kernels.sampling import Sampling
from mtp.model import Qwen35
from mtp.weights import Loaded

PAGE_SIZE = 64
# Longer prompts are read in several chunks of the last length.
CHUNK_LENGTHS = (32, 128, 512)
# Where the two best values that plain decoding compares lie closer than this, in float32, rounding may choose.
NEAR_TIE = 1e-5
# Steps on the device between two looks of the host.
STEPS_PER_READ = 8

Show = Callable[[int, str], None]


@dataclass(frozen=True)
class Reply:
    """One reply. Everything in it ends at the same token, wherever the end was found."""

    text: str
    # an end token is the last; of a stop string only the token in whose middle it begins is left
    token_ids: tuple[int, ...]
    # "stop" (end token or stop string) or "length"
    finish_reason: str
    prompt_tokens: int
    # passes of the target that emitted tokens of this reply; the first token is the prefill's
    num_verify_steps: int
    # by position in the window: how often it was drafted, and emitted as accepted
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]


@dataclass(frozen=True)
class Batch:
    """The replies in the order of their prompts, and how long they took, in seconds."""

    replies: tuple[Reply, ...]
    # compiling and warming up; 0 when an earlier batch has done it
    compile_seconds: float
    # from the first chunk of the prompts until the host has the first tokens of all lanes
    time_to_first_token: float
    # from then to the end of the last reply
    decode_seconds: float


@dataclass(frozen=True)
class Mismatch:
    """Where a reply first differs from plain decoding's."""

    # number of the reply token
    position: int
    # how far plain decoding's token lay above the second there: in logits if greedy, else in log-probability plus noise
    margin: float

    @property
    def near_tie(self) -> bool:
        """Whether rounding alone explains it."""
        return self.margin <= NEAR_TIE


@dataclass(frozen=True)
class Summary:
    """What some replies have in common: the figures of the tables and JSON lines."""

    num_tokens: int
    num_verify_steps: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    # mean tokens a verify step; None without steps
    acceptance_length: float | None
    # accepted / drafted by position; None where nothing was drafted
    accepted_by_position: tuple[float | None, ...]


def summarise(replies: Iterable[Reply]) -> Summary:
    """Adds replies up. A reply's first token comes from the prefill and counts for no verify step."""
    replies = list(replies)
    steps = sum(reply.num_verify_steps for reply in replies)
    tokens = sum(len(reply.token_ids) for reply in replies)
    drafted = tuple(sum(column) for column in zip(*(reply.drafted for reply in replies), strict=True))
    accepted = tuple(sum(column) for column in zip(*(reply.accepted for reply in replies), strict=True))
    return Summary(
        num_tokens=tokens,
        num_verify_steps=steps,
        drafted=drafted,
        accepted=accepted,
        acceptance_length=decoded_tokens(replies) / steps if steps else None,
        accepted_by_position=tuple(a / d if d else None for a, d in zip(accepted, drafted, strict=True)),
    )


def decoded_tokens(replies: Iterable[Reply]) -> int:
    """Tokens that verify steps emitted: all but the first of each reply."""
    return sum(max(len(reply.token_ids) - 1, 0) for reply in replies)


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
    wrong = [i for i in (*prompt, *params.stop_token_ids) if not 0 <= i < config.vocab_size]
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

    stops = [(*p.stop_token_ids, *(() if p.ignore_eos else stop_ids)) for p in params]
    width = bucket(max(len(ids) for ids in stops), 4)
    bias = None
    if usable is not None and usable < vocab_size:
        row = np.where(np.arange(vocab_size) < usable, np.float32(0), np.float32(-np.inf))
        bias = jnp.asarray(np.tile(row, (len(params), 1)))
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
            bias=bias,
        ),
        stop_ids=jnp.asarray([(*ids, *[-1] * (width - len(ids))) for ids in stops], jnp.int32),
        min_tokens=lanes("min_tokens", jnp.int32),
        max_tokens=lanes("max_tokens", jnp.int32),
        num_draft_tokens=lanes("num_draft_tokens", jnp.int32),
        log_probs=jnp.full((len(params),), -1, jnp.int32),
    )


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


@dataclass(frozen=True)
class _Counts:
    """A lane's counters at one look of the host."""

    tokens: int
    steps: int
    drafted: np.ndarray
    accepted: np.ndarray


@dataclass
class _Lane:
    """One reply under way, as the host sees it."""

    stream: TextStream
    prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    looks: list[_Counts] = field(default_factory=list)
    finish_reason: str | None = None

    def reply(self) -> Reply:
        """The finished reply. Steps behind the cut, and drafts accepted behind it, don't count."""
        kept = self.stream.num_tokens
        index = next(i for i, look in enumerate(self.looks) if look.tokens >= kept)
        end, accepted = self.looks[index], self.looks[index].accepted
        if index and kept < end.tokens:
            # One step lies between these looks: see `BatchGenerator._decode`.
            before = self.looks[index - 1]
            stands = np.arange(len(accepted)) < kept - before.tokens
            accepted = before.accepted + np.where(stands, end.accepted - before.accepted, 0)
        return Reply(
            text=self.stream.text,
            token_ids=tuple(self.token_ids[:kept]),
            finish_reason=self.finish_reason or "length",
            prompt_tokens=self.prompt_tokens,
            num_verify_steps=end.steps,
            drafted=tuple(end.drafted.tolist()),
            accepted=tuple(accepted.tolist()),
        )


class BatchGenerator:
    """Generates with one model; what it has compiled for one batch serves the next of the same buckets."""

    def __init__(self, loaded: Loaded, tokenizer: Tokenizer, num_lanes: int = 1) -> None:
        """Smaller batches are filled up with idle lanes to `num_lanes`."""
        self.loaded, self.tokenizer, self.num_lanes = loaded, tokenizer, num_lanes
        self._warm: set[tuple[object, ...]] = set()

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        num_draft_tokens: int | None = None,
        show: Show | None = None,
    ) -> Batch:
        """Replies to prompts of token ids.

        Args:
            params: for all, or one each; their `verify` must be the same.
            num_draft_tokens: k of the program; lanes draft no more than it. The lanes' largest if None.
            show: called with the number of the prompt and its next piece of text, as the replies grow.

        Raises:
            ValueError: one line; a prompt that can't be taken, drafts without a head, or laws that differ.
        """
        params = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        params = [p.with_defaults(num_draft_tokens=3, verify=LAWS[0]) for p in params]
        k = max(p.num_draft_tokens for p in params) if num_draft_tokens is None else num_draft_tokens
        laws = sorted({p.verify for p in params})
        for prompt, p in zip(prompts, params, strict=True):
            check_request(prompt, p, self.loaded.config)
        if len(laws) > 1:
            raise ValueError(f"one batch has one law of acceptance, and verify is {' and '.join(laws)}")
        if k > 0 and self.loaded.head is None:
            raise ValueError(f"num_draft_tokens={k} needs an MTP head, and this checkpoint has no mtp.* tensors; use 0")
        lanes = [
            _Lane(TextStream(self.tokenizer, p.stop, p.min_tokens), len(prompt))
            for prompt, p in zip(prompts, params, strict=True)
        ]
        idle = max(0, self.num_lanes - len(lanes))
        job = _Job(
            self.loaded.model,
            self.loaded.head if k > 0 else None,
            self._request([*params, *[params[0]] * idle]),
            chunks=tuple(chunks([*prompts, *[()] * idle])),
            live=np.arange(len(lanes) + idle) < len(lanes),
            max_reply=bucket(max(p.max_tokens for p in params), 32),
            num_draft_tokens=k,
            # plain decoding has none: one program serves them all
            law=laws[0] if k else LAWS[0],
        )
        tokens = max(len(prompt) + p.max_tokens for prompt, p in zip(prompts, params, strict=True))
        cache = self._cache(job.head, len(lanes) + idle, tokens, k)

        begun = time.perf_counter()
        key = (cache.page_table.shape, job.request.stop_ids.shape, job.max_reply, k, job.law)
        if new := {(*key, tokens.shape) for tokens, _ in job.chunks} - self._warm:
            cache = job.warm_up(cache)
            self._warm |= new
        warm = time.perf_counter()
        gen = job.prefill(cache)
        _look(gen, lanes, show)
        first = time.perf_counter()
        while any(lane.finish_reason is None for lane in lanes):
            # A stop string may cut any step, and what it cuts off must not be counted: look after each.
            searching = any(lane.stream.stop for lane in lanes if lane.finish_reason is None)
            gen = job.decode(gen, 1 if searching else STEPS_PER_READ)
            if ended := _look(gen, lanes, show):
                gen = programs.end_replies(gen, jnp.asarray(np.isin(np.arange(len(job.live)), ended)))
        end = time.perf_counter()
        return Batch(tuple(lane.reply() for lane in lanes), warm - begun, first - warm, end - first)

    def mismatch(self, prompt: Sequence[int], reply: Reply, plain: Reply, params: SamplingParams) -> Mismatch | None:
        """Where a reply leaves plain decoding's reply to the same prompt; None if it never does."""
        pairs = enumerate(zip_longest(reply.token_ids, plain.token_ids))
        position = next((i for i, (ours, theirs) in pairs if ours != theirs), None)
        if position is None:
            return None
        tokens = [*prompt, *plain.token_ids[:position]]
        cache = self._cache(None, 1, len(tokens), 0)
        for part, count in chunks([tokens]):
            cache = programs.read_chunk(self.loaded.model, None, cache, jnp.asarray(part), jnp.asarray(count))
        produced = jnp.full((1,), position, jnp.int32)
        margin = programs.decision_margin(self.loaded.model, cache, self._request([params]), produced)
        return Mismatch(position, float(margin[0]))

    def _request(self, params: Sequence[SamplingParams]) -> Request:
        vocab_size = self.loaded.config.vocab_size
        return make_request(params, self.tokenizer.stop_ids, vocab_size, usable=len(self.tokenizer))

    def _cache(self, head: MTPHead | None, lanes: int, tokens: int, num_draft_tokens: int) -> kv.Cache:
        dtype = self.loaded.model.embed_tokens.weight.dtype
        return make_cache(
            self.loaded.config, head, lanes=lanes, tokens=tokens, num_draft_tokens=num_draft_tokens, dtype=dtype
        )


@dataclass(frozen=True)
class _Job:
    """A batch on the device: what all its calls have in common."""

    model: Qwen35
    head: MTPHead | None
    request: Request
    chunks: tuple[tuple[np.ndarray, np.ndarray], ...]
    # lanes that have a prompt
    live: np.ndarray
    max_reply: int
    num_draft_tokens: int
    law: str

    def prefill(self, cache: kv.Cache) -> Generation:
        """Reads all prompts and chooses the first token of each reply."""
        for tokens, count in self.chunks:
            cache = programs.read_chunk(self.model, self.head, cache, jnp.asarray(tokens), jnp.asarray(count))
        return programs.start_replies(self.model, cache, self.request, jnp.asarray(self.live), max_reply=self.max_reply)

    def decode(self, gen: Generation, num_steps: int) -> Generation:
        """Up to so many steps of the live lanes."""
        return decode_loop(
            self.model,
            self.head,
            gen,
            self.request,
            jnp.asarray(num_steps, jnp.int32),
            num_draft_tokens=self.num_draft_tokens,
            law=self.law,
        )

    def warm_up(self, cache: kv.Cache) -> kv.Cache:
        """Compiles everything by running it once with every lane idle, which leaves the cache as it is."""
        lengths = {tokens.shape: (np.zeros_like(tokens), np.zeros_like(count)) for tokens, count in self.chunks}
        idle = replace(self, chunks=tuple(lengths.values()), live=np.zeros_like(self.live))
        gen = idle.decode(idle.prefill(cache), 1)
        return jax.block_until_ready(programs.end_replies(gen, jnp.asarray(idle.live))).cache


def _look(gen: Generation, lanes: Sequence[_Lane], show: Show | None) -> list[int]:
    """Takes in what the replies have gained since the last look; returns the lanes that a stop string has ended."""
    status, tokens, num_tokens, steps, drafted, accepted = jax.device_get(
        (gen.status, gen.tokens, gen.num_tokens, gen.num_steps, gen.drafted, gen.accepted)
    )
    ended = []
    for number, lane in enumerate(lanes):
        if lane.finish_reason is not None:
            continue
        fresh = tokens[number, len(lane.token_ids) : num_tokens[number]].tolist()
        lane.token_ids += fresh
        lane.looks.append(_Counts(len(lane.token_ids), int(steps[number]), drafted[number], accepted[number]))
        piece = lane.stream.push(fresh)
        if lane.stream.stopped:
            ended.append(number)
        if lane.stream.stopped or status[number] != RUNNING:
            piece += lane.stream.finish()
            stop = lane.stream.stopped or status[number] == STOPPED
            lane.finish_reason = "stop" if stop else "length"
        if show is not None and piece:
            show(number, piece)
    return ended
