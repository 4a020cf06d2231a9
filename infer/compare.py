"""Runs prompts batch by batch and, if asked, once more by plain decoding: the figures, and whether anything was lost."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from infer.batch import Batch, BatchGenerator, Reply, Show, decoded_tokens, summarise
from infer.params import SamplingParams, Task


def record(reply: Reply, params: SamplingParams) -> dict[str, Any]:
    """What the JSON says of one reply, apart from time."""
    own = {name: value for name, value in dataclasses.asdict(reply).items() if name not in ("drafted", "accepted")}
    return own | dataclasses.asdict(summarise([reply])) | {"seed": params.seed}


def timing(batches: Sequence[Batch]) -> dict[str, Any]:
    """What the JSON says of time, over batches that ran one after the other; seconds."""
    tokens = sum(decoded_tokens(batch.replies) for batch in batches)
    seconds = sum(batch.decode_seconds for batch in batches)
    return {
        "compile_seconds": sum(batch.compile_seconds for batch in batches),
        "time_to_first_token": sum(batch.time_to_first_token for batch in batches) / len(batches),
        "decode_seconds": seconds,
        "tokens_per_second": tokens / seconds if tokens else None,
    }


@dataclass(frozen=True)
class Outcome:
    """What a run gave: a record for each prompt, the figures of all of them, and whether a promise was broken."""

    records: list[dict[str, Any]]
    total: dict[str, Any]
    broken: bool


class Runner:
    """Runs tasks batch by batch, and again plainly if they are to be compared."""

    def __init__(self, generator: BatchGenerator, dtype: str, compare: bool) -> None:
        self.generator, self.dtype, self.compare = generator, dtype, compare

    def __call__(self, tasks: Sequence[Task], lanes: int, show: Any = None, done: Any = None) -> Outcome:
        """`show` gets pieces of text, `done` the records of each finished batch."""
            k = max(task.params.num_draft_tokens for task in tasks)
        records: list[dict[str, Any]] = []
        fast, plain = [], []
        for start in range(0, len(tasks), lanes):
            part = tasks[start : start + lanes]
            prompts, params = [task.token_ids for task in part], [task.params for task in part]
            fast.append(self.generator.run(prompts, params, num_draft_tokens=k, show=show))
            fresh = [record(reply, p) for reply, p in zip(fast[-1].replies, params, strict=True)]
            if self.compare:
                plain.append(self.generator.run(prompts, params, num_draft_tokens=0))
                for one, task, ours, theirs in zip(fresh, part, fast[-1].replies, plain[-1].replies, strict=True):
                    one |= {"plain": record(theirs, task.params)} | self._compare(task, ours, theirs)
            records += fresh
            if done is not None:
                done(fresh)
        total = dataclasses.asdict(summarise(reply for batch in fast for reply in batch.replies)) | timing(fast)
        if self.compare:
            pooled = dataclasses.asdict(summarise(reply for batch in plain for reply in batch.replies)) | timing(plain)
            both = pooled["tokens_per_second"] and total["tokens_per_second"]
            total["plain"] = pooled
            total["equal"] = all(one["equal"] for one in records)
            total["num_equal"] = sum(one["equal"] for one in records)
            total["equal_expected"] = all(one["equal_expected"] for one in records)
            total["speedup"] = total["tokens_per_second"] / pooled["tokens_per_second"] if both else None
        return Outcome(records, total, any(self._broken(one) for one in records))

    def _compare(self, task: Task, ours: Reply, theirs: Reply) -> dict[str, Any]:
        expected = task.params.temperature == 0 or task.params.verify == "coupled"
        mismatch = self.generator.mismatch(task.token_ids, ours, theirs, task.params)
        found = None if mismatch is None else dataclasses.asdict(mismatch) | {"near_tie": mismatch.near_tie}
        return {"equal": mismatch is None, "equal_expected": expected, "mismatch": found if expected else None}

    def _broken(self, one: dict[str, Any]) -> bool:
        mismatch = one.get("mismatch")
        return self.dtype == "float32" and mismatch is not None and not mismatch["near_tie"]
