"""Held-out figures of a trunk and its head: bits per byte, and how many drafts would be accepted.

Everything is teacher-forced on the held-out text, so it costs one pass. Acceptance is a chain: a draft counts only if
those before it held.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mtp.shapes import Array, Bool
from train.data import Batch, HeldOut
from train.losses import RowScores


@dataclass(frozen=True)
class Acceptance:
    """Of the drafts at each depth, over the anchors whose whole chain lies in one document."""

    num_anchors: int
    # share of anchors whose drafts all held up to this depth
    unconditional: tuple[float, ...]

    @property
    def conditional(self) -> tuple[float | None, ...]:
        """Given that the drafts before held; None where none did."""
        before = (1.0, *self.unconditional[:-1])
        return tuple(a / b if b else None for a, b in zip(self.unconditional, before, strict=True))

    @property
    def length(self) -> float:
        """Mean tokens a verify step: 1 plus the accepted drafts, every anchor weighted alike."""
        return 1.0 + sum(self.unconditional)


class Tally:
    """Sums over evaluated batches, by domain."""

    def __init__(self, held_out: HeldOut, num_depths: int) -> None:
        self.names = tuple(dict.fromkeys(held_out.domains))
        self._domain = np.array([self.names.index(name) for name in held_out.domains])
        # a document's bytes are shared out evenly to its predictions, so that a part of it has a part of them
        predictions = np.maximum(np.diff(held_out.corpus.starts) - 1, 1)
        self._bytes_each = held_out.num_bytes / predictions
        self._bytes = np.zeros(len(self.names))
        self._nll = np.zeros(len(self.names))
        self._anchors = np.zeros(len(self.names))
        # accepted at T = 0 and at T = 1
        self._accepted = np.zeros((2, len(self.names), num_depths))

    def add(self, batch: Batch, scores: RowScores, valid: Bool[Array, "B T R"]) -> None:
        """Adds a batch of `train.data.HeldOut.batches` and what `train.step.score_batch` says of it."""
        documents, valid = np.asarray(batch.documents), np.asarray(valid)
        trunk_nll, draft_nll = np.asarray(scores.trunk_nll), np.asarray(scores.draft_nll)
        document = np.maximum(documents, 0) // 2
        domain = self._domain[document]
        here = valid[..., 0]
        self._nll += np.bincount(domain[here], trunk_nll[here], len(self.names))
        self._bytes += np.bincount(domain[here], self._bytes_each[document[here]], len(self.names))

        depths = draft_nll.shape[-1]
        length = documents.shape[1]
        # back from the rows of the targets to those of the anchors
        at_anchor = lambda x, depth: np.roll(x, -depth, axis=1)  # noqa: E731
        index = np.arange(length)[None, :]
        complete = at_anchor(valid[..., depths], depths) & (index + depths < length)
        self._anchors += np.bincount(domain[complete], minlength=len(self.names))
        # at T = 1 a draft that is in the text was kept with probability min(1, q / p)
        kept = np.exp(np.minimum(trunk_nll[..., None] - draft_nll, 0.0))
        held = np.ones((2, *documents.shape))
        for depth in range(1, depths + 1):
            agree = at_anchor(np.asarray(scores.agree)[..., depth - 1], depth)
            overlap = at_anchor(np.asarray(scores.overlap)[..., depth - 1], depth)
            held[0] = held[0] * agree
            for law, accepted in enumerate((held[0], held[1] * overlap)):
                self._accepted[law, :, depth - 1] += np.bincount(domain[complete], accepted[complete], len(self.names))
            held[1] = held[1] * at_anchor(kept[..., depth - 1], depth)

    def report(self) -> Mapping[str, dict]:
        """Figures of each domain and of "all".

        `bits_per_byte` is the text's cost in bits (all tokens but a document's first, the one that ends it included)
        by its bytes. `acceptance` at temperature 0 counts drafts equal to the trunk's own best token; at 1 it is the
        acceptance of rejection sampling, exact where the text is like the trunk's own samples.
        """
        groups = {name: [i] for i, name in enumerate(self.names)} | {"all": list(range(len(self.names)))}
        report = {}
        for name, rows in groups.items():
            anchors = int(self._anchors[rows].sum())
            laws = {
                f"temperature_{law}": Acceptance(
                    anchors, tuple((self._accepted[law, rows].sum(0) / max(anchors, 1)).tolist())
                )
                for law in (0, 1)
            }
            report[name] = {
                "bits_per_byte": float(self._nll[rows].sum() / math.log(2) / max(self._bytes[rows].sum(), 1.0)),
                "bytes": round(self._bytes[rows].sum()),
                "num_anchors": anchors,
                "acceptance": {
                    key: {
                        "unconditional": list(value.unconditional),
                        "conditional": list(value.conditional),
                        "length": value.length,
                    }
                    for key, value in laws.items()
                },
            }
        return report
