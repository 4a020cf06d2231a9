"""Batches from a tokenised corpus: windows of packed documents, each a pure function of (seed, step).

A corpus directory holds `train.bin` and `val.bin`, uint16 tokens of documents that each end with the same token, and
`meta.json`. An epoch is all documents in a fresh order, joined and cut into windows that are shuffled again; a document
that is cut starts anew in the next window. Nothing is read but the pages that a batch touches.
"""

import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mtp.shapes import Array, Int32, Tokens

PADDING = -1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Rows of packed documents."""

    tokens: Tokens
    # which document a token belongs to, different for neighbours in a row; PADDING where there is none
    documents: Int32[Array, "B T"]


@dataclass(frozen=True, eq=False)
class Corpus:
    """One split of a corpus: its tokens and where its documents start."""

    tokens: np.ndarray  # uint16, memory-mapped
    starts: np.ndarray  # [documents + 1], the last one is the end

    @classmethod
    def open(cls, path: Path) -> "Corpus":
        """Maps a `.bin` file. The token that ends it is the one that ends each document.

        Raises:
          FileNotFoundError, ValueError: no such file, or an empty one.
        """
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist; `python -m train.generate_data corpus` builds it")
        if path.stat().st_size < 2:
            raise ValueError(f"{path} is empty")
        tokens = np.memmap(path, np.uint16, mode="r")
        ends = np.flatnonzero(tokens == tokens[-1]) + 1
        return cls(tokens, np.concatenate([[0], ends]))

    def batch(self, seed: int, step: int, rows: int, length: int) -> Batch:
        """The training batch of a step, on its way to the device.

        Raises:
          ValueError: if the corpus is smaller than one window.
        """
        # an epoch starts at a random place, so that its cuts are its own
        windows = (len(self.tokens) - length) // length
        if windows < 1:
            raise ValueError(f"the corpus has {len(self.tokens)} tokens, fewer than two windows of {length}")
        tokens = np.empty((rows, length), np.int32)
        documents = np.empty((rows, length), np.int32)
        for row in range(rows):
            epoch, index = divmod(step * rows + row, windows)
            order = self._epoch(seed, epoch, length, windows)
            self._fill(order, order.offset + int(order.windows[index]) * length, tokens[row], documents[row])
        return Batch(jnp.asarray(tokens), jnp.asarray(documents))

    @functools.lru_cache(maxsize=2)  # noqa: B019 (a corpus lives as long as the run)
    def _epoch(self, seed: int, epoch: int, length: int, windows: int) -> "_Epoch":
        random = np.random.default_rng([seed, epoch])
        documents = random.permutation(len(self.starts) - 1)
        ends = np.cumsum(np.diff(self.starts)[documents])
        return _Epoch(documents, ends, random.permutation(windows), int(random.integers(length)))

    def _fill(self, order: "_Epoch", position: int, tokens: np.ndarray, documents: np.ndarray) -> None:
        """Writes one window, which starts at `position` of the epoch's joined documents."""
        place, filled = int(np.searchsorted(order.ends, position, "right")), 0
        while filled < len(tokens):
            document = order.documents[place]
            left = min(int(order.ends[place]) - position, len(tokens) - filled)
            source = int(self.starts[document + 1]) - (int(order.ends[place]) - position)
            tokens[filled : filled + left] = self.tokens[source : source + left]
            documents[filled : filled + left] = place
            place, position, filled = place + 1, position + left, filled + left


@dataclass(frozen=True)
class _Epoch:
    documents: np.ndarray  # order of the documents
    ends: np.ndarray  # end of each in the joined text
    windows: np.ndarray  # order of the windows
    offset: int  # where the first window starts


@dataclass(frozen=True, eq=False)
class HeldOut:
    """The held-out documents, each with its domain and its size in bytes."""

    corpus: Corpus
    domains: tuple[str, ...]  # of each document
    num_bytes: np.ndarray  # of each document

    @classmethod
    def open(cls, directory: Path) -> "HeldOut":
        """Reads `val.bin` and its index in `meta.json`.

        Raises:
          FileNotFoundError, ValueError: a file is missing, or the two do not agree.
        """
        corpus = Corpus.open(directory / "val.bin")
        index = read_meta(directory)["val_documents"]
        starts = [entry["start"] for entry in index]
        if starts != corpus.starts[:-1].tolist():
            raise ValueError(f"{directory}: meta.json lists other documents than val.bin holds; build it again")
        return cls(
            corpus,
            tuple(entry["domain"] for entry in index),
            np.array([entry["bytes"] for entry in index], np.int64),
        )

    def batches(self, rows: int, length: int) -> Iterator[Batch]:
        """Every document, cut into pieces of up to `length` tokens that overlap by one, so that each token but a
        document's first is predicted once. `Batch.documents` is twice the document's number, plus the parity of the
        piece; rows are filled up with padding."""
        tokens, documents = [], []
        fill = length
        for document, (start, end) in enumerate(zip(self.corpus.starts, self.corpus.starts[1:], strict=False)):
            for piece, first in enumerate(range(start, max(end - 1, start + 1), length - 1)):
                ids = self.corpus.tokens[first : min(first + length, end)]
                if fill + len(ids) > length:
                    tokens.append(np.zeros(length, np.int32))
                    documents.append(np.full(length, PADDING, np.int32))
                    fill = 0
                tokens[-1][fill : fill + len(ids)] = ids
                documents[-1][fill : fill + len(ids)] = 2 * document + piece % 2
                fill += len(ids)
        while len(tokens) % rows:
            tokens.append(np.zeros(length, np.int32))
            documents.append(np.full(length, PADDING, np.int32))
        tokens, documents = np.stack(tokens), np.stack(documents)
        for first in range(0, len(tokens), rows):
            rows_here = slice(first, first + rows)
            yield Batch(jnp.asarray(tokens[rows_here]), jnp.asarray(documents[rows_here]))


