"""The head as it drafts while serving, unrolled over all anchors of packed documents at once.

Anchor t is a position whose next token is known. Depth d = 1..k feeds token t + d and a hidden row (the trunk's row t,
then the head's own output) at rotary position t + d - 1, and predicts token t + d + 1. While serving, the cache holds
one entry made from a true hidden row for each anchor up to t, and the chain's own entries behind them. So depth d
attends to the depth-1 keys of all anchors up to its own, as one causal block, and to the single key of its own anchor
at each depth 2..d. This is exact, not an approximation; `tests/train/test_unroll.py` holds it against the served head.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from mtp.attention import GatedAttention
from mtp.draft_head import MTPHead
from mtp.model import Qwen35
from mtp.shapes import Array, Bool, Float, Hidden, Int32, Tokens

KeysValues = tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Packing:
    """What packed documents mean to the layers."""

    # at the first token of each document
    starts: Bool[Array, "B T"]
    # from 0 in each document
    positions: Int32[Array, "B T"]
    # row t may see row s: same document, s <= t
    seen: Bool[Array, "B T T"]

    @classmethod
    def of(cls, documents: Int32[Array, "B T"]) -> "Packing":
        """From the document of each token, as `train.data.Batch` has it."""
        index = jnp.arange(documents.shape[1], dtype=jnp.int32)
        first = jnp.ones_like(documents[:, :1], bool)
        starts = jnp.concatenate([first, documents[:, 1:] != documents[:, :-1]], axis=1)
        begin = lax.cummax(jnp.where(starts, index[None, :], 0), axis=1)
        seen = (index[None, :, None] >= index[None, None, :]) & (index[None, None, :] >= begin[:, :, None])
        return cls(starts, index[None, :] - begin, seen)

    def attend(self, layer: GatedAttention, x: Hidden) -> Hidden:
        """Causal attention within documents: the `attend` of `mtp.model.forward_documents`."""
        queries, gate = layer.queries_gate(x, self.positions)
        return layer.combine(attend_rows(queries, self.seen, layer.keys_values(x, self.positions)), gate)


def attend_rows(
    queries: Float[Array, "B T N H"],
    seen: Bool[Array, "B T T"],
    block: KeysValues,
    own: Sequence[KeysValues] = (),
) -> Float[Array, "B T N H"]:
    """Attention of row t to the rows of `block` that it sees and to row t of each of `own`; float32 scores."""
    batch, length, heads, dim = queries.shape
    groups = block[0].shape[2]
    exact = lax.Precision.HIGHEST if queries.dtype == jnp.float32 else None
    grouped = queries.reshape(batch, length, groups, heads // groups, dim)

    def product(spec: str, *arrays: Array) -> Array:
        return jnp.einsum(spec, *arrays, precision=exact, preferred_element_type=jnp.float32)

    scores = [product("btkgh,bskh->bkgts", grouped, block[0])]
    scores[0] = jnp.where(seen[:, None, None], scores[0], jnp.float32(-1e30))
    scores += [product("btkgh,btkh->bkgt", grouped, keys)[..., None] for keys, _ in own]
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1) * dim**-0.5, axis=-1).astype(queries.dtype)
    mixed = product("bkgts,bskh->btkgh", weights[..., :length], block[1])
    for i, (_, values) in enumerate(own):
        mixed += product("bkgt,btkh->btkgh", weights[..., length + i], values)
    return mixed.astype(queries.dtype).reshape(batch, length, heads, dim)


def unroll(
    head: MTPHead,
    model: Qwen35,
    tokens: Tokens,
    hidden: Hidden,
    packing: Packing,
    num_depths: int,
    remat: bool = False,
) -> list[Hidden]:
    """The head's normed output of each depth, row t for anchor t.

    Rows whose anchor, chain or target lies outside one document are finite and meaningless; `same_document` says which
    are not.

    Args:
        hidden: the trunk's rows after the final norm.
        remat: recompute each depth in the backward pass.
    """
    block: list[KeysValues] = []

    def one_depth(depth: int) -> Callable[..., tuple[Hidden, KeysValues]]:
        def run(head: MTPHead, model: Qwen35, hidden: Hidden, memory: list[KeysValues]) -> tuple[Hidden, KeysValues]:
            made: list[KeysValues] = []

            def mix(x: Hidden) -> Hidden:
                layer = head.layers[0].self_attn
                positions = packing.positions + depth
                queries, gate = layer.queries_gate(x, positions)
                made.append(layer.keys_values(x, positions))
                first, *own = [*memory, *made]
                return layer.combine(attend_rows(queries, packing.seen, first, own), gate)

            x = head.inputs(model, jnp.roll(tokens, -(depth + 1), axis=1), hidden)
            return head.norm(head.layers[0](x, mix)), made[0]

        return jax.checkpoint(run) if remat else run

    outputs = []
    for depth in range(num_depths):
        with jax.named_scope(f"draft_depth_{depth + 1}"):
            hidden, entry = one_depth(depth)(head, model, hidden, block)
        block.append(entry)
        outputs.append(hidden)
    return outputs


def align(outputs: Sequence[Hidden]) -> Float[Array, "B T k D"]:
    """The outputs moved to the row that they are judged at: depth d of anchor t to row t + d, whose next token it
    predicts, and whose trunk row is its teacher."""
    return jnp.stack([jnp.roll(x, depth, axis=1) for depth, x in enumerate(outputs, 1)], axis=2)


def same_document(documents: Int32[Array, "B T"], num_depths: int) -> Bool[Array, "B T R"]:
    """Which predictions count at each row: the trunk's of the next token (first), then that of each depth, whose anchor
    lies so many rows before. Anchor, chain and target must be in one document; padding has none."""
    length = documents.shape[1]
    index = jnp.arange(length, dtype=jnp.int32)[None, :]
    target = jnp.roll(documents, -1, axis=1)
    inside = (index < length - 1) & (target >= 0)
    counts = [
        inside & (index >= depth) & (jnp.roll(documents, depth, axis=1) == target) for depth in range(num_depths + 1)
    ]
    return jnp.stack(counts, axis=-1)
