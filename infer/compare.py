"""Runs prompts through the engine and, if asked, once more by plain decoding: figures, and whether anything was lost.

Plain decoding is the same engine, asked for no drafts.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import jax.numpy as jnp

from infer import programs
from infer.batch import PAGE_SIZE, bucket, chunk_lengths, chunks, make_cache, make_history, make_request
from infer.engine import Engine, Stream
from infer.params import SamplingParams, Task
from infer.replies import Reply, Result
from infer.tokenizer import Tokenizer
from mtp.weights import Loaded

# Where the two best values that plain decoding compares lie closer than this, in float32, rounding may choose.
NEAR_TIE = 1e-5

Record = dict[str, Any]
Show = Callable[[str], None]


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


@dataclass(frozen=True)
class Pass:
    """All prompts, answered once."""

    results: tuple[Result, ...]
    # 0 if the engine was warm
    compile_seconds: float
    # from the first token of any reply to the end of the last one
    decode_seconds: float

    @property
    def replies(self) -> list[Reply]:
        """Every reply to every prompt."""
        return [reply for result in self.results for reply in result.replies]


@dataclass(frozen=True)
class Outcome:
    """What a run gave, as the JSON says it."""

    # one a prompt; time is not among its figures
    records: list[Record]
    # of all replies together
    total: Record
    # what went wrong in single replies, a line each
    errors: list[str]
    # texts that had to be equal in float32 differ at more than a near-tie
    broken: bool


def summarise(replies: Iterable[Reply]) -> Summary:
    """Adds replies up. A reply's first token comes from the prompt's last row and counts for no verify step."""
    replies = list(replies)
    steps = sum(reply.num_verify_steps for reply in replies)
    drafted = tuple(sum(column) for column in zip(*(reply.drafted for reply in replies), strict=True))
    accepted = tuple(sum(column) for column in zip(*(reply.accepted for reply in replies), strict=True))
    return Summary(
        num_tokens=sum(len(reply.token_ids) for reply in replies),
        num_verify_steps=steps,
        drafted=drafted,
        accepted=accepted,
        acceptance_length=decoded_tokens(replies) / steps if steps else None,
        accepted_by_position=tuple(a / d if d else None for a, d in zip(accepted, drafted, strict=True)),
    )


def decoded_tokens(replies: Iterable[Reply]) -> int:
    """Tokens that verify steps emitted: all but the first of each reply."""
    return sum(max(len(reply.token_ids) - 1, 0) for reply in replies)


def engine_for(loaded: Loaded, tokenizer: Tokenizer, tasks: Sequence[Task], **options: Any) -> Engine:
    """An engine just large enough for these tasks, which all name k and the same law.

    Args:
        options: more of `Engine`.

    Raises:
        ValueError: one line; see `Engine`.
    """
    asked = [task.params.num_draft_tokens for task in tasks]
    longest = max(len(task.token_ids) + task.params.max_tokens for task in tasks)
    return Engine(
        loaded,
        tokenizer,
        num_draft_tokens="auto" if "auto" in asked else max(k for k in asked if isinstance(k, int)),
        max_length=min(bucket(longest, 2 * PAGE_SIZE), loaded.config.max_position_embeddings),
        page_size=PAGE_SIZE,
        chunk_lengths=sorted({length for task in tasks for length in chunk_lengths(len(task.token_ids))}),
        verify=tasks[0].params.verify or "rejection",
        **options,
    )


def run_tasks(
    engine: Engine,
    tasks: Sequence[Task],
    *,
    names: Sequence[str] = (),
    compare: bool = False,
    show: Show | None = None,
    done: Callable[[Record], None] | None = None,
) -> Outcome:
    """Runs all tasks, as many at once as the engine has lanes.

    Args:
        names: what each task's errors begin with.
        compare: run them by plain decoding afterwards.
        show: called with pieces of text as they come, prompt after prompt.
        done: called with each task's record, in order; with `compare` at the end.

    Raises:
        ValueError: one line; a task that the engine can't serve.
    """
    names = names or [""] * len(tasks)
    records: list[Record] = []

    def add(number: int, ours: Result, theirs: Result | None = None) -> None:
        records.append(task_record(engine, tasks[number], ours, theirs))
        if done is not None:
            done(records[-1])

    asked = {0 if task.params.num_draft_tokens == 0 else engine.num_draft_tokens for task in tasks}
    needed = None if engine.auto or compare else sorted(asked)
    drafting = answer(engine, tasks, names, show=show, done=None if compare else add, needed=needed)
    errors = errors_of(drafting, names)
    total = figures(drafting)
    if not compare:
        return Outcome(records, total, errors, broken=False)

    undrafted = [replace(task, params=replace(task.params, num_draft_tokens=0)) for task in tasks]
    plain = answer(engine, undrafted, names)
    for number, pair in enumerate(zip(drafting.results, plain.results, strict=True)):
        add(number, *pair)
    replies = [reply for record in records for reply in (record, *record.get("others", ()))]
    total["plain"] = figures(plain)
    for name in ("equal", "equal_expected"):
        total[name] = all(reply[name] for reply in replies)
    total["num_equal"] = sum(reply["equal"] for reply in replies)
    rates = [part["tokens_per_second"] for part in (total, total["plain"])]
    total["speedup"] = rates[0] / rates[1] if all(rates) else None
    exact = str(engine.loaded.model.embed_tokens.weight.dtype) == "float32"
    lost = [reply["mismatch"] for reply in replies if reply["mismatch"] is not None]
    broken = exact and not all(mismatch["near_tie"] for mismatch in lost)
    return Outcome(records, total, errors + errors_of(plain, names), broken)


def answer(
    engine: Engine,
    tasks: Sequence[Task],
    names: Sequence[str],
    *,
    show: Show | None = None,
    done: Callable[[int, Result], None] | None = None,
    needed: Sequence[int] | None = None,
) -> Pass:
    """Puts all tasks in line, compiles if need be, and runs them to their ends, or on an interrupt leaves none behind.

    Args:
        done: called with each task's number and result, in order.
        needed: the k whose programs are compiled, all if None.
    """
    submitted: list[float] = []
    streams: list[Stream] = []
    results: list[Result] = []
    try:
        for task, name in zip(tasks, names, strict=True):
            submitted.append(time.perf_counter())
            try:
                streams.append(engine.submit(task.token_ids, task.params))
            except ValueError as error:
                raise ValueError(f"{name}{error}") from None
        # once it is known that every task can be served: this may take minutes
        begun = time.perf_counter()
        if not engine.warm:
            engine.warm_up(needed)
        compile_seconds = time.perf_counter() - begun
        for number, stream in enumerate(streams):
            for delta in stream:
                if show is not None:
                    show(delta.text)
            results.append(stream.result)
            if done is not None:
                done(number, stream.result)
    except BaseException:
        for stream in streams:
            engine.abort(stream.id)
        raise
    begins, ends = [], []
    for start, result in zip(submitted, results, strict=True):
        for reply in result.replies:
            begins.append(start + reply.queue_seconds + reply.prefill_seconds)
            ends.append(begins[-1] + reply.decode_seconds)
    return Pass(tuple(results), compile_seconds, max(ends) - min(begins))


def errors_of(answered: Pass, names: Sequence[str]) -> list[str]:
    """What went wrong in single replies, a line each."""
    pairs = zip(names, answered.results, strict=True)
    found = ((name, reply.error) for name, result in pairs for reply in result.replies)
    return [f"{name}{error}" for name, error in found if error is not None]


def task_record(engine: Engine, task: Task, ours: Result, theirs: Result | None) -> Record:
    """What the JSON says of one prompt: its first reply and, if there are more, the `others`."""
    records = []
    for sample, reply in enumerate(ours.replies):
        params = replace(task.params, n=1, sample_index=task.params.sample_index + sample)
        records.append(reply_record(reply, params))
        if theirs is not None:
            plain = theirs.replies[sample]
            records[-1] |= {"plain": reply_record(plain, params)}
            records[-1] |= comparison(engine, Task(task.token_ids, params), reply, plain)
    first, *others = records
    return first | ({"others": others} if others else {})


def reply_record(reply: Reply, params: SamplingParams) -> Record:
    """What the JSON says of one reply, apart from time."""
    names = ("text", "token_ids", "finish_reason", "error", "prompt_tokens", "cached_tokens")
    told = {name: getattr(reply, name) for name in names} | dataclasses.asdict(summarise([reply]))
    told |= {"seed": params.seed, "sample_index": params.sample_index}
    if reply.log_probs is not None:
        told["log_probs"] = [dataclasses.asdict(one) for one in reply.log_probs]
    return told


def comparison(engine: Engine, task: Task, ours: Reply, theirs: Reply) -> Record:
    """Whether a reply is plain decoding's, and whether it has to be; if it has to and is not, where they part."""
    expected = task.params.temperature == 0 or task.params.verify == "coupled"
    equal = ours.token_ids == theirs.token_ids
    found = None if equal or not expected else mismatch(engine, task, ours, theirs)
    told = None if found is None else dataclasses.asdict(found) | {"near_tie": found.near_tie}
    return {"equal": equal, "equal_expected": expected, "mismatch": told}


