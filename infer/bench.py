"""Measures what decoding costs on this device, beside what it must cost.

    python -m infer.bench step --model random:qwen3.5-27b --lanes 1,16,64 --contexts 512
    python -m infer.bench prefill --model random:qwen3.5-27b --lanes 1,16 --tokens 2048
    python -m infer.bench kernels
    python -m infer.bench memory --model random:qwen3.5-27b --length 4096
    python -m infer.bench profile --model demo --lanes 16 --k 3

Weights may be random, since speed does not depend on their values; drafts are then accepted by chance, at the mean that
`--acceptance` says. Floors are those of an H200 (`infer.floor`).
"""

import argparse
import collections
import dataclasses
import glob
import itertools
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table

from infer import floor, programs
from infer.cli import Parser, provenance, run_command, to_json
from infer.decode import Generation, Request
from infer.engine import DRAFTS, draft_head
from infer.judge import subject
from infer.judge.options import RANDOM
from infer.packed import Packed
from infer.params import LAWS, MAX_LOGPROBS
from infer.speculative import Packet, decode_turn, stands_with
from mtp.config import ModelConfig
from mtp.kernels import backend
from mtp.kernels.backend import IMPLEMENTATIONS
from mtp.kernels.gated_delta import DeltaRows
from mtp.kernels.sampling import Sampling
from mtp.weights import Loaded

PAGE_SIZE = 64
MAX_STEPS = 32
# k of the caches that prompts are read into
MAX_DRAFTS = 3

Record = dict[str, Any]


