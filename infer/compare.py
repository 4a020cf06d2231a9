"""Runs prompts batch by batch and, if asked, once more by plain decoding: figures, and whether anything was lost."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from infer.batch import Batch, BatchGenerator, Reply, Show, decoded_tokens, summarise
from infer.params import SamplingParams, Task

Record = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What a run gave, as the JSON says it."""

    # one a prompt; time is not among its figures
    records: list[Record]
    # of all prompts together
    total: Record
    # texts that had to be equal in float32 differ at more than a near-tie
    broken: bool


def run_tasks(
    generator: BatchGenerator,
    tasks: Sequence[Task],
    *,
    compare: bool = False,
    show: Show | None = None,
    done: Callable[[list[Record]], None] | None = None,
) -> Outcome:
    """Runs all tasks in batches of the generator's lanes; `show` gets pieces of text (the number is the prompt's in its
    batch), `done` the records of each finished batch."""
    k = max(task.params.num_draft_tokens for task in tasks)
    records: list[Record] = []
    drafting: list[Batch] = []
    plain: list[Batch] = []
    for start in range(0, len(tasks), generator.num_lanes):
        part = tasks[start : start + generator.num_lanes]
        prompts, params = [task.token_ids for task in part], [task.params for task in part]
        drafting.append(generator.run(prompts, params, num_draft_tokens=k, show=show))
        fresh = [record(reply, p) for reply, p in zip(drafting[-1].replies, params, strict=True)]
        if compare:
            plain.append(generator.run(prompts, params, num_draft_tokens=0))
            pairs = zip(drafting[-1].replies, plain[-1].replies, strict=True)
            for one, task, (ours, theirs) in zip(fresh, part, pairs, strict=True):
                one |= {"plain": record(theirs, task.params)} | comparison(generator, task, ours, theirs)
        records += fresh
        if done is not None:
            done(fresh)

    total = figures(drafting)
    if compare:
        total["plain"] = figures(plain)
        for name in ("equal", "equal_expected"):
            total[name] = all(one[name] for one in records)
        total["num_equal"] = sum(one["equal"] for one in records)
        rates = [part["tokens_per_second"] for part in (total, total["plain"])]
        total["speedup"] = rates[0] / rates[1] if all(rates) else None
    exact = str(generator.loaded.model.embed_tokens.weight.dtype) == "float32"
    lost = (one["mismatch"] for one in records if one.get("mismatch") is not None)
    return Outcome(records, total, exact and any(not mismatch["near_tie"] for mismatch in lost))


def record(reply: Reply, params: SamplingParams) -> Record:
    """What the JSON says of one reply, apart from time."""
    own = {name: value for name, value in dataclasses.asdict(reply).items() if name not in ("drafted", "accepted")}
    return own | dataclasses.asdict(summarise([reply])) | {"seed": params.seed}


def comparison(generator: BatchGenerator, task: Task, ours: Reply, theirs: Reply) -> Record:
    """Whether a reply is plain decoding's, and whether it has to be; if it has to and is not, where they part."""
    expected = task.params.temperature == 0 or task.params.verify == "coupled"
    equal = ours.token_ids == theirs.token_ids
    found = None if equal or not expected else generator.mismatch(task.token_ids, ours, theirs, task.params)
    told = None if found is None else dataclasses.asdict(found) | {"near_tie": found.near_tie}
    return {"equal": equal, "equal_expected": expected, "mismatch": told}


def figures(batches: Iterable[Batch]) -> Record:
    """What the JSON says of batches that ran one after the other; times in seconds."""
    batches = list(batches)
    replies = [reply for batch in batches for reply in batch.replies]
    tokens, seconds = decoded_tokens(replies), sum(batch.decode_seconds for batch in batches)
    return dataclasses.asdict(summarise(replies)) | {
        "compile_seconds": sum(batch.compile_seconds for batch in batches),
        # mean of the batches
        "time_to_first_token": sum(batch.time_to_first_token for batch in batches) / len(batches),
        "decode_seconds": seconds,
        "tokens_per_second": tokens / seconds if tokens else None,
    }
