"""Does the head see the hidden rows that it was trained on? Its acceptance when it is fed rightly, and in wrong ways.

A head that is fed the wrong row, a row of the wrong norm or its halves in the wrong order still drafts, only worse, and
training would teach it the mistake. So every reading is scored on the same teacher-forced text at depth 1 (deeper
drafts read the head's own output), and the right one has to win. If another does, the head was trained on that.

One mistake cannot be seen, and does no harm: rotary attention knows differences only, so that positions which are off
by one everywhere draft the same. What is probed is a query that stands elsewhere than the keys of the same row.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mtp.draft_head import MTPHead
from mtp.model import Qwen35, residual_documents
from mtp.shapes import Array, Bool, Float32, Hidden, Tokens
from train.head_data import HeadBatch
from train.losses import score_rows
from train.unroll import Packing, attend_rows, same_document

# What it means if drafts are accepted more often with a wrong reading.
MEANINGS = {
    "before the final norm": "it was trained on hidden rows from before the trunk's final norm",
    "halves swapped": "its fc has the hidden row's half first; swap the halves of mtp.fc.weight's columns",
    "the row before": "it was trained on the hidden row of the token before, one off in the pairing",
    "queries one ahead": "its queries were trained with rotary positions one ahead of its keys'",
    "queries one behind": "its queries were trained with rotary positions one behind its keys'",
}
READINGS = ("right", *MEANINGS)
# Standard errors of a difference that are not noise: by chance, one difference in 370 is that far off.
CLEAR = 3.0
# Sequences that the errors are judged by as by many; with fewer nothing is clear.
FEWEST = 8
# Acceptance that is no difference. A nearly flat final norm, for one, is undone by the norm behind it in the head, and
# both sides of it then draft alike.
ALIKE = 0.01


def swap_halves(head: MTPHead) -> MTPHead:
    """The same head with the two halves of its fc's inputs exchanged."""
    swapped: MTPHead = nnx.merge(*nnx.split(head))
    embedding, hidden = jnp.split(head.fc.weight[...], 2, axis=1)
    # not set in place: the value's holder is shared with the head given
    swapped.fc.weight = nnx.Param(jnp.concatenate([hidden, embedding], axis=1), axes=head.fc.weight.axes)
    return swapped


def draft_once(
    head: MTPHead, model: Qwen35, tokens: Tokens, hidden: Hidden, packing: Packing, ahead: int = 0
) -> Hidden:
    """The head's normed output at depth 1, row t for anchor t: the first of `train.unroll.unroll`.

    Args:
        hidden: row t is what anchor t reads.
        ahead: rotary positions by which each query stands ahead of the key of its own row.
    """
    layer = head.layers[0].self_attn

    def mix(x: Hidden) -> Hidden:
        queries, gate = layer.queries_gate(x, packing.positions + ahead)
        keys_values = layer.keys_values(x, packing.positions)
        return layer.combine(attend_rows(queries, packing.seen, keys_values), gate)

    return head.norm(head.layers[0](head.inputs(model, jnp.roll(tokens, -1, axis=1), hidden), mix))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Readings:
    """Of each row's next token, drafted one row before in each of `READINGS`."""

    # sum min(p, q)
    overlap: Float32[Array, "B T readings"]
    # argmax p = argmax q
    agree: Bool[Array, "B T readings"]
    # rows whose next token the target wrote, and whose draft lies in the same sequence
    valid: Bool[Array, "B T"]


@partial(jax.jit, static_argnames=("chunk_rows",))
def read(head: MTPHead, model: Qwen35, batch: HeadBatch, *, chunk_rows: int) -> Readings:
    """One pass of the trunk, and one of the head for each reading.

    Args:
        batch: [B, T].
        chunk_rows: rows whose logits exist at a time.

    Raises:
        ValueError: if chunk_rows does not divide the number of rows.
    """
    packing = Packing.of(batch.documents)
    residual = residual_documents(model, batch.tokens, packing.starts, packing.attend)
    hidden = model.norm(residual)
    before = jnp.where(packing.starts[..., None], jnp.zeros_like(hidden), jnp.roll(hidden, 1, axis=1))
    once = lambda head, hidden, ahead=0: draft_once(head, model, batch.tokens, hidden, packing, ahead)  # noqa: E731
    fed = {
        "right": once(head, hidden),
        "before the final norm": once(head, residual),
        "halves swapped": once(swap_halves(head), hidden),
        "the row before": once(head, before),
        "queries one ahead": once(head, hidden, 1),
        "queries one behind": once(head, hidden, -1),
    }
    # from the row of the anchor to that of the target
    drafts = jnp.roll(jnp.stack([fed[name] for name in READINGS], axis=2), 1, axis=1)
    unembed = lambda rows: head.logits(model, rows)  # noqa: E731
    scores = score_rows(hidden, drafts, batch.tokens, model.unembed, unembed, chunk_rows)
    targets = jnp.roll(batch.learned, -1, axis=1)
    return Readings(scores.overlap, scores.agree, same_document(batch.documents, 1)[..., 1] & targets)