@dataclass(frozen=True)
class Bench:
    """A model's weights on the device and how its steps are asked for."""

    loaded: Loaded
    dtype: Any
    law: str
    acceptance: float | None
    temperature: float
    draft: str

    @cached_property
    def model(self) -> Packed[Any]:
        """The trunk's weights, as the engine passes them."""
        return Packed(self.loaded.model)

    @cached_property
    def head(self) -> Packed[Any]:
        """The head's, as the engine drafts with it."""
        head = self.loaded.head
        return Packed(None if head is None else draft_head(head, self.loaded.model, self.draft))

    @property
    def config(self) -> ModelConfig:
        """The model's."""
        return self.loaded.config

    def lanes(self, num_lanes: int, context: int, num_draft_tokens: int, room: int) -> tuple[Generation, Request]:
        """Lanes in the middle of replies, with room for so many more tokens each."""
        k = num_draft_tokens
        gen = programs.busy_lanes(
            self.config,
            jnp.int32(context),
            num_lanes=num_lanes,
            page_size=PAGE_SIZE,
            pages_per_lane=-(-(context + room) // PAGE_SIZE),
            num_draft_tokens=k,
            dtype=self.dtype,
            with_head=k > 0,
            top=MAX_LOGPROBS,
        )
        counts = lambda value: jnp.full((num_lanes,), value, jnp.int32)  # noqa: E731
        vocab_size = self.config.vocab_size
        # with one seed for all, whether drafts stand would be the same coin in every lane
        sampling = replace(
            Sampling.alike(num_lanes, temperature=self.temperature),
            seed=jnp.arange(num_lanes, dtype=jnp.uint32),
            bias=jnp.zeros((num_lanes, vocab_size), jnp.float32),
        )
        request = Request(
            sampling=sampling,
            stop_ids=jnp.full((num_lanes, 32), -1, jnp.int32),
            min_tokens=counts(0),
            max_tokens=counts(1 << 30),
            num_draft_tokens=counts(k),
            log_probs=counts(-1),
            mask_table=jnp.zeros((2, vocab_size), jnp.int32),
            synthetic_acceptance=None if self.acceptance is None else jnp.float32(stands_with(self.acceptance)),
        )
        return gen, request

    def program(self, gen: Generation, request: Request, num_draft_tokens: int) -> "Program":
        """Steps of such lanes, compiled."""
        weights = self.model, self.head if num_draft_tokens else Packed(None)
        law = self.law if num_draft_tokens else LAWS[0]
        arguments = *weights, gen, request, gen.cache.page_table, jnp.int32(1)
        lowered = decode_turn.lower(*arguments, num_draft_tokens=num_draft_tokens, law=law, max_steps=MAX_STEPS)
        begun = time.perf_counter()
        return Program(lowered.compile(), weights, time.perf_counter() - begun)

    def floor(self, num_lanes: int, context: int, num_draft_tokens: int) -> Record:
        """Milliseconds that a step can't go below, and of what."""
        head = self.head.module if num_draft_tokens else None
        sizes = {"num_lanes": num_lanes, "context": context, "num_draft_tokens": num_draft_tokens}
        terms = floor.step_terms(self.config, self.loaded.model, head, **sizes)
        return {
            "floor_ms": 1e3 * floor.whole(terms),
            "terms_ms": {name: 1e3 * value for name, value in terms.items()},
        }


@dataclass(frozen=True)
class Program:
    """`decode_turn`, compiled for some lanes."""

    compiled: Any
    weights: tuple[Packed[Any], Packed[Any]]
    compile_seconds: float

    def run(self, gen: Generation, request: Request, steps: int) -> tuple[Generation, Packet]:
        """Some decoding steps, at most `MAX_STEPS`."""
        # the pages are given with every call; those of `gen` go with it
        return self.compiled(*self.weights, gen, request, jnp.array(gen.cache.page_table), jnp.int32(steps))

    @property
    def temporary_bytes(self) -> int:
        """What it needs beside weights and lanes."""
        return int(self.compiled.memory_analysis().temp_size_in_bytes)


def measure_step(bench: Bench, num_lanes: int, context: int, num_draft_tokens: int, repeats: int) -> Record:
    """Milliseconds of one step inside a device loop, and what a call costs beside its steps.

    Two lengths of loop are timed: their difference is free of the call.
    """
    short, long = MAX_STEPS // 4, MAX_STEPS
    room = (repeats + 2) * (short + long) * (num_draft_tokens + 1)
    gen, request = bench.lanes(num_lanes, context, num_draft_tokens, room)
    program = bench.program(gen, request, num_draft_tokens)
    gen, turn = program.run(gen, request, 1)
    jax.block_until_ready(turn)
    times: dict[int, list[float]] = {short: [], long: []}
    tokens, steps, dispatch = 0, 0, []
    for repeat in range(repeats + 1):
        for count, seen in times.items():
            begun = time.perf_counter()
            gen, turn = program.run(gen, request, count)
            dispatched = time.perf_counter() - begun
            jax.block_until_ready(turn)
            if repeat:
                dispatch.append(dispatched)
                seen.append(time.perf_counter() - begun)
                tokens += int(turn.read(False).emitted.count.sum())
                steps += count
    fast, slow = (statistics.median(seen) for seen in times.values())
    step_ms = 1e3 * (slow - fast) / (long - short)
    figures = {
        "lanes": num_lanes,
        "context": context,
        "k": num_draft_tokens,
        "step_ms": step_ms,
        "call_ms": 1e3 * fast - short * step_ms,
        "dispatch_ms": 1e3 * max(dispatch),
        "tokens_a_step": tokens / steps / num_lanes,
        "tokens_a_second": 1e3 * tokens / steps / step_ms,
        "compile_seconds": program.compile_seconds,
        "temporary_gib": program.temporary_bytes / 2**30,
        **bench.floor(num_lanes, context, num_draft_tokens),
    }
    stats = jax.devices()[0].memory_stats() or {}
    figures["peak_gib"] = stats.get("peak_bytes_in_use", 0) / 2**30
    for leaf in jax.tree.leaves((gen, request)):
        leaf.delete()
    return figures


def run_step(args: argparse.Namespace, console: rich.console.Console) -> Record:
    """The command `step`."""
    bench = _bench(args)
    table = rich.table.Table(
        "lanes", "context", "k", "ms a step", "floor", "ratio", "tokens/s", "call ms", "dispatch ms", "compile s"
    )
    found: list[Record] = []
    for num_lanes, context, k in itertools.product(args.lanes, args.contexts, args.k):
        names = str(num_lanes), str(context), str(k)
        try:
            one = measure_step(bench, num_lanes, context, k, args.repeats)
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            sizes = {"num_draft_tokens": k, "length": context, "page_size": PAGE_SIZE, "dtype": str(bench.dtype)}
            once, lane = floor.memory_terms(bench.config, **sizes)
            needed = sum(once.values()) + num_lanes * sum(lane.values())
            failure = {"error": str(error).splitlines()[0], "needed_bytes": needed}
            found.append({"lanes": num_lanes, "context": context, "k": k, **failure})
            table.add_row(*names, f"needs {needed / 2**30:,.2f} GiB", *[""] * 6)
            continue
        found.append(one)
        table.add_row(
            *names,
            f"{one['step_ms']:.3f}",
            f"{one['floor_ms']:.3f}",
            f"{one['step_ms'] / one['floor_ms']:.2f}",
            f"{one['tokens_a_second']:,.0f}",
            f"{one['call_ms']:.1f}",
            f"{one['dispatch_ms']:.1f}",
            f"{one['compile_seconds']:.0f}",
        )
        console.print(f"lanes {num_lanes}, context {context}, k {k}: {one['step_ms']:.3f} ms")
    console.print(table)
    return {"command": "step", "model": args.model, "acceptance": args.acceptance, "steps": found}


# -- prefill -----------------------------------------------------------------------------------------------------------


def measure_prefill(bench: Bench, num_lanes: int, tokens: int, chunk: int, together: int, repeats: int) -> Record:
    """Seconds of reading prompts of `tokens` tokens into every lane, a chunk of `together` lanes a call.

    The lower bound is the matrices' share alone: what the delta rule and attention multiply comes on top.
    """
    together = min(together, num_lanes)
    gen, request = bench.lanes(num_lanes, 0, MAX_DRAFTS, tokens)
    table, empty = jnp.array(gen.cache.page_table), jnp.zeros((num_lanes,), jnp.int32)
    rng = np.random.default_rng(0)
    seen = []
    for _ in range(repeats + 1):
        gen = replace(gen, cache=replace(gen.cache, lengths=jnp.array(empty)))
        jax.block_until_ready(gen)
        begun = time.perf_counter()
        for start, first in itertools.product(range(0, tokens, chunk), range(0, num_lanes, together)):
            lanes = np.arange(first, first + together, dtype=np.int32)
            ids = rng.integers(0, bench.config.vocab_size, (together, chunk)).astype(np.int32)
            counts = np.where(lanes < num_lanes, min(chunk, tokens - start), 0).astype(np.int32)
            gen = programs.read_prompts(bench.model, bench.head, gen, table, lanes, ids, counts)
        jax.block_until_ready(gen)
        seen.append(time.perf_counter() - begun)
    seconds = statistics.median(seen[1:])
    weights = sum(floor.num_bytes(layer) for layer in bench.loaded.model.layers) // jnp.dtype(bench.dtype).itemsize
    least = 2 * num_lanes * tokens * weights / floor.MATRIX
    for leaf in jax.tree.leaves((gen, request)):
        leaf.delete()
    return {
        "lanes": num_lanes,
        "tokens": tokens,
        "chunk": [together, chunk],
        "seconds": seconds,
        "tokens_a_second": num_lanes * tokens / seconds,
        "floor_seconds": least,
        "first_seconds": seen[0],
    }


def run_prefill(args: argparse.Namespace, console: rich.console.Console) -> Record:
    """The command `prefill`."""
    bench = _bench(args)
    table = rich.table.Table("lanes", "tokens", "chunk", "s", "tokens/s", "share of the ceiling", "first call, s")
    found: list[Record] = []
    for num_lanes, tokens in itertools.product(args.lanes, args.tokens):
        one = measure_prefill(bench, num_lanes, tokens, args.chunk, args.together, args.repeats)
        found.append(one)
        names = str(num_lanes), str(tokens), " x ".join(map(str, one["chunk"]))
        share = f"{one['floor_seconds'] / one['seconds']:.0%}"
        figures = f"{one['seconds']:.3f}", f"{one['tokens_a_second']:,.0f}", share, f"{one['first_seconds']:.0f}"
        table.add_row(*names, *figures)
        console.print(f"{num_lanes} lanes of {tokens} tokens: {one['seconds']:.3f} s, {share} of the matrix ceiling")
    console.print(table)
    return {"command": "prefill", "model": args.model, "prefill": found}


# -- memory ------------------------------------------------------------------------------------------------------------


def run_memory(args: argparse.Namespace, console: rich.console.Console) -> Record:
    """The command `memory`: what weights and lanes take with and without drafts, and how many lanes fit; by shapes."""
    config = subject.config_of(args.model)
    memory = int(args.memory * 2**30)
    table = rich.table.Table("what", "", *(f"k = {k}, MiB" for k in args.k))
    arms: list[Record] = []
    for k in args.k:
        once, lane = floor.memory_terms(
            config, num_draft_tokens=k, length=args.length, page_size=PAGE_SIZE, dtype=args.dtype or "bfloat16"
        )
        fit = max(0, (memory - sum(once.values())) // sum(lane.values()))
        arms.append({"k": k, "once": once, "lane": lane, "lanes": fit})
    for part, title in (("once", "once"), ("lane", "a lane")):
        for name in dict.fromkeys(itertools.chain(*(arm[part] for arm in arms))):
            table.add_row(name, title, *(f"{arm[part].get(name, 0) / 2**20:,.2f}" for arm in arms))
    table.add_row(f"lanes of {args.length} tokens in {args.memory:g} GiB", "", *(f"{arm['lanes']:,}" for arm in arms))
    console.print(table)
    first, *others = arms
    for arm in others:
        arm["cost"] = 1 - arm["lanes"] / max(first["lanes"], 1)
        console.print(f"k = {arm['k']} costs {arm['cost']:.1%} of the lanes of k = {first['k']}")
    return {"command": "memory", "model": args.model, "length": args.length, "memory": memory, "arms": arms}


# -- kernels -----------------------------------------------------------------------------------------------------------


def time_turns(run: Callable[[int], Any], repeats: int = 40) -> float:
    """Seconds of one turn of a device loop: two lengths of it are timed, so that what a call costs drops out."""
    times = {}
    for turns in (repeats, 3 * repeats):
        jax.block_until_ready(run(turns))
        seen = []
        for _ in range(3):
            begun = time.perf_counter()
            jax.block_until_ready(run(turns))
            seen.append(time.perf_counter() - begun)
        times[turns] = min(seen)
    return (times[3 * repeats] - times[repeats]) / (2 * repeats)


def delta_case(lanes: int, rows: int, folds: int, dtype: str) -> tuple[Any, ...]:
    """Random arguments of the delta-rule window at the shapes of 27B."""
    rng = np.random.default_rng(lanes + rows)
    heads, key_heads = 48, 16
    channels = 2 * key_heads * 128 + heads * 128
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32))  # noqa: E731

    def delta_rows() -> DeltaRows:
        gates = -jnp.abs(normal(lanes, rows, heads)), jax.nn.sigmoid(normal(lanes, rows, heads))
        return DeltaRows(normal(lanes, rows, channels).astype(dtype), *gates)

    return (
        normal(lanes, heads, 128, 128),
        normal(lanes, 3, channels).astype(dtype),
        delta_rows(),
        jnp.full((lanes,), folds, jnp.int32),
        delta_rows(),
        jnp.full((lanes,), rows, jnp.int32),
        normal(channels, 4).astype(dtype),
    )


