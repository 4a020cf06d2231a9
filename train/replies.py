"""Answers of the target itself: what a draft head should learn from.

A line of the output is one reply: {"id", "messages" or "prompt", "prompt_token_ids", "token_ids", "text",
"finish_reason", "steps", "seed", "sample"}; steps are the tokens that each verify step emitted. A reply depends on the
weights, the prompt, the settings and the seed, not on what is drawn beside it. Lines come in the order of the prompts,
so that a run that was stopped goes on where its file ends.
"""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


class Stream(Protocol):
    """One request of an engine."""

    @property
    def done(self) -> bool:
        """Whether every reply has ended."""

    @property
    def result(self) -> Any:
        """Its `infer.replies.Result`."""


@dataclass(frozen=True)
class Ask:
    """One prompt of the input: a text, or a conversation that the assistant goes on with."""

    id: str
    # what the tokenizer's template is given, or the text itself
    messages: tuple[Mapping[str, Any], ...] | None
    prompt: str | None
    # everything else on its line is handed through
    rest: Mapping[str, Any]

    @property
    def record(self) -> dict[str, Any]:
        """How a line of the output begins."""
        asked = {"prompt": self.prompt} if self.messages is None else {"messages": list(self.messages)}
        return {"id": self.id, **self.rest, **asked}


@dataclass
class Counts:
    """What has become of the prompts; together they are all of them."""

    done: int = 0
    # of `done`: found in the file
    resumed: int = 0
    # the engine could not finish a reply
    failed: int = 0
    # too long, or nothing to answer
    skipped: int = 0


def read_asks(path: Path) -> list[Ask]:
    """The prompts of a JSONL file; of a conversation, what comes before the assistant's last turn is kept.

    Raises:
        ValueError: naming the line: no JSON, neither a prompt nor messages, or an id that occurs twice.
    """
    asks: list[Ask] = []
    seen: set[str] = set()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path.name} line {number}"
        try:
            record = json.loads(line)
        except ValueError:
            raise ValueError(f"{where}: this is not JSON") from None
        if not isinstance(record, dict) or ("prompt" in record) == ("messages" in record):
            raise ValueError(f'{where}: an object with either "prompt" or "messages" is needed')
        name = str(record.pop("id", number))
        if name in seen:
            raise ValueError(f"{where}: the id {name!r} occurs twice")
        seen.add(name)
        prompt, messages = record.pop("prompt", None), record.pop("messages", None)
        if prompt is not None and not isinstance(prompt, str):
            raise ValueError(f'{where}: "prompt" is no text')
        if messages is not None:
            if not isinstance(messages, list) or not all(isinstance(one, dict) and "role" in one for one in messages):
                raise ValueError(f'{where}: "messages" is no list of {{"role", "content"}}')
            turns = [place for place, one in enumerate(messages) if one["role"] == "assistant"]
            messages = tuple(messages[: turns[-1]] if turns else messages)
        asks.append(Ask(name, messages, prompt, record))
    return asks


def seed_of(seed: int, name: str) -> int:
    """The seed of one prompt: its own, whatever else is in the file."""
    return int.from_bytes(hashlib.blake2s(f"{seed}/{name}".encode()).digest()[:4], "little")


def finished_lines(path: Path, replies_each: int) -> Iterator[dict[str, Any]]:
    """The whole prompts' replies that an earlier run has left; what was cut off behind them is removed from the file.

    Raises:
        ValueError: a line in the middle is no record.
    """
    if not path.exists():
        return
    whole, records = 0, []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                records.append(json.loads(line))
                _ = records[-1]["id"], records[-1]["sample"]
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{path} line {number} is no record of this command; give another file") from None
            if len(records) % replies_each == 0:
                whole = file.tell()
    with path.open("r+b") as file:
        file.truncate(whole)
    yield from records[: len(records) // replies_each * replies_each]


def regenerate(
    asks: Sequence[Ask],
    submit: Callable[[Ask, int], Stream],
    step: Callable[[], object],
    out: Path,
    *,
    seed: int,
    replies_each: int,
    window: int,
    complain: Callable[[str], None],
    progress: Callable[[int], None] = lambda tokens: None,
) -> Counts:
    """Draws the replies that `out` lacks and appends them to it.

    Args:
        submit: starts a prompt with a seed; ValueError says why it can't be answered.
        step: runs the engine a little.
        window: prompts under way at once.
        complain: told of each prompt that fails or is skipped.
        progress: told of the tokens of each prompt that is done.
    """
    counts = Counts()
    known = {record["id"] for record in finished_lines(out, replies_each)}
    waiting: deque[tuple[Ask, int, Stream]] = deque()
    with out.open("a", encoding="utf-8") as file:

        def finish() -> None:
            ask, own, stream = waiting.popleft()
            while not stream.done:
                step()
            result = stream.result
            wrong = next((reply for reply in result.replies if reply.finish_reason == "error"), None)
            if wrong is not None:
                counts.failed += 1
                complain(f"{ask.id}: {wrong.error}")
                return
            lines = [
                ask.record
                | {
                    "prompt_token_ids": list(result.prompt_token_ids),
                    "token_ids": list(reply.token_ids),
                    "text": reply.text,
                    "finish_reason": reply.finish_reason,
                    "steps": list(reply.steps),
                    "seed": own,
                    "sample": sample,
                }
                for sample, reply in enumerate(result.replies)
            ]
            file.write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
            file.flush()
            counts.done += 1
            progress(sum(len(reply.token_ids) for reply in result.replies))

        for ask in asks:
            if ask.id in known:
                counts.done += 1
                counts.resumed += 1
                continue
            if len(waiting) == window:
                finish()
            own = seed_of(seed, ask.id)
            try:
                waiting.append((ask, own, submit(ask, own)))
            except ValueError as error:
                counts.skipped += 1
                complain(f"{ask.id}: {error}")
        while waiting:
            finish()
    return counts