def mismatch(engine: Engine, task: Task, reply: Reply, plain: Reply) -> Mismatch | None:
    """Where a reply leaves plain decoding's reply to the same task; None if it never does."""
    pairs = enumerate(zip_longest(reply.token_ids, plain.token_ids))
    position = next((i for i, (ours, theirs) in pairs if ours != theirs), None)
    if position is None:
        return None
    model, config = engine.loaded.model, engine.config
    before = plain.token_ids[:position]
    tokens = [*task.token_ids, *before]
    dtype = model.embed_tokens.weight.dtype
    cache = make_cache(config, None, lanes=1, tokens=len(tokens), num_draft_tokens=0, dtype=dtype)
    for part, count in chunks([tokens]):
        cache = programs.read_chunk(model, None, cache, jnp.asarray(part), jnp.asarray(count))
    params = replace(task.params, num_draft_tokens=0)
    request = make_request([params], engine.stop_ids, config.vocab_size, engine.usable_tokens)
    history = make_history(task.token_ids, before, config.vocab_size)
    margin = programs.decision_margin(model, cache, request, jnp.full((1,), position, jnp.int32), history)
    return Mismatch(position, float(margin[0]))


def figures(answered: Pass) -> Record:
    """What the JSON says of all replies together; times in seconds."""
    replies, seconds = answered.replies, answered.decode_seconds
    tokens = decoded_tokens(replies)
    return dataclasses.asdict(summarise(replies)) | {
        "compile_seconds": answered.compile_seconds,
        "time_to_first_token": sum(reply.prefill_seconds for reply in replies) / len(replies),
        "decode_seconds": seconds,
        "tokens_per_second": tokens / seconds if tokens else None,
    }