@dataclass(frozen=True)
class Case:
    """An op at one shape."""

    op: str
    shape: str
    # a call of so many turns, each on what the one before has left, by an implementation
    run: Callable[[int, str], Any]
    # what one turn must move, and how fast that can go
    num_bytes: int
    ceiling: float
    # the largest difference between two implementations
    tolerance: float


def delta_rule_cases(lanes: Sequence[int]) -> Iterator[Case]:
    """The delta-rule window of one layer."""
    for count in lanes:
        for rows, folds in ((1, 1), (4, 3)):
            # float32 rows: in bfloat16 two exponentials may round a row of the convolution to different neighbours
            for dtype in ("float32", "bfloat16"):
                state, *rest = delta_case(count, rows, folds, dtype)
                one = partial(_delta_turns, state, rest)
                # two differing neighbours of bfloat16, in a value of size four
                tolerance = 1e-4 if dtype == "float32" else 4 * 2.0**-7
                yield Case(
                    "gated_delta",
                    f"{count} x {rows}, fold {folds}, {dtype}",
                    one,
                    2 * state.nbytes,
                    floor.COPY,
                    tolerance,
                )


def _delta_turns(state: Any, rest: Any, turns: int, implementation: str) -> Any:
    return programs.delta_windows(jnp.array(state), *rest, repeats=jnp.int32(turns), implementation=implementation)


