"""The trunk's hidden rows of all training data, in a file: a run that has them need not run the trunk.

One vector a token is both what the head reads and, through the unembedding, its teacher. Rows lie in the order of the
sequences, in the trunk's dtype. The file appears whole or not at all, and belongs to one file of data, one tokenizer,
one row length and one trunk: the first is known by hashes, the last by computing some rows again.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from tqdm import tqdm

from mtp.model import Qwen35
from train.head_data import HeadData, Sequences
from train.head_step import hidden_rows

ROWS, ABOUT = "hidden.bin", "about.json"
# How far rows that are computed again may be from those kept, by the root of the mean square over that of the rows:
# other batch shapes round otherwise.
ALIKE = {"float32": 1e-4, "bfloat16": 0.05}


@dataclass(frozen=True)
class HiddenCache:
    """A directory with the rows of some data; `about` says of which."""

    directory: Path
    about: Mapping[str, Any]
    # of a part that is computed
    num_rows: int

    def attach(self, data: HeadData, model: Qwen35, console: Console) -> HeadData:
        """The same data, whose batches have `hidden`; the file is written first if it isn't there.

        Raises:
            ValueError: the directory has rows of other data or of another trunk, or the disk has no room.
        """
        width, dtype = model.config.hidden_size, model.embed_tokens.weight.dtype
        both = data.train, data.held_out
        counts = [sum(len(one.tokens) for one in part.sequences) for part in both]
        shape = (sum(counts), width)
        about = {**self.about, "shape": list(shape), "dtype": str(dtype)}
        new = not (self.directory / ABOUT).exists()
        if new:
            self._write(both, model, shape, about, console)
        saved = json.loads((self.directory / ABOUT).read_text(encoding="utf-8"))
        changed = [key for key in about if saved.get(key) != about[key]]
        if changed:
            raise ValueError(f"{self.directory} has hidden rows of other data: {', '.join(changed)} differ; remove it")
        rows = np.memmap(self.directory / ROWS, dtype, "r", shape=shape)
        train, held_out = (
            replace(part, hidden=one) for part, one in zip(both, np.split(rows, counts[:1]), strict=True)
        )
        if not new:
            self._check(held_out, model)
        return replace(data, train=train, held_out=held_out)

    def _write(
        self, parts: tuple[Sequences, ...], model: Qwen35, shape: tuple[int, int], about: Mapping, console: Console
    ) -> None:
        size = shape[0] * shape[1] * model.embed_tokens.weight.dtype.itemsize
        self.directory.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.directory).free
        said = f"hidden rows of {shape[0]:,} tokens: {size / 2**30:,.2f} GiB in {self.directory}"
        console.print(said, soft_wrap=True, highlight=False)
        if size > free:
            raise ValueError(
                f"hidden_cache={self.directory} needs {size:,} bytes and {free:,} are free; give another directory, or "
                "none"
            )
        partial = self.directory / f"{ROWS}.partial"
        with partial.open("wb") as file:
            for part in parts:
                batches = list(part.batches(self.num_rows))
                for batch in tqdm(batches, desc="hidden rows", unit="batch", leave=False):
                    one = jax.tree.map(lambda x: x[0], batch)
                    rows, documents = np.asarray(hidden_rows(model, one)), np.asarray(one.documents)
                    # padding is behind the sequences of a row
                    file.write(rows[documents >= 0].tobytes())
        partial.replace(self.directory / ROWS)
        told = self.directory / f"{ABOUT}.partial"
        told.write_text(json.dumps(about) + "\n", encoding="utf-8")
        told.replace(self.directory / ABOUT)

    def _check(self, part: Sequences, model: Qwen35) -> None:
        """Raises ValueError if the rows aren't this trunk's."""
        first = jax.tree.map(lambda x: x[0], next(iter(part.batches(self.num_rows))))
        kept, own = (x.astype(jnp.float32) for x in (first.hidden, hidden_rows(model, replace(first, hidden=None))))
        here = (first.documents >= 0)[..., None]
        off = jnp.sqrt(jnp.sum(jnp.where(here, kept - own, 0.0) ** 2) / jnp.sum(jnp.where(here, own, 0.0) ** 2))
        if not off <= ALIKE[str(model.embed_tokens.weight.dtype)]:
            raise ValueError(f"{self.directory} has hidden rows of another model ({float(off):.1%} off); remove it")
