"""Batches of replies, conversations and texts: packed rows of whole sequences, each a pure function of (seed, step).

What is learned of a line, `train.sequences` says. Too long a sequence is cut, never dropped; one without anything to
learn is counted. Held out are prompts, with all replies to them.
"""

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from mtp.shapes import Array, Bool, Hidden, Int32, Tokens
from train.data import PADDING
from train.sequences import Reader, Refusal, Sequence


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadBatch:
    """Packed rows; with a leading axis where gradients are accumulated over parts."""

    tokens: Tokens
    # which sequence a token belongs to; PADDING where there is none
    documents: Int32[Array, "B T"]
    # tokens to predict: those that the assistant wrote, or a text's
    learned: Bool[Array, "B T"]
    # the trunk's rows after its final norm, where they are kept (`train.hidden_cache`)
    hidden: Hidden | None = None


@dataclass(frozen=True, eq=False)
class Sequences:
    """Sequences, cut to `length`, and how they fill rows of it."""

    sequences: tuple[Sequence, ...]
    length: int
    # rows of all sequences, one behind the other [tokens, D]
    hidden: np.ndarray | None = None

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
    @functools.cache  # noqa: B019 (the sequences live as long as the run)
    def _epoch(self, seed: int, epoch: int) -> list[tuple[int, ...]]:
        order = np.random.default_rng([seed, epoch]).permutation(len(self.sequences))
        return _pack(self.sequences, order.tolist(), self.length)

    def _fill(self, rows: list[tuple[int, ...]]) -> HeadBatch:
        shape = (len(rows), self.length)
        tokens, learned = np.zeros(shape, np.int32), np.zeros(shape, bool)
        documents = np.full(shape, PADDING, np.int32)
        hidden = None if self.hidden is None else np.zeros((*shape, self.hidden.shape[1]), self.hidden.dtype)
        for row, members in enumerate(rows):
            place = 0
            for number, member in enumerate(members):
                one = self.sequences[member]
                end = place + len(one.tokens)
                tokens[row, place:end], documents[row, place:end] = one.tokens, number
                learned[row, place:end] = one.learned
                if hidden is not None:
                    begin = self._begins[member]
                    hidden[row, place:end] = self.hidden[begin : begin + len(one.tokens)]
                place = end
        return HeadBatch(*(None if x is None else jnp.asarray(x) for x in (tokens, documents, learned, hidden)))

    @functools.cached_property
    def _begins(self) -> np.ndarray:
        """Where each sequence's rows begin."""
        return np.cumsum([0, *(len(one.tokens) for one in self.sequences)])


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


def _none() -> dict[str, int]:
    return {reason.value: 0 for reason in Refusal}


@dataclass
class Counts:
    """What has become of the file's lines: `done` and `refused` together are all of them."""

    lines: int = 0
    done: int = 0
    # by reason; of a conversation, the first turn's
    refused: dict[str, int] = field(default_factory=_none)
    # turns of lines that are done
    refused_turns: dict[str, int] = field(default_factory=_none)


@dataclass(frozen=True)
class HeadData:
    """A file of training data."""

    train: Sequences
    held_out: Sequences
    counts: Counts
    sha256: str  # of the file

    @property
    def num_tokens(self) -> int:
        """Of all sequences, as they were cut."""
        return sum(len(one.tokens) for part in (self.train, self.held_out) for one in part.sequences)


def open_data(reader: Reader) -> HeadData:
    """The sequences of the reader's file, in its order.

    Raises:
        ValueError, OSError: no such file, a line that `Reader.read` refuses, or a part without a sequence.
    """
    path, settings = reader.settings.path, reader.settings
    parts: tuple[list[Sequence], list[Sequence]] = ([], [])
    counts, digest = Counts(), hashlib.sha256()
    with path.open("rb") as file:
        for counts.lines, line in enumerate(file, 1):
            digest.update(line)
            try:
                name, made = reader.read(line)
            except ValueError as error:
                raise ValueError(f"{path.name} line {counts.lines}: {error}") from None
            kept = [one for one in made if isinstance(one, Sequence)]
            refused = [one for one in made if isinstance(one, Refusal)]
            if kept:
                counts.done += 1
                for reason in refused:
                    counts.refused_turns[reason] += 1
            else:
                counts.refused[refused[0]] += 1
            drawn = int.from_bytes(hashlib.blake2s(name.encode()).digest()[:4], "little") / 2**32
            parts[drawn < settings.held_out_fraction].extend(kept)
    for part, which in zip(parts, ("training", "held-out"), strict=True):
        if not part:
            raise ValueError(
                f"{path.name} leaves no {which} sequence of {reader.length} tokens: more prompts are needed "
                f"({counts.lines} lines, refused: {counts.refused})"
            )
    train, held_out = (Sequences(tuple(part), reader.length) for part in parts)
    return HeadData(train, held_out, counts, digest.hexdigest())
