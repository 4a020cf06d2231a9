"""Float64 numpy twin of the law of sampling, for one row: it sorts and counts, and shares no code with the project.

First `adjusted`, then `processed`: penalties, bias and forbidden tokens, then temperature, top-k, top-p and min-p.
"""

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np


def adjusted(
    logits: np.ndarray,
    prompt: Sequence[int] = (),
    reply: Sequence[int] = (),
    *,
    presence: float = 0.0,
    frequency: float = 0.0,
    repetition: float = 1.0,
    bias: np.ndarray | None = None,
    forbidden: Collection[int] = (),
) -> np.ndarray:
    """Logits [V] of the token behind prompt and reply; -inf for what can't be chosen."""
    x = logits.astype(np.float64)
    for token in {*prompt, *reply}:
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
    for token, count in Counter(reply).items():
        x[token] -= frequency * count + presence
    if bias is not None:
        x += bias
    x[list(forbidden)] = -np.inf
    return x


def processed(
    logits: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """Probabilities [V] of one row, with its own account of the order and the ties."""
    if temperature == 0:
        return np.eye(len(logits))[np.argmax(logits)]
    with np.errstate(under="ignore"):
        p = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    if 0 < top_k < len(p):
        p = np.where(p >= np.sort(p)[-top_k], p, 0.0)
    p /= p.sum()
    if top_p < 1:
        falling = np.sort(p)[::-1]
        last = min(np.searchsorted(np.cumsum(falling), top_p), len(p) - 1)
        p = np.where(p >= falling[last], p, 0.0)
    p = np.where(p >= min_p * p.max(), p, 0.0)
    return p / p.sum()