def attention_cases(lanes: Sequence[int]) -> Iterator[Case]:
    """Attention of one layer over pages, four rows a lane."""
    groups, heads, dim, rows = 4, 24, 256, 4
    for count in lanes:
        for context in (512, 8192):
            pages = context // PAGE_SIZE
            keys = jax.random.split(jax.random.key(count), 4)
            pool = (count * pages, PAGE_SIZE, groups, dim)
            made = [jax.random.normal(key, pool, jnp.bfloat16) for key in keys[:2]]
            queries = jax.random.normal(keys[2], (count, rows, heads, dim), jnp.bfloat16)
            table = jax.random.permutation(keys[3], count * pages).astype(jnp.int32).reshape(count, pages)
            whole = jnp.full((count,), context - rows, jnp.int32), jnp.full((count,), rows, jnp.int32)
            one = partial(_attention_turns, (queries, *made, table, *whole))
            size = 2 * count * context * groups * dim * 2
            yield Case("paged_attention", f"{count} x {rows} over {context}", one, size, floor.READ, 2e-2)


def _attention_turns(arguments: Any, turns: int, implementation: str) -> Any:
    return programs.attentions(*arguments, repeats=jnp.int32(turns), implementation=implementation)


def sampling_cases(lanes: Sequence[int]) -> Iterator[Case]:
    """From logits to tokens, four rows a lane, over the vocabulary of 27B; reading the logits once is the bound."""
    settings: dict[str, Any] = {
        "no filter": {},
        "top-k 20, top-p 0.95": {"top_k": 20, "top_p": 0.95},
        "top-p 0.95": {"top_p": 0.95},
    }
    for count in lanes:
        logits = 3 * jax.random.normal(jax.random.key(count), (count, 4, 248_320), jnp.float32)
        for name, filters in settings.items():
            temperature = 1.5 if name == "top-p 0.95" else 1.0
            one = partial(_sampling_turns, logits, Sampling.alike(count, temperature=temperature, **filters))
            yield Case("sampling", f"{count} x 4, {name}", one, logits.nbytes, floor.READ, 0.0)


