"""Batches of the target's own replies: packed rows of whole sequences, each a pure function of (seed, step).

What is learned are the reply's tokens; the prompt is only read. Too long a sequence is cut, never dropped. Held out are
prompts, with all replies to them.
"""

import functools
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from mtp.shapes import Array, Bool, Int32, Tokens
from train.data import PADDING


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadBatch:
    """Packed rows; with a leading axis where gradients are accumulated over parts."""

    tokens: Tokens
    # which sequence a token belongs to; PADDING where there is none
    documents: Int32[Array, "B T"]
    # tokens that the target wrote
    learned: Bool[Array, "B T"]


@dataclass(frozen=True)
class Sequence:
    """A prompt and its reply."""

    tokens: np.ndarray  # int32
    prompt_tokens: int


@dataclass(frozen=True, eq=False)
class Replies:
    """Sequences, cut to `length`, and how they fill rows of it."""

    sequences: tuple[Sequence, ...]
    length: int

    def batch(self, seed: int, step: int, rows: int, parts: int = 1) -> HeadBatch:
        """The batch of a step, [parts, rows / parts, length].

        Raises:
            ValueError: parts do not divide rows.
        """
        if rows % parts:
            raise ValueError(f"batch.parts={parts} must divide batch.rows={rows}")
        packed = [self._row(seed, step * rows + number) for number in range(rows)]
        made = self._fill(packed)
        return jax.tree.map(lambda x: x.reshape(parts, rows // parts, *x.shape[1:]), made)

    def batches(self, rows: int) -> Iterator[HeadBatch]:
        """Every sequence once, [1, rows, length]; the last batch ends with empty rows."""
        packed = _pack(self.sequences, range(len(self.sequences)), self.length)
        for start in range(0, len(packed), rows):
            part = packed[start : start + rows]
            made = self._fill([*part, *([()] * (rows - len(part)))])
            yield jax.tree.map(lambda x: x[None], made)

    def _row(self, seed: int, number: int) -> tuple[int, ...]:
        """The sequences of a row, rows of all epochs counted through."""
        epoch = 0
        while number >= len(rows := self._epoch(seed, epoch)):
            number -= len(rows)
            epoch += 1
        return rows[number]

    # all epochs: a row's number says nothing without those before it
    @functools.cache  # noqa: B019 (the replies live as long as the run)
    def _epoch(self, seed: int, epoch: int) -> list[tuple[int, ...]]:
        order = np.random.default_rng([seed, epoch]).permutation(len(self.sequences))
        return _pack(self.sequences, order.tolist(), self.length)

    def _fill(self, rows: list[tuple[int, ...]]) -> HeadBatch:
        shape = (len(rows), self.length)
        tokens, learned = np.zeros(shape, np.int32), np.zeros(shape, bool)
        documents = np.full(shape, PADDING, np.int32)
        for row, members in enumerate(rows):
            place = 0
            for number, member in enumerate(members):
                one = self.sequences[member]
                end = place + len(one.tokens)
                tokens[row, place:end], documents[row, place:end] = one.tokens, number
                learned[row, place + one.prompt_tokens : end] = True
                place = end
        return HeadBatch(jnp.asarray(tokens), jnp.asarray(documents), jnp.asarray(learned))


def _pack(sequences: tuple[Sequence, ...], order: "range | list[int]", length: int) -> list[tuple[int, ...]]:
    """Next fit: rows of consecutive sequences."""
    rows: list[list[int]] = [[]]
    filled = 0
    for member in order:
        size = len(sequences[member].tokens)
        if filled + size > length:
            rows.append([])
            filled = 0
        rows[-1].append(member)
        filled += size
    return [tuple(row) for row in rows]


def open_replies(path: Path, length: int, held_out_fraction: float) -> tuple[Replies, Replies, int]:
    """Training and held-out replies of `train.generate_data replies`, and how many lines had nothing to learn.

    Raises:
        ValueError, OSError: no such file, a line of another kind, or a part without a sequence.
    """
    parts: tuple[list[Sequence], list[Sequence]] = ([], [])
    empty = 0
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
                prompt, reply, name = record["prompt_token_ids"], record["token_ids"], str(record["id"])
                tokens = np.asarray([*prompt, *reply], np.int32)[:length]
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{path.name} line {number} is no reply of `train.generate_data replies`") from None
            # a chain of one draft needs its anchor's next token and the one behind it in the reply
            if len(tokens) < len(prompt) + 2:
                empty += 1
                continue
            drawn = int.from_bytes(hashlib.blake2s(name.encode()).digest()[:4], "little") / 2**32
            parts[drawn < held_out_fraction].append(Sequence(tokens, len(prompt)))
    for part, name in zip(parts, ("training", "held-out"), strict=True):
        if not part:
            raise ValueError(f"{path.name} leaves no {name} sequence of {length} tokens: more prompts are needed")
    train, held_out = (Replies(tuple(part), length) for part in parts)
    return train, held_out, empty