def read_meta(directory: Path) -> dict[str, Any]:
    """The corpus's `meta.json`.

    Raises:
      FileNotFoundError: if there is none.
    """
    path = directory / "meta.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; `python -m train.generate_data corpus` builds it")
    return json.loads(path.read_text(encoding="utf-8"))


def training_beginnings(
    directory: Path, count: int, length: int, turn: Sequence[int], seed: int
) -> Iterator[list[int]]:
    """Up to `count` different training documents in a random order: a conversation up to where the assistant speaks
    first, behind the tokens `turn`, if that is within `length`; of any other document its first `length` tokens.
    Documents that end sooner are passed over."""
    corpus = Corpus.open(directory / "train.bin")
    seen: set[tuple[int, ...]] = set()
    for number in np.random.default_rng(seed).permutation(len(corpus.starts) - 1).tolist():
        ids = corpus.tokens[corpus.starts[number] : corpus.starts[number + 1]][: length + 1].tolist()
        ends = [i + len(turn) for i in range(len(ids)) if ids[i : i + len(turn)] == list(turn)]
        size = min([*ends, length])
        beginning = tuple(ids[:size])
        if len(ids) > size and beginning not in seen:
            seen.add(beginning)
            yield list(beginning)
            if len(seen) == count:
                return


def held_out_questions(
    directory: Path, count: int, longest: int, turn: Sequence[int]
) -> list[tuple[dict[str, Any], list[int]]]:
    """Up to `count` different held-out conversations, spread evenly over them, each up to where the assistant speaks
    for the last time: behind the tokens `turn` that open its turn. Beginnings of more than `longest` tokens are passed
    over."""
    tokens = np.fromfile(directory / "val.bin", np.uint16)
    found: dict[bytes, tuple[dict[str, Any], list[int]]] = {}
    for document in read_meta(directory)["val_documents"]:
        ids = tokens[document["start"] : document["start"] + document["tokens"]]
        opened = [i + len(turn) for i in range(len(ids)) if ids[i : i + len(turn)].tolist() == list(turn)]
        if opened and opened[-1] <= longest:
            question = ids[: opened[-1]]
            found.setdefault(question.tobytes(), (document, question.tolist()))
    questions = list(found.values())
    count = min(count, len(questions))
    return [questions[i * len(questions) // count] for i in range(count)]


def held_out_texts(directory: Path, count: int, lengths: tuple[int, int]) -> list[tuple[dict[str, Any], list[int]]]:
    """Up to `count` held-out documents, as many of each domain and spread evenly over it: all of each that has at least
    the first of `lengths` tokens, cut off at the second."""
    least, most = lengths
    tokens = np.fromfile(directory / "val.bin", np.uint16)
    chosen = _spread_over_domains(read_meta(directory)["val_documents"], count, least)
    return [(d, tokens[d["start"] : d["start"] + min(d["tokens"], most)].tolist()) for d in chosen]


def held_out_beginnings(directory: Path, count: int, length: int) -> list[tuple[dict[str, Any], list[int]]]:
    """Up to `count` held-out documents, the same number of each domain and spread evenly over it, with the first
    `length` tokens of each. Documents that end sooner are passed over."""
    tokens = np.fromfile(directory / "val.bin", np.uint16)
    chosen = _spread_over_domains(read_meta(directory)["val_documents"], count, length + 1)
    return [(d, tokens[d["start"] : d["start"] + length].tolist()) for d in chosen]


def _spread_over_domains(documents: Sequence[dict[str, Any]], count: int, least: int) -> list[dict[str, Any]]:
    """Documents of at least so many tokens, the same number of each domain."""
    long = [document for document in documents if document["tokens"] >= least]
    domains = sorted({document["domain"] for document in long})
    chosen = []
    for domain in domains:
        own = [document for document in long if document["domain"] == domain]
        share = min(len(own), count // len(domains))
        chosen += [own[i * len(own) // share] for i in range(share)]
    return chosen