def _sampling_turns(logits: Any, sampling: Sampling, turns: int, implementation: str) -> Any:
    if implementation != "xla":
        raise NotImplementedError("it has no kernel of its own")
    return programs.samples(logits, sampling, repeats=jnp.int32(turns))


# the shapes of each op
OPS = {"gated_delta": delta_rule_cases, "paged_attention": attention_cases, "sampling": sampling_cases}


def run_kernels(args: argparse.Namespace, console: rich.console.Console) -> Record:
    """The command `kernels`: each op, shape and implementation; a wrong result is not timed."""
    table = rich.table.Table("op", "shape", "implementation", "us", "TB/s", "share of the ceiling", "error")
    found: list[Record] = []
    for case in itertools.chain(*(OPS[op](args.lanes) for op in args.ops)):
        want = case.run(1, "xla")
        for name in args.implementations:
            row: Record = {"op": case.op, "shape": case.shape, "implementation": name, "bytes": case.num_bytes}
            found.append(row)
            try:
                pairs = zip(jax.tree.leaves(case.run(1, name)), jax.tree.leaves(want), strict=True)
                row["error"] = max(float(jnp.abs(a - b).max()) for a, b in pairs)
                if not row["error"] <= case.tolerance:
                    raise ValueError(f"differs from its definition by {row['error']:.1e}: not timed")
                seconds = time_turns(lambda turns, case=case, name=name: case.run(turns, name))
            except (ValueError, RuntimeError, NotImplementedError) as failure:
                row["failure"] = str(failure)[:2000]
                table.add_row(case.op, case.shape, name, "", "", "", row["failure"].splitlines()[0][:60])
                continue
            row["microseconds"] = 1e6 * seconds
            speed = case.num_bytes / seconds
            figures = f"{1e6 * seconds:.1f}", f"{speed / 1e12:.2f}", f"{speed / case.ceiling:.0%}"
            table.add_row(case.op, case.shape, name, *figures, f"{row['error']:.1e}")
    console.print(table)
    return {"command": "kernels", "kernels": found}