@dataclass(frozen=True)
class Contract:
    """What some sequences say of the readings: sums over the drafts of each sequence."""

    count: np.ndarray  # drafts [sequences]
    overlap: np.ndarray  # [sequences, readings]
    agree: np.ndarray  # [sequences, readings]

    @property
    def acceptance(self) -> dict[str, float]:
        """Mean of sum min(p, q) over all drafts, by reading."""
        return dict(zip(READINGS, (self.overlap.sum(axis=0) / self.count.sum()).tolist(), strict=True))

    @property
    def lead(self) -> dict[str, tuple[float, float]]:
        """By wrong reading: how much more the right one is accepted, and the standard error of that.

        Sequences are what is drawn; the two readings of each are compared with each other.
        """
        size, total = len(self.count), self.count.sum()
        each = self.overlap[:, :1] - self.overlap[:, 1:]
        mean = each.sum(axis=0) / total
        spread = ((each - mean * self.count[:, None]) ** 2).sum(axis=0)
        few = np.full_like(mean, np.inf)
        error = np.sqrt(spread * size / (size - 1)) / total if size >= FEWEST else few
        return dict(zip(MEANINGS, zip(mean.tolist(), error.tolist(), strict=True), strict=True))

    @property
    def verdicts(self) -> dict[str, str]:
        """Of each wrong reading: it "loses" or "wins" clearly, makes "no difference", or is "undecided"."""
        return {name: _verdict(mean, CLEAR * error) for name, (mean, error) in self.lead.items()}

    @property
    def winner(self) -> str | None:
        """The wrong reading that is accepted most, if it clearly beats the right one."""
        ahead = [name for name, verdict in self.verdicts.items() if verdict == "wins"]
        return max(ahead, key=lambda name: self.acceptance[name], default=None)

    @property
    def complaint(self) -> str | None:
        """What is wrong, in one line; None if the right reading wins."""
        accepted, winner = self.acceptance, self.winner
        if winner is not None:
            figures = f"{accepted[winner]:.3f} accepted, {accepted['right']:.3f} as it should be"
            return f"the head drafts best with this reading: {winner} ({figures}): {MEANINGS[winner]}"
        undecided = [name for name, verdict in self.verdicts.items() if verdict == "undecided"]
        if undecided:
            return f"the right reading does not clearly beat: {', '.join(undecided)}; more replies are needed"
        return None

    def figures(self) -> dict[str, Any]:
        """As JSON has it; `behind` the right reading, with the standard `error` of that (None of too few)."""
        agree = self.agree.sum(axis=0) / self.count.sum()
        lead, verdicts = {"right": (0.0, 0.0)} | self.lead, {"right": None} | self.verdicts
        return {
            "sequences": len(self.count),
            "drafts": int(self.count.sum()),
            "readings": {
                name: {
                    "overlap": accepted,
                    "agree": float(agree[place]),
                    "behind": lead[name][0],
                    "error": lead[name][1] if np.isfinite(lead[name][1]) else None,
                    "verdict": verdicts[name],
                }
                for place, (name, accepted) in enumerate(self.acceptance.items())
            },
        }


def _verdict(mean: float, noise: float) -> str:
    if mean > noise:
        return "loses"
    if abs(mean) + noise < ALIKE:
        return "no difference"
    return "wins" if mean < -noise else "undecided"


def probe(
    head: MTPHead, model: Qwen35, batches: Iterable[HeadBatch], chunk_rows: int, enough: float = np.inf
) -> Contract:
    """Reads batches [1, B, T] (`train.head_data.Sequences.batches`) in all ways, until there are `enough` sequences.

    Raises:
        ValueError: if there is no draft in them, or chunk_rows does not divide the rows of a batch.
    """
    found: list[np.ndarray] = []
    for batch in batches:
        part = jax.tree.map(lambda x: x[0], batch)
        seen = jax.tree.map(np.asarray, read(head, model, part, chunk_rows=chunk_rows))
        documents = np.asarray(part.documents)
        for row, column in enumerate(documents):
            for number in np.unique(column[seen.valid[row]]):
                here = seen.valid[row] & (column == number)
                sums = (x[row, here].sum(axis=0, dtype=np.float64) for x in (seen.overlap, seen.agree))
                found.append(np.concatenate([[here.sum()], *sums]))
        if len(found) >= enough:
            break
    if not found:
        raise ValueError("the replies have no draft to probe the head with")
    table = np.stack(found)
    return Contract(table[:, 0], *np.split(table[:, 1:], 2, axis=1))
