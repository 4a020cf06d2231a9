"""The engine: many requests at once, each answered as if it were alone.

    engine = Engine.from_pretrained("demo", max_lanes=8)
    results = engine.generate(["def read_lines(path):", "The city of"], SamplingParams(max_tokens=64))
    for delta in engine.submit("Once", SamplingParams(temperature=0.7)):
        print(delta.text, end="")

A turn dispatches work to the device (ends, admissions, chunks of prompts, a few decoding steps) and only then looks at
what the turn before has brought: the device never waits for the host, nor the host for a step. On a GPU the call that
dispatches a loop may return only when the loop ends, so a thread makes it, and the host takes in what came before it.
What a request gets depends on its own prompt, parameters and seed; lanes, pages and neighbours leave no trace in it.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from infer import decode, programs
from infer.batch import check_request
from infer.decode import HONEST, IDLE, RUNNING, STOPPED, Generation, Request, Verbs
from infer.packed import Packed
from infer.params import LAWS, MAX_DRAFT_TOKENS, MAX_LOGPROBS, SamplingParams, TokenAutomaton
from infer.policy import DraftPolicy
from infer.replies import Delta, Result, Step, TokenLogProb, Work
from infer.scheduler import Admission, Job, Scheduler
from infer.speculative import Packet, Turn, decode_turn, stands_with
from infer.tokenizer import TextStream, Tokenizer
from mtp import cache as kv
from mtp import weights
from mtp.config import ModelConfig
from mtp.draft_head import MTPHead, draft_distance, fp8_head
from mtp.kernels.sampling import History, Sampling
from mtp.model import Qwen35
from mtp.weights import Loaded

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
# A program that decodes: the lanes after it, and what it brings. A thread runs it.
_Program = Callable[[Generation], tuple[Generation, Packet]]
_Launched = Future[tuple[Generation, Packet]]
# Pages that are moved between host and device in one call.
PAGE_BLOCK = 16
# Most tokens that may end one reply.
MAX_STOP_IDS = 32
# What is not said is so many tokens a request, prompt and reply.
DEFAULT_LENGTH = 4096
DRAFTS = ("auto", "fp8", "bf16")
# An fp8 head that drafts from laws further off than this (mean total variation) is refused: seen are 0.006 (random
# weights) and 0.05 (the demo).
MOST_DRAFT_DISTANCE = 0.1
# Heads from so many bytes on are read faster in fp8.
LARGE_HEAD = 1 << 28


@dataclass(frozen=True)
class Stats:
    """How the engine stands. Counters run since it was made."""

    # programs compiled by this process since the engine was warm; before that, since it was made
    compilations: int
    warm: bool
    free_lanes: int
    # pages that nobody holds, and those that only kept prefixes hold, which go when they are needed
    free_pages: int
    prefix_pages: int
    num_pages: int
    live: int
    waiting: int
    num_preemptions: int
    prefix_entries: int
    prefix_hits: int
    cached_tokens: int
    prompt_tokens: int
    # all tokens of replies, and the decoding steps that the device has run
    decode_tokens: int
    decode_steps: int
    # turns in which every lane decoded and nothing else ran: seconds on the host's clock, tokens, steps
    full_seconds: float
    full_tokens: int
    full_steps: int


@dataclass(frozen=True)
class _Lane:
    """Whose results a lane brings, and how many tokens at most."""

    work: Work | None = None
    most_tokens: int = 0


@dataclass(frozen=True)
class _Flight:
    """Results on their way from the device."""

    lanes: tuple[_Lane, ...]
    launched: _Launched
    dispatched: float
    # of the program
    num_draft_tokens: int
    # asked for; a live lane gains a token in each
    steps: int
    # whether nothing but decoding ran in this turn, so that its time tells what a step costs
    pure: bool
    with_log_probs: bool


class Compilations:
    """The programs that jax compiles in this process, and the seconds that it takes."""

    count = 0
    seconds = 0.0
    listening = False

    @classmethod
    def listen(cls) -> None:
        """Starts to count; once is enough."""
        if not cls.listening:
            cls.listening = True
            jax.monitoring.register_event_duration_secs_listener(cls.heard)

    @classmethod
    def heard(cls, event: str, duration: float, **_: object) -> None:
        """For jax."""
        if event == "/jax/core/compile/backend_compile_duration":
            cls.count += 1
            cls.seconds += duration


@dataclass
class Stream:
    """One request: iterating it runs the engine and yields what its replies gain."""

    id: int
    _engine: "Engine"
    _works: tuple[Work, ...]
    # what nobody has taken yet
    _deltas: deque[Delta]

    def __iter__(self) -> Iterator[Delta]:
        while self._deltas or not self.done:
            if self._deltas:
                yield self._deltas.popleft()
            else:
                self._engine.step()

    @property
    def done(self) -> bool:
        """Whether every reply has ended."""
        return all(work.reply is not None for work in self._works)

    @property
    def result(self) -> Result:
        """The whole answer, which it runs the engine for if need be."""
        while not self.done:
            self._engine.step()
        replies = tuple(work.reply for work in self._works if work.reply is not None)
        return Result(tuple(self._works[0].job.prompt.tolist()), replies)


def draft_head(head: MTPHead, model: Qwen35, draft: str) -> MTPHead:
    """The head as the engine drafts with it, for an option `draft`.

    Raises:
        ValueError: one line; an fp8 head would draft too differently.
    """
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(head))
    large = jax.default_backend() == "gpu" and head.fc.weight.dtype == jnp.bfloat16 and size >= LARGE_HEAD
    if draft == "fp8" or (draft == "auto" and large):
        small = fp8_head(head, model)
        distance = float(draft_distance(head, small, model))
        if not distance <= MOST_DRAFT_DISTANCE:
            raise ValueError(
                f"an fp8 draft head would draft from laws {distance:.3f} away from the head's own in total variation, "
                f"at most {MOST_DRAFT_DISTANCE} is allowed; use draft='bf16'"
            )
        return small
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), head) if draft == "bf16" else head


class Engine:
    """Serves one model on one device."""

    def __init__(
        self,
        loaded: Loaded,
        tokenizer: Tokenizer | None,
        *,
        num_draft_tokens: int | str | None = None,
        max_lanes: int = 8,
        kv_memory: int | None = None,
        num_pages: int | None = None,
        max_length: int | None = None,
        page_size: int = 64,
        verify: str = "rejection",
        draft: str = "auto",
        exact: bool = False,
        snapshot_memory: int = 1 << 30,
        snapshot_every: int | None = None,
        prefill_budget: int = 2048,
        prefill_lanes: int = 4,
        chunk_lengths: Sequence[int] = (32, 128, 512),
        steps_per_turn: int = 8,
        max_mask_states: int = 64,
        usable_tokens: int | None = None,
        synthetic_acceptance: float | None = None,
        verbs: Verbs = HONEST,
    ) -> None:
        """An engine around loaded weights; it allocates all of its device memory here.

        Args:
            tokenizer: None takes prompts of token ids only and gives no text.
            num_draft_tokens: k, drafts a verify step; "auto" chooses 0..3 from what steps cost and what is accepted;
                None is 3, or 0 for a checkpoint without a head.
            max_lanes: requests that are decoded at once.
            kv_memory: bytes of the page pool, or `num_pages`; by default every lane can have `max_length` tokens.
            max_length: longest prompt and reply of one request, in tokens; by default the model's limit or 4096.
            verify: law of acceptance, one of `mtp.acceptance.LAWS`.
            draft: the head's dtype: "fp8", with a copy of the unembedding in fp8; "bf16"; or "auto", which is fp8 where
                it pays (large bfloat16 heads on a GPU) and as loaded elsewhere.
            exact: plain decoding runs the program of the window too, so that rows of both share their arithmetic, and
                prefixes are kept only where every prompt's chunks end, so that a hit has the bits of a cold run.
            snapshot_memory: bytes for kept prefixes; 0 keeps none.
            snapshot_every: take one every so many tokens of a prompt, beside those at its end and where prompts part.
            prefill_budget: tokens of prompts that are read between two turns of decoding.
            prefill_lanes: prompts that are read in one call.
            chunk_lengths: rows a prompt is read in, ascending.
            steps_per_turn: decoding steps between two looks of the host.
            max_mask_states: states of all token automata in use together.
            usable_tokens: ids from here on have no text and are never chosen; by default the tokenizer's length.
            synthetic_acceptance: for measuring speed with weights that can't accept: mean tokens a verify step. What is
                generated then is not the model's.
            verbs: the steps' parts; anything but HONEST is for the judge's negative controls.

        Raises:
            ValueError: one line with the numbers; sizes that can't work together, drafts without a head.
        """
        config = loaded.config
        if draft not in DRAFTS:
            raise ValueError(f"{draft=} must be one of {', '.join(DRAFTS)}")
        if num_draft_tokens is None:
            num_draft_tokens = 0 if loaded.head is None else 3
        self.auto = num_draft_tokens == "auto"
        k = 3 if self.auto else num_draft_tokens
        if not isinstance(k, int) or isinstance(k, bool) or not 0 <= k <= MAX_DRAFT_TOKENS:
            raise ValueError(f"{num_draft_tokens=} must be an integer from 0 to {MAX_DRAFT_TOKENS}, or auto")
        if k > 0 and loaded.head is None:
            raise ValueError(f"{num_draft_tokens=} needs an MTP head, and this checkpoint has no mtp.* tensors; use 0")
        if verify not in LAWS:
            raise ValueError(f"{verify=} must be one of {', '.join(LAWS)}")
        positive = {"max_lanes": max_lanes, "page_size": page_size, "steps_per_turn": steps_per_turn}
        positive |= {"prefill_budget": prefill_budget, "prefill_lanes": prefill_lanes}
        for name, value in positive.items():
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if not chunk_lengths or list(chunk_lengths) != sorted(set(chunk_lengths)) or chunk_lengths[0] < 1:
            raise ValueError(f"{chunk_lengths=} must be ascending and positive")
        self.max_length = min(config.max_position_embeddings, DEFAULT_LENGTH) if max_length is None else max_length
        if not 2 <= self.max_length <= config.max_position_embeddings:
            limit = config.max_position_embeddings
            raise ValueError(f"max_length={self.max_length} must be from 2 to the model's {limit} positions")

        self.tokenizer, self.config = tokenizer, config
        self.head = None if loaded.head is None or k == 0 else draft_head(loaded.head, loaded.model, draft)
        self._model, self._head = Packed(loaded.model), Packed(self.head)
        # the head as loaded is not kept beside the one that drafts
        self.loaded = replace(loaded, head=None)
        self.num_draft_tokens, self.law, self.exact, self.verbs = k, verify, exact, verbs
        self.steps_per_turn, self.prefill_budget = steps_per_turn, prefill_budget
        self.prefill_lanes, self.chunk_lengths = min(prefill_lanes, max_lanes), tuple(chunk_lengths)
        self.stop_ids = config.eos_token_ids if tokenizer is None else tokenizer.stop_ids
        self.usable_tokens = config.vocab_size if tokenizer is None else len(tokenizer)
        if usable_tokens is not None:
            self.usable_tokens = usable_tokens
        self.policy = DraftPolicy(k)

        dtype = loaded.model.embed_tokens.weight.dtype
        layers = sum(kind == "full_attention" for kind in config.layer_types) + (self.head is not None)
        row = config.num_key_value_heads * config.head_dim * np.dtype(dtype).itemsize
        self.page_bytes = 2 * layers * page_size * row
        pages_per_lane = -(-self.max_length // page_size)
        if kv_memory is not None and num_pages is not None:
            raise ValueError(f"{kv_memory=} and {num_pages=} say the same thing: give one of them")
        if num_pages is None:
            num_pages = max_lanes * pages_per_lane if kv_memory is None else kv_memory // self.page_bytes
        if num_pages < 1:
            raise ValueError(
                f"{kv_memory=} bytes hold no page: one of {page_size} tokens takes {self.page_bytes} bytes"
            )
        self._shape = {
            "num_lanes": max_lanes,
            "num_pages": num_pages,
            "page_size": page_size,
            "pages_per_lane": pages_per_lane,
            "num_draft_tokens": k,
            "dtype": dtype,
            "with_head": self.head is not None,
        }
        self._check_memory()
        self._mask_table = np.full((max_mask_states + 1, config.vocab_size), -1, np.int32)
        self._mask_table[0] = 0
        self._automata: dict[TokenAutomaton, int] = {}
        self.request = self._blank_request(synthetic_acceptance)
        self._gen = programs.idle_lanes(config, top=MAX_LOGPROBS, **self._shape)
        self._launched: _Launched | None = None
        self._thread = ThreadPoolExecutor(1, "dispatch")
        self.scheduler = Scheduler(
            num_lanes=max_lanes,
            num_pages=num_pages,
            page_size=page_size,
            snapshot_memory=snapshot_memory,
            snapshot_bytes=self.snapshot_bytes,
            snapshot_every=snapshot_every,
            snapshot_grid=self.chunk_lengths[-1] if exact else 1,
        )
        self._works: dict[Job, Work] = {}
        self._streams: dict[int, Stream] = {}
        self._flights: deque[_Flight] = deque()
        # snapshots whose soundness has not been seen yet
        self._unseen: deque[tuple[Job, Any, jax.Array]] = deque()
        self._parked: list[Job] = []
        self._ending: set[int] = set()
        self._next_id = self._next_number = 0
        self._looked = time.perf_counter()
        names = ("prefix_hits", "cached_tokens", "prompt_tokens", "decode_tokens", "decode_steps")
        self._counts = dict.fromkeys((*names, "full_tokens", "full_steps"), 0)
        self._full_seconds = 0.0
        self.warm = False
        Compilations.listen()
        self._compiled = Compilations.count

    @classmethod
    def from_pretrained(
        cls, path: str | Path, *, revision: str | None = None, dtype: DTypeLike | None = None, **options: Any
    ) -> Self:
        """Loads a checkpoint (directory, hub id, or "demo") and makes an engine of it.

        Args:
            dtype: of the weights; float32 on a CPU and bfloat16 elsewhere if None.
            options: of `Engine`.

        Raises:
            ValueError, mtp.weights.CheckpointError: one line naming what is wrong.
        """
        directory = weights.resolve(str(path), revision)
        tokenizer = Tokenizer.from_pretrained(directory, ModelConfig.from_pretrained(directory))
        if dtype is None:
            dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
        loaded = weights.load(directory, dtype=dtype)
        loaded.model.stack()
        return cls(loaded, tokenizer, **options)

    # -- requests ------------------------------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]) -> list[Result]:
        """Answers prompts, in their order. If it is interrupted, none of them is left behind.

        Raises:
            ValueError: one line; a prompt or parameters that can't be served. Nothing has been started then.
        """
        if isinstance(prompts, str):
            raise ValueError("generate takes a list of prompts: put the one prompt in a list")
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(each)} params: give one for all, or one each")
        ready = [self._check(prompt, p) for prompt, p in zip(prompts, each, strict=True)]
        streams: list[Stream] = []
        try:
            for tokens, p in zip(ready, each, strict=True):
                streams.append(self._start(tokens, p))
            return [stream.result for stream in streams]
        except BaseException:
            for stream in streams:
                self.abort(stream.id)
            raise

    def submit(self, prompt: Prompt, params: SamplingParams) -> Stream:
        """Puts one request in line; iterate what comes back. Raises ValueError, one line, if it can't be served."""
        return self._start(self._check(prompt, params), params)

    def abort(self, request_id: int) -> None:
        """Ends a request wherever it is; lanes and pages are free at once. Nothing happens to one that has ended."""
        stream = self._streams.get(request_id)
        for work in () if stream is None else stream._works:
            if work.reply is None and (delta := work.delta(self._end(work, "abort"))) is not None:
                work.deltas.append(delta)

    @property
    def busy(self) -> bool:
        """Whether anything waits, runs, or is on its way from the device."""
        return bool(self._works or self._flights or self._unseen)

    def step(self) -> list[Delta]:
        """One turn: dispatches what there is to do, then takes in what the turn before has brought."""
        before = len(self._flights)
        deltas = self._dispatch()
        # the turn just dispatched stays on its way while the one before is looked at
        keep = 1 if len(self._flights) > before else 0
        while len(self._flights) > keep or (self._flights and not self._works):
            deltas += self._look(self._flights.popleft())
        self._settle()
        return deltas

    def __iter__(self) -> Iterator[Delta]:
        """Runs everything that has been submitted, yielding what all replies gain."""
        while self.busy:
            yield from self.step()

    def drain(self) -> None:
        """Runs until nothing is left to do."""
        while self.busy:
            self.step()

    def close(self) -> None:
        """Aborts everything and frees the engine's device memory; the weights stay. It can't be used afterwards."""
        for request_id in list(self._streams):
            self.abort(request_id)
        self._flights.clear()
        self._unseen.clear()
        self.scheduler.prefixes.clear()
        self._thread.shutdown()
        failed = self._launched is not None and self._launched.exception() is not None
        for leaf in jax.tree.leaves((self._gen if failed else self.gen, self.request)):
            leaf.delete()

    @property
    def gen(self) -> Generation:
        """The lanes' state, after everything that has been dispatched; what raised while it was raises here."""
        self._join()
        return self._gen

    @gen.setter
    def gen(self, gen: Generation) -> None:
        """What a program made of them."""
        self._gen = gen

    @property
    def stats(self) -> Stats:
        """How the engine stands now."""
        scheduler = self.scheduler
        held = scheduler.held_pages
        return Stats(
            compilations=Compilations.count - self._compiled,
            warm=self.warm,
            free_lanes=scheduler.lanes.count(None),
            free_pages=scheduler.pool.free,
            prefix_pages=scheduler.pool.num_pages - scheduler.pool.free - held,
            num_pages=scheduler.pool.num_pages,
            live=len(scheduler.live),
            waiting=len(scheduler.waiting),
            num_preemptions=scheduler.num_preemptions,
            prefix_entries=len(scheduler.prefixes),
            full_seconds=self._full_seconds,
            **self._counts,
        )

    @property
    def snapshot_bytes(self) -> int:
        """Device memory of one kept prefix, its pages not counted."""
        one = jax.eval_shape(lambda: kv.snapshot(kv.init(self.config, **self._shape), 0))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(one))

    @property
    def state_bytes(self) -> int:
        """Device memory of lanes and pages: what `kv_memory` buys and what every lane costs beside it."""
        whole = jax.eval_shape(lambda: kv.init(self.config, **self._shape))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(whole))

    def warm_up(self, num_draft_tokens: Sequence[int] | None = None) -> None:
        """Compiles every program by running it on idle lanes; afterwards nothing compiles any more.

        Args:
            num_draft_tokens: the k that will be asked for, if not all.
        """
        lanes, outside = self._shape["num_lanes"], np.int32(self._shape["num_lanes"])
        nobody = np.zeros((lanes,), bool)
        zero = np.int32(0)
        one = SamplingParams(max_tokens=1)
        self.gen, self.request = programs.admit_lane(
            self.gen, self.request, zero, *self._row(one, (), ()), zero, np.int32(IDLE)
        )
        for length in self.chunk_lengths:
            empty = np.zeros((self.prefill_lanes, length), np.int32)
            self._read_chunk(np.full((self.prefill_lanes,), outside), empty, np.zeros((self.prefill_lanes,), np.int32))
        self.gen, _ = programs.start_lanes(self._model, self.gen, self.request, nobody, verbs=self.verbs)
        for k in self._programs if num_draft_tokens is None else num_draft_tokens:
            self._launch(self._turn(k, 1, np.zeros((lanes,), np.int32)))
        self.gen, self.request = programs.end_lanes(self.gen, self.request, nobody)
        kept, sound = programs.take_snapshot(self.gen.cache, zero)
        bool(sound)
        self.gen = programs.restore_snapshot(self.gen, zero, jax.device_get(kept))
        self.gen = programs.restore_snapshot(self.gen, zero, kept)
        none = np.full((PAGE_BLOCK,), self._shape["num_pages"], np.int32)
        self.gen = programs.fill_pages(self.gen, none, jax.device_get(programs.fetch_pages(self.gen.cache, none)))
        self.gen = programs.copy_page(self.gen, none[0], none[0])
        jax.block_until_ready(self.gen)
        self.warm = True
        self._compiled = Compilations.count

    # -- what a turn dispatches ----------------------------------------------------------------------------------------

    def _dispatch(self) -> list[Delta]:
        """One turn's work; what it gives back are the ends of requests that could not be placed."""
        scheduler = self.scheduler
        deltas: list[Delta] = []
        self._end_lanes()
        pure = True
        if scheduler.waiting:
            # an interrupt or a failure while this waits must not fall between a job's lane and what is put on it
            self._join()
        for admission in scheduler.admit(self._most_tokens(self.steps_per_turn)):
            pure = False
            try:
                self._place(admission)
            except Exception as error:
                # a lane must not run on with what its last request had asked for
                work = self._works[admission.job]
                text = self._end(work, "error", f"request {work.request_id} could not be placed: {error}")
                if (delta := work.delta(text)) is not None:
                    work.deltas.append(delta)
                    deltas.append(delta)
        starting = [job for job in scheduler.live if not job.reading and not job.started]
        calls = max(1, self.prefill_budget // (self.prefill_lanes * self.chunk_lengths[-1]))
        for _ in range(calls):
            reading = [job for job in scheduler.live if job.reading]
            if not reading:
                break
            starting += self._read(reading)
            pure = False
        if starting:
            self._start_lanes(starting)
            pure = False
        self._decode_lanes(pure)
        return deltas

    def _place(self, admission: Admission) -> None:
        """Puts an admitted job on its lane."""
        job = admission.job
        work, lane = self._works[job], np.int32(job.lane)
        if work.admitted is None:
            work.admitted = time.perf_counter()
            self._counts["prompt_tokens"] += len(job.prompt)
        status = IDLE if job.reading or not work.token_ids else RUNNING
        row = self._row(work.params, job.prompt, work.token_ids, work.sample)
        self.gen, self.request = programs.admit_lane(
            self.gen, self.request, lane, *row, np.int32(len(work.token_ids)), np.int32(status)
        )
        if job.saved is not None:
            kept, blocks = job.saved
            for start, block in zip(range(0, len(job.pages), PAGE_BLOCK), blocks, strict=False):
                self.gen = programs.fill_pages(self.gen, self._block(job.pages, start), block)
            self.gen = programs.restore_snapshot(self.gen, lane, kept)
            job.saved = None
        elif admission.prefix is not None:
            if admission.copy is not None:
                source, target = admission.copy
                self.gen = programs.copy_page(self.gen, np.int32(source), np.int32(target))
            self.gen = programs.restore_snapshot(self.gen, lane, admission.prefix.snapshot)
            self._counts["prefix_hits"] += 1
            self._counts["cached_tokens"] += job.num_cached

    def _read(self, reading: list[Job]) -> list[Job]:
        """Reads one chunk of a few prompts; returns the jobs whose prompt is read. The chunks of a prompt are the same
        whoever is read beside it."""
        size = lambda job: min(job.next_mark - job.num_read, self.chunk_lengths[-1])  # noqa: E731
        rows = lambda job: next(n for n in self.chunk_lengths if n >= size(job))  # noqa: E731
        length = rows(reading[0])
        together = [job for job in reading if rows(job) == length][: self.prefill_lanes]
        lanes = np.full((self.prefill_lanes,), len(self.scheduler.lanes), np.int32)
        tokens = np.zeros((self.prefill_lanes, length), np.int32)
        counts = np.zeros((self.prefill_lanes,), np.int32)
        for place, job in enumerate(together):
            lanes[place], counts[place] = job.lane, size(job)
            tokens[place, : counts[place]] = job.prompt[job.num_read : job.num_read + counts[place]]
        self._read_chunk(lanes, tokens, counts)
        for place, job in enumerate(together):
            job.num_read += int(counts[place])
            if job.num_read in job.marks:
                kept, sound = programs.take_snapshot(self.gen.cache, np.int32(job.lane))
                entry = self.scheduler.keep_prefix(job, kept)
                if entry is not None:
                    sound.copy_to_host_async()
                    self._unseen.append((job, entry, sound))
        return [job for job in together if not job.reading]

    def _read_chunk(self, lanes: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> None:
        table = self._current_table()
        self.gen = programs.read_prompts(self._model, self._head, self.gen, table, lanes, tokens, counts)

    def _start_lanes(self, jobs: list[Job]) -> None:
        lanes = np.isin(np.arange(len(self.scheduler.lanes)), [job.lane for job in jobs])
        request = self.request
        self._send(
            jobs,
            lambda gen: programs.start_lanes(self._model, gen, request, lanes, verbs=self.verbs),
            num_draft_tokens=0,
            steps=1,
            most_tokens=[1] * len(jobs),
            pure=False,
        )
        for job in jobs:
            job.started = True

    def _end_lanes(self) -> None:
        if self._ending:
            lanes = np.isin(np.arange(len(self.scheduler.lanes)), list(self._ending))
            self.gen, self.request = programs.end_lanes(self.gen, self.request, lanes)
            self._ending.clear()

    def _decode_lanes(self, pure: bool) -> None:
        """Dispatches a few decoding steps of all lanes that are past their prompt, after making room for them."""
        waiting_prompts = any(job.reading for job in self.scheduler.live)
        steps = 1 if waiting_prompts else self.steps_per_turn
        chosen = self.policy.choose() if any(work.params.num_draft_tokens == "auto" for work in self._live_works) else 0
        for job in [job for job in self.scheduler.live if not job.reading]:
            while job.lane is not None:
                victim = self.scheduler.grow(job, self._most_tokens(steps))
                if victim is None:
                    break
                self._park(victim)
        self._end_lanes()
        # of the others the reply's end is on its way for certain
        jobs = [job for job in self.scheduler.live if not job.reading and job.known + job.certain < job.limit]
        if not jobs:
            return
        wanted = np.zeros((len(self.scheduler.lanes),), np.int32)
        for job in jobs:
            asked = self._works[job].params.num_draft_tokens
            wanted[job.lane] = chosen if asked == "auto" else asked
        program = min(k for k in self._programs if k >= wanted.max())
        most = [steps * (int(wanted[job.lane]) + 1) for job in jobs]
        turn = self._turn(program, steps, wanted)
        self._send(jobs, turn, num_draft_tokens=program, steps=steps, most_tokens=most, pure=pure)

    def _turn(self, num_draft_tokens: int, steps: int, wanted: np.ndarray) -> _Program:
        """A few decoding steps, as things stand now."""
        request, table = replace(self.request, num_draft_tokens=wanted), self._current_table()
        options = {
            "num_draft_tokens": num_draft_tokens,
            # plain decoding has none: one program serves them all
            "law": self.law if num_draft_tokens else LAWS[0],
            "max_steps": self.steps_per_turn,
            "verbs": self.verbs,
        }
        return lambda gen: decode_turn(self._model, self._head, gen, request, table, np.int32(steps), **options)

    def _send(
        self,
        jobs: list[Job],
        program: _Program,
        *,
        num_draft_tokens: int,
        steps: int,
        most_tokens: list[int],
        pure: bool,
    ) -> None:
        """Launches a turn of these jobs and puts its results among those to be looked at."""
        lanes = [_Lane() for _ in self.scheduler.lanes]
        for job, most in zip(jobs, most_tokens, strict=True):
            lanes[job.lane] = _Lane(self._works[job], most)
        with_log_probs = any(self._works[job].params.logprobs is not None for job in jobs)
        launched = self._launch(program, with_log_probs)
        for job, most in zip(jobs, most_tokens, strict=True):
            job.outstanding += most
            job.certain += steps
            job.unseen += 1
        now = time.perf_counter()
        self._flights.append(_Flight(tuple(lanes), launched, now, num_draft_tokens, steps, pure, with_log_probs))

    def _launch(self, program: _Program, with_log_probs: bool = False) -> _Launched:
        """Has the thread call a program on the lanes as they are after all that went before."""
        gen = self.gen

        def call() -> tuple[Generation, Packet]:
            after, packet = program(gen)
            packet.send(with_log_probs)
            return after, packet

        self._launched = self._thread.submit(call)
        return self._launched

    def _join(self) -> None:
        """Waits until the thread has made its call."""
        if self._launched is not None:
            self._gen, _ = self._launched.result()
            self._launched = None

    def _park(self, job: Job) -> None:
        """Preempts a live job: its lane's state and its pages go to the host, bit for bit."""
        saved = None
        if job.num_read > job.num_cached or self._works[job].token_ids or job.outstanding:
            kept, _ = programs.take_snapshot(self.gen.cache, np.int32(job.lane))
            starts = range(0, len(job.pages), PAGE_BLOCK)
            saved = kept, [programs.fetch_pages(self.gen.cache, self._block(job.pages, start)) for start in starts]
            for leaf in jax.tree.leaves(saved):
                leaf.copy_to_host_async()
            self._parked.append(job)
        self._ending.add(job.lane)
        self.scheduler.park(job, saved)

    # -- what a turn brings --------------------------------------------------------------------------------------------

    def _look(self, flight: _Flight) -> list[Delta]:
        """Waits for one turn's results and takes them in."""
        turn = flight.launched.result()[1].read(flight.with_log_probs)
        now = time.perf_counter()
        steps = int(turn.num_steps)
        deltas: list[Delta] = []
        for number, lane in enumerate(flight.lanes):
            work = lane.work
            if work is None:
                continue
            work.job.unseen -= 1
            work.job.outstanding -= lane.most_tokens
            work.job.certain -= flight.steps
            if work.reply is None and (delta := self._take(work, turn, number, steps, now)) is not None:
                deltas.append(delta)
                work.deltas.append(delta)
        emitted = turn.emitted
        if flight.pure and steps:
            position = np.arange(self.num_draft_tokens)
            drafted, accepted = (
                (count[..., None] > position).sum((0, 1)) for count in (emitted.num_drafted, emitted.num_accepted)
            )
            seconds = now - max(self._looked, flight.dispatched)
            if all(lane.work is not None for lane in flight.lanes):
                self._full_seconds += seconds
                self._counts["full_tokens"] += int(emitted.count.sum())
                self._counts["full_steps"] += steps
            self.policy.observe(flight.num_draft_tokens, seconds, steps, drafted.tolist(), accepted.tolist())
        if flight.num_draft_tokens or flight.pure:
            self._counts["decode_steps"] += steps
        self._looked = now
        return deltas

    def _take(self, work: Work, turn: Turn, lane: int, steps: int, now: float) -> Delta | None:
        """What one lane's turn brings to its reply."""
        emitted, text = turn.emitted, ""
        for step in range(steps):
            count = int(emitted.count[step, lane])
            if count == 0 or work.stopped:
                continue
            if work.first_token is None:
                work.first_token = now
            text += work.push(
                Step(
                    emitted.tokens[step, lane, :count].tolist(),
                    int(emitted.num_drafted[step, lane]),
                    int(emitted.num_accepted[step, lane]),
                    self._log_probs(work.params, emitted, step, lane, count),
                )
            )
            self._counts["decode_tokens"] += count
        work.job.known = len(work.job.prompt) + len(work.token_ids)
        status = int(turn.status[lane])
        if status == decode.FAILED:
            number = len(work.token_ids)
            text += self._end(
                work,
                "error",
                f"request {work.request_id}: reply token {number} has no finite logits, or none is allowed",
            )
        elif work.stopped or status == STOPPED:
            text += self._end(work, "stop")
        elif status == decode.FULL:
            text += self._end(work, "length")
        return work.delta(text)

    def _log_probs(self, params: SamplingParams, emitted: Any, step: int, lane: int, count: int) -> list[TokenLogProb]:
        if params.logprobs is None:
            return []
        tops = slice(0, params.logprobs)
        return [
            TokenLogProb(
                int(emitted.tokens[step, lane, row]),
                float(emitted.log_probs[step, lane, row]),
                tuple(
                    zip(
                        emitted.top_tokens[step, lane, row, tops].tolist(),
                        emitted.top_log_probs[step, lane, row, tops].tolist(),
                        strict=True,
                    )
                ),
            )
            for row in range(count)
        ]

    def _settle(self) -> None:
        """Lets others build on snapshots that have proved sound, and takes what was parked off the device."""
        while self._unseen and (not self._flights or self._unseen[0][2].is_ready()):
            job, entry, sound = self._unseen.popleft()
            self.scheduler.settle_prefix(job, entry, bool(sound))
        for job in self._parked:
            if job.saved is not None:
                job.saved = jax.device_get(job.saved)
        self._parked.clear()

    def _end(self, work: Work, reason: str, error: str | None = None) -> str:
        """Ends a reply and takes back what it holds; returns text that was held back."""
        text = work.finish(reason, time.perf_counter(), error)
        if work.job.lane is not None:
            self._ending.add(work.job.lane)
        self.scheduler.finish(work.job, of_itself=reason in ("stop", "length"))
        del self._works[work.job]
        stream = self._streams[work.request_id]
        if stream.done:
            del self._streams[work.request_id]
        return text

    # -- values for the device -----------------------------------------------------------------------------------------

    @property
    def _programs(self) -> tuple[int, ...]:
        """Which k there are programs for."""
        if self.exact:
            return (self.num_draft_tokens,)
        return tuple(range(self.num_draft_tokens + 1)) if self.auto else tuple(sorted({0, self.num_draft_tokens}))

    @property
    def _live_works(self) -> list[Work]:
        return [self._works[job] for job in self.scheduler.live]

    def _most_tokens(self, steps: int) -> int:
        """What a lane can gain in so many steps, its first token included."""
        return steps * (self.num_draft_tokens + 1) + 1

    def _current_table(self) -> np.ndarray:
        """Page ids of all lanes; a new array each time, for the device may still be reading the last one."""
        table = np.full((self._shape["num_lanes"], self._shape["pages_per_lane"]), self._shape["num_pages"], np.int32)
        for job in self.scheduler.live:
            table[job.lane, : len(job.pages)] = job.pages
        return table

    def _block(self, pages: Sequence[int], start: int) -> np.ndarray:
        """One block of page ids, filled up with ids beyond the pool."""
        block = np.full((PAGE_BLOCK,), self._shape["num_pages"], np.int32)
        part = pages[start : start + PAGE_BLOCK]
        block[: len(part)] = part
        return block

    def _row(
        self, params: SamplingParams, prompt: Sequence[int] | np.ndarray, reply: Sequence[int], sample: int = 0
    ) -> tuple[Request, History]:
        """A request for one lane, and what its penalties and masks look back on."""
        vocab_size = self.config.vocab_size
        bias = np.zeros((1, vocab_size), np.float32)
        # rows of the embedding behind the last token have no text
        bias[0, self.usable_tokens :] = -np.inf
        for token, value in params.logit_bias:
            bias[0, token] += np.float32(value)

        # numpy: the program that reads them puts them on the device, all at once
        def one(value: float, dtype: DTypeLike) -> np.ndarray:
            return np.asarray([value], dtype)

        stop_ids = self._ends(params)
        request = Request(
            sampling=Sampling(
                temperature=one(params.temperature, jnp.float32),
                top_k=one(params.top_k, jnp.int32),
                top_p=one(params.top_p, jnp.float32),
                min_p=one(params.min_p, jnp.float32),
                seed=one(params.seed, jnp.uint32),
                sample_index=one(params.sample_index + sample, jnp.uint32),
                presence_penalty=one(params.presence_penalty, jnp.float32),
                frequency_penalty=one(params.frequency_penalty, jnp.float32),
                repetition_penalty=one(params.repetition_penalty, jnp.float32),
                bias=bias,
            ),
            stop_ids=np.asarray([(*stop_ids, *[-1] * (MAX_STOP_IDS - len(stop_ids)))], np.int32),
            min_tokens=one(params.min_tokens, jnp.int32),
            max_tokens=one(params.max_tokens, jnp.int32),
            num_draft_tokens=one(0, jnp.int32),
            log_probs=one(-1 if params.logprobs is None else params.logprobs, jnp.int32),
        )
        seen = np.zeros((1, vocab_size), bool)
        seen[0, np.asarray(prompt, np.int64)] = True
        counts = np.bincount(np.asarray(reply, np.int64), minlength=vocab_size)[None].astype(np.int32)
        state = 0
        if params.allowed is not None:
            state = self._automata[params.allowed] + params.allowed.walk(reply)
        return request, History(seen, counts, one(state, jnp.int32))

    def _ends(self, params: SamplingParams) -> tuple[int, ...]:
        """Tokens that end the reply."""
        return tuple(sorted({*params.stop_token_ids, *(() if params.ignore_eos else self.stop_ids)}))

    def _blank_request(self, synthetic_acceptance: float | None) -> Request:
        """A request for every lane that asks for nothing."""
        row, _ = self._row(SamplingParams(), (), ())
        lanes = self._shape["num_lanes"]
        request = jax.tree.map(lambda x: jnp.asarray(np.repeat(np.asarray(x), lanes, axis=0)), row)
        synthetic = None
        if synthetic_acceptance is not None:
            synthetic = jnp.asarray(stands_with(synthetic_acceptance), jnp.float32)
        return replace(request, mask_table=jnp.asarray(self._mask_table), synthetic_acceptance=synthetic)

    # -- refusals ------------------------------------------------------------------------------------------------------

    def _check(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """The prompt's tokens. Raises ValueError, one line, if the request can't be served; nothing has changed."""
        if params.verify not in (None, self.law):
            raise ValueError(f"verify={params.verify!r} is not this engine's law, {self.law!r}: one engine has one law")
        asked = params.num_draft_tokens
        if isinstance(asked, int) and asked > self.num_draft_tokens:
            raise ValueError(
                f"num_draft_tokens={asked} exceeds the {self.num_draft_tokens} that the engine was made for"
            )
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this engine has none: use stop_token_ids")
        if asked == "auto" and not self.auto:
            raise ValueError(
                'num_draft_tokens="auto" needs an engine made with it: only that one has a program for each k'
            )
        if (count := len(self._ends(params))) > MAX_STOP_IDS:
            raise ValueError(
                f"{count} tokens would end the reply; at most {MAX_STOP_IDS} can: use fewer stop_token_ids"
            )
        tokens = self._tokens(prompt)
        check_request(tokens, params, self.config)
        if len(tokens) + params.max_tokens > self.max_length:
            raise ValueError(
                f"a prompt of {len(tokens)} tokens and a reply of up to {params.max_tokens} exceed this engine's "
                f"max_length={self.max_length}; shorten the prompt, ask for fewer tokens, or make the engine longer"
            )
        pages, have = -(-(len(tokens) + params.max_tokens) // self._shape["page_size"]), self._shape["num_pages"]
        if pages > have:
            raise ValueError(
                f"a prompt of {len(tokens)} tokens and a reply of up to {params.max_tokens} need {pages} pages of "
                f"{self._shape['page_size']} tokens and the pool has {have}; ask for fewer tokens or enlarge the pool"
            )
        self._check_automaton(params.allowed)
        return tokens

    def _check_automaton(self, automaton: TokenAutomaton | None) -> None:
        if automaton is None or automaton in self._automata:
            return
        states, vocab_size = automaton.transitions.shape
        if vocab_size != self.config.vocab_size:
            raise ValueError(
                f"allowed is an automaton over {vocab_size} tokens and the vocabulary has {self.config.vocab_size}"
            )
        free = len(self._mask_table) - 1 - sum(len(other.transitions) for other in self._automata_in_use())
        if states > free:
            raise ValueError(
                f"allowed has {states} states and {free} are free: make the engine with more max_mask_states"
            )

    def _automata_in_use(self) -> set[TokenAutomaton]:
        return {work.params.allowed for work in self._works.values() if work.params.allowed is not None}

    def _tokens(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], Mapping)):
            if self.tokenizer is None:
                raise ValueError("this engine has no tokenizer: give the prompt as token ids")
            return self.tokenizer.encode(prompt if isinstance(prompt, str) else self.tokenizer.chat_prompt(prompt))
        return [int(token) for token in prompt]  # type: ignore[arg-type]

    def _start(self, tokens: list[int], params: SamplingParams) -> Stream:
        """Puts a request that has been checked in line."""
        params = params.with_defaults(num_draft_tokens="auto" if self.auto else self.num_draft_tokens, verify=self.law)
        self._place_automaton(params.allowed)
        prompt = np.array(tokens, np.int32)
        works: list[Work] = []
        deltas: deque[Delta] = deque()
        for sample in range(params.n):
            job = Job(self._next_number, prompt, params.max_tokens)
            self._next_number += 1
            stream = None if self.tokenizer is None else TextStream(self.tokenizer, params.stop, params.min_tokens)
            work = Work(self._next_id, sample, params, job, stream, self.num_draft_tokens, deltas, time.perf_counter())
            self.scheduler.submit(job)
            self._works[job] = work
            works.append(work)
        request = Stream(self._next_id, self, tuple(works), deltas)
        self._streams[request.id] = request
        self._next_id += 1
        return request

    def _place_automaton(self, automaton: TokenAutomaton | None) -> None:
        """Gives an automaton rows of the mask table; those that no request uses any more make room."""
        if automaton is None or automaton in self._automata:
            return
        for other in set(self._automata) - self._automata_in_use():
            del self._automata[other]
        taken = sorted((first, first + len(other.transitions)) for other, first in self._automata.items())
        start = 1
        for first, end in taken:
            if first - start >= len(automaton.transitions):
                break
            start = end
        states = len(automaton.transitions)
        if start + states > len(self._mask_table):
            raise ValueError(
                f"allowed has {states} states and no gap of the mask table holds them: raise max_mask_states"
            )
        self._automata[automaton] = start
        moved = np.where(automaton.transitions < 0, -1, automaton.transitions + start)
        self._mask_table = self._mask_table.copy()
        self._mask_table[start : start + states] = moved
        self.request = replace(self.request, mask_table=jnp.asarray(self._mask_table))

    def _check_memory(self) -> None:
        """Raises ValueError if the device says that it has less room than lanes and pages take."""
        device = jax.tree.leaves(self.loaded.model)[0].devices().pop()
        figures = device.memory_stats() or {}
        if "bytes_limit" not in figures:
            return
        free = figures["bytes_limit"] - figures["bytes_in_use"]
        if self.state_bytes > free:
            lanes, pages = self._shape["num_lanes"], self._shape["num_pages"]
            raise ValueError(
                f"{lanes} lanes and {pages} pages take {self.state_bytes / 2**30:.2f} GiB and {device} has "
                f"{free / 2**30:.2f} GiB free; use fewer max_lanes or a smaller kv_memory"
            )