# -- profile -----------------------------------------------------------------------------------------------------------


# A step's verbs, and the parts that most of its time goes to: named scopes of the code.
VERBS = ("draft", "verify", "accept_and_commit")
PARTS = ("attention_layer", "delta_layer", "mlp", "unembed", "law")


def scopes_of(text: str) -> dict[str, str]:
    """The scope of each instruction of a compiled program, such as "verify mlp"; "" for one that has none."""
    found = {}
    for name, path in re.findall(r'^\s*(?:ROOT )?%?([\w.-]+) = .*op_name="([^"]*)"', text, re.MULTILINE):
        inside = path.split("/")
        named = [next((scope for scope in reversed(inside) if scope in scopes), "") for scopes in (VERBS, PARTS)]
        found[name] = " ".join(filter(None, named))
    return found


def run_profile(args: argparse.Namespace, console: rich.console.Console) -> Record:
    """The command `profile`: what the device did during a few steps, by scope and by kernel, the longest first."""
    bench = _bench(args)
    # what the host does makes a trace large and slow, and is not shown
    quiet = jax.profiler.ProfileOptions()
    quiet.host_tracer_level = quiet.python_tracer_level = 0
    found: list[Record] = []
    for num_lanes, k in itertools.product(args.lanes, args.k):
        steps = MAX_STEPS // 8
        gen, request = bench.lanes(num_lanes, args.contexts[0], k, 4 * steps * (k + 1))
        program = bench.program(gen, request, k)
        for _ in range(2):
            gen, turn = program.run(gen, request, steps)
        jax.block_until_ready(turn)
        with tempfile.TemporaryDirectory() as scratch:
            directory = Path(args.trace or scratch) / f"lanes{num_lanes}_k{k}"
            with jax.profiler.trace(str(directory), profiler_options=quiet):
                gen, turn = program.run(gen, request, steps)
                jax.block_until_ready(turn)
            rows = device_rows(directory, scopes_of(program.compiled.as_text()))
        total, launches = sum(row.seconds for row in rows), sum(row.count for row in rows)
        console.print(
            f"lanes {num_lanes}, k {k}: {1e3 * total / steps:.3f} ms of device work and "
            f"{launches / steps:.0f} launches a step"
        )
        by_scope: dict[str, list[Any]] = collections.defaultdict(lambda: [0, 0.0])
        for row in rows:
            by_scope[row.scope][0] += row.count
            by_scope[row.scope][1] += row.seconds
        table = rich.table.Table("scope", "launches a step", "us a step")
        for scope, (count, seconds) in sorted(by_scope.items(), key=lambda item: -item[1][1]):
            table.add_row(scope or "none", f"{count / steps:.1f}", f"{1e6 * seconds / steps:.1f}")
        console.print(table)
        table = rich.table.Table("a step", "us a step", "us each", "scope", "kernel")
        longest = sorted(rows, key=lambda row: -row.seconds)[: args.rows]
        for row in longest:
            each = 1e6 * row.seconds / row.count
            figures = f"{row.count / steps:.1f}", f"{1e6 * row.seconds / steps:.1f}", f"{each:.1f}"
            table.add_row(*figures, row.scope, row.kernel[:70])
        console.print(table)
        rows_said = [dataclasses.asdict(row) for row in longest]
        scopes = {scope: {"count": count, "seconds": seconds} for scope, (count, seconds) in by_scope.items()}
        found.append({"lanes": num_lanes, "k": k, "steps": steps, "scopes": scopes, "rows": rows_said})
        for leaf in jax.tree.leaves((gen, request)):
            leaf.delete()
    return {"command": "profile", "model": args.model, "profiles": found}


@dataclass(frozen=True)
class Row:
    """All runs of one kernel in one scope."""

    kernel: str
    scope: str
    count: int
    seconds: float


def device_rows(directory: Path, scopes: Mapping[str, str]) -> list[Row]:
    """The kernels of a trace. Raises ValueError if it shows no GPU at work.

    Args:
        scopes: by the name of the instruction that launched the kernel.
    """
    rows: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    for path in glob.glob(str(directory / "**" / "*.xplane.pb"), recursive=True):
        for plane in jax.profiler.ProfileData.from_file(path).planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    for event in line.events:
                        instruction = str(dict(event.stats).get("hlo_op", ""))
                        rows[event.name, scopes.get(instruction, "")].append(event.duration_ns * 1e-9)
    if not rows:
        raise ValueError(f"the trace shows no GPU at work; a profile needs one, and this is {jax.default_backend()}")
    return [Row(*key, len(seconds), sum(seconds)) for key, seconds in rows.items()]


# -- the command -------------------------------------------------------------------------------------------------------


def _bench(args: argparse.Namespace) -> Bench:
    backend.preferred = args.kernels
    judged = subject.load(args.model, args.dtype)
    jax.block_until_ready(jax.tree.leaves((judged.loaded.model, judged.loaded.head)))
    acceptance = args.acceptance if judged.random or args.acceptance is not None else None
    return Bench(judged.loaded, jnp.dtype(judged.dtype), args.verify, acceptance, args.temperature, args.draft)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _names(text: str, known: Iterable[str]) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
    return names


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = Parser(prog="python -m infer.bench", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, summary in (("step", run_step), ("prefill", run_prefill), ("profile", run_profile)):
        one = commands.add_parser(name, help=summary.__doc__)
        one.add_argument(
            "--model", default="demo", help="checkpoint directory, hub id, demo (default) or random:CONFIG"
        )
        one.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU, else bfloat16")
        one.add_argument("--lanes", type=_numbers, default=[1, 16])
        one.add_argument("--kernels", choices=IMPLEMENTATIONS[:2], help="default: kernels where they run")
        one.add_argument("--draft", choices=DRAFTS, default="auto")
        one.add_argument("--repeats", type=int, default=3)
        one.set_defaults(verify=LAWS[0], acceptance=None, temperature=1.0)
        if name == "prefill":
            one.add_argument("--tokens", type=_numbers, default=[2048], help="of a prompt")
            one.add_argument("--chunk", type=int, default=512, help="tokens of a prompt that a call reads")
            one.add_argument("--together", type=int, default=4, help="prompts that a call reads")
            continue
        one.add_argument("--contexts", type=_numbers, default=[512])
        one.add_argument("--k", type=_numbers, default=[0, 3])
        one.add_argument("--verify", choices=LAWS, default=LAWS[0])
        one.add_argument("--temperature", type=float, default=1.0)
        one.add_argument("--acceptance", type=float, help="synthetic: mean tokens a verify step (of three drafts)")
        one.add_argument("--trace", type=Path, help="where the trace itself is kept (profile)")
        one.add_argument("--rows", type=int, default=10, help="rows of a profile (default 10)")
    memory = commands.add_parser("memory", help=run_memory.__doc__)
    memory.add_argument("--model", default=RANDOM + "qwen3.5-27b", help="checkpoint directory or random:CONFIG")
    memory.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16")
    memory.add_argument("--k", type=_numbers, default=[0, 3])
    memory.add_argument("--length", type=int, default=4096, help="tokens that a lane holds (default 4096)")
    memory.add_argument("--memory", type=float, default=130.0, help="GiB of the device to use (default 130)")
    kernels = commands.add_parser("kernels", help=run_kernels.__doc__)
    kernels.add_argument("--lanes", type=_numbers, default=[1, 16, 64])
    kernels.add_argument("--ops", type=partial(_names, known=OPS), default=list(OPS))
    timed = IMPLEMENTATIONS[:2]
    kernels.add_argument("--implementations", type=partial(_names, known=timed), default=list(timed))
    args = parser.parse_args(argv)
    console = rich.console.Console(stderr=True, highlight=False, width=120)

    def command() -> int:
        run = {
            "step": run_step,
            "prefill": run_prefill,
            "profile": run_profile,
            "memory": run_memory,
            "kernels": run_kernels,
        }[args.command]
        print(to_json({**run(args, console), **provenance()}))
        return 0

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
