"""The unrolled head is the served head: every depth, packed and alone, against the real cache; and nothing leaks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mtp import cache as caches
from mtp.config import ModelConfig
from mtp.draft_head import draft_rows, prefill
from mtp.model import forward_documents
from train.step import Params
from train.unroll import Packing, same_document, unroll

DEPTHS = 3
FIRST, SECOND = 11, 13  # tokens of the two documents of the packed row
LENGTH = FIRST + SECOND


@pytest.fixture(scope="module")
def params() -> Params:
    """Random float32 parameters: matrices at half gain (hotter random weights are chaotic), no norm at zero."""
    config = ModelConfig.tiny(vocab_size=128, num_hidden_layers=4, eos_token_ids=(127,))

    @jax.jit
    def make() -> Params:
        leaves, tree = jax.tree.flatten(Params.init(config, seed=3))
        keys = jax.random.split(jax.random.key(7), len(leaves))
        noise = [0.1 * jax.random.normal(key, x.shape) for x, key in zip(leaves, keys, strict=True)]
        leaves = [x + n if x.ndim == 1 else 0.5 * x for x, n in zip(leaves, noise, strict=True)]
        made = jax.tree.unflatten(tree, leaves)
        # rows of order one: the first norm would otherwise enlarge what rounding leaves of rows of order 0.01
        table = made.model.embed_tokens.weight
        table.set_value(100 * table.get_value())
        return made

    return make()


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(5).integers(0, 127, LENGTH).astype(np.int32)


@jax.jit
def trained(params: Params, tokens: jax.Array, documents: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    """Trunk rows and each depth's rows, as in training."""
    packing = Packing.of(documents)
    hidden = forward_documents(params.model, tokens, packing.starts, packing.attend)
    return hidden, unroll(params.head, params.model, tokens, hidden, packing, DEPTHS)


PACKED = np.repeat([4, 9], [FIRST, SECOND]).astype(np.int32)[None]
_prefill = jax.jit(prefill)
_draft_rows = jax.jit(draft_rows)


def served(params: Params, document: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Trunk row and the drafts' rows [anchors, depths, D] of every anchor, step by step through the cache: lane t has
    read tokens 0..t, is told token t + 1, and drafts on with the document's tokens."""
    lanes = LENGTH
    cache = caches.init(
        params.model.config,
        num_lanes=lanes,
        num_pages=lanes * 4,
        page_size=8,
        pages_per_lane=4,
        num_draft_tokens=DEPTHS,
        dtype=jnp.float32,
    )
    for lane in range(lanes):
        cache = caches.admit(cache, lane, range(4 * lane, 4 * lane + 4))
    padded = np.zeros(LENGTH + DEPTHS, np.int32)
    padded[: len(document)] = document
    num_tokens = jnp.arange(1, lanes + 1, dtype=jnp.int32)
    hidden, cache = _prefill(
        params.model, params.head, cache, jnp.broadcast_to(padded[None, :LENGTH], (lanes, LENGTH)), num_tokens
    )
    row = jnp.take_along_axis(hidden, (num_tokens - 1)[:, None, None], axis=1)
    trunk, outputs = row[:, 0], []
    one = jnp.ones_like(num_tokens)
    for depth in range(DEPTHS):
        fed = jnp.asarray(padded[depth + 1 : depth + 1 + lanes])[:, None]
        row, cache = _draft_rows(params.head, params.model, cache, fed, row, cache.lengths + depth, one)
        outputs.append(row[:, 0])
    anchors = len(document)
    return np.asarray(trunk)[:anchors], np.stack(outputs, axis=1)[:anchors]


@pytest.mark.parametrize("place", [slice(0, FIRST), slice(FIRST, LENGTH)], ids=["first", "second"])
def test_unroll_packed_and_alone_equals_serving(params: Params, tokens: np.ndarray, place: slice) -> None:
    document = tokens[place]
    trunk, drafts = served(params, document)

    hidden, outputs = trained(params, tokens[None], PACKED)
    # a document alone in its window: the rest is padding
    alone_tokens = np.zeros((1, LENGTH), np.int32)
    alone_tokens[0, : len(document)] = document
    alone_documents = np.where(np.arange(LENGTH) < len(document), 0, -1).astype(np.int32)[None]
    hidden_alone, outputs_alone = trained(params, alone_tokens, alone_documents)

    for rows, deep, where in ((hidden, outputs, place), (hidden_alone, outputs_alone, slice(len(document)))):
        np.testing.assert_allclose(rows[0, where], trunk, atol=1e-5)
        for depth in range(DEPTHS):
            # the anchors whose chain lies in the document
            count = len(document) - 1 - depth
            np.testing.assert_allclose(
                np.asarray(deep[depth])[0, where][:count], drafts[:count, depth], atol=1e-5, err_msg=f"{depth=}"
            )


def test_own_keys_of_each_depth_matter(params: Params, tokens: np.ndarray) -> None:
    """The comparison above has something to see: a chain that forgets its own earlier entries differs."""
    hidden, outputs = trained(params, tokens[None], PACKED)
    packing = Packing.of(jnp.asarray(PACKED))
    shifted = Packing(packing.starts, packing.positions + 1, packing.seen)
    once = jax.jit(unroll, static_argnames="num_depths")
    (forgetful,) = once(params.head, params.model, np.roll(tokens[None], -1, axis=1), outputs[0], shifted, num_depths=1)
    assert np.abs(np.asarray(forgetful - outputs[1]))[0, : FIRST - 2].max() > 1e-3


def test_no_gradient_crosses_documents(params: Params, tokens: np.ndarray) -> None:
    """Each token has a row of the embedding to itself here, so the gradient's rows are the tokens that were read."""
    identity = jnp.arange(LENGTH, dtype=jnp.int32)[None]
    graph, weights = nnx.split(params.model)

    @jax.jit
    def support(weights: nnx.State) -> jax.Array:
        """Of the valid predictions of the second document, at each depth: [depths + 1, tokens]."""

        def rows(weights: nnx.State) -> jax.Array:
            model = nnx.merge(graph, weights)
            hidden, outputs = trained(Params(model, params.head), identity, jnp.asarray(PACKED))
            count = [SECOND - 1 - depth for depth in range(DEPTHS + 1)]
            return jnp.stack(
                [jnp.sum(jnp.sin(x[0, FIRST : FIRST + n])) for x, n in zip([hidden, *outputs], count, strict=True)]
            )

        gradient = jax.jacrev(rows)(weights)["embed_tokens"]["weight"][...]
        return jnp.max(jnp.abs(gradient), axis=2)[:, :LENGTH]

    # each anchor reads its chain and never its target, so the last token of all is read by nobody
    expected = (np.arange(LENGTH) >= FIRST) & (np.arange(LENGTH) < LENGTH - 1)
    np.testing.assert_array_equal(np.asarray(support(weights)) > 0, np.tile(expected, (DEPTHS + 1, 1)))


def test_only_whole_chains_count() -> None:
    documents = jnp.array([[0, 0, 0, 0, 1, 1, -1, -1]], jnp.int32)
    expected = np.zeros((8, 3), bool)
    # targets 1, 2, 3 of document 0 and 5 of document 1; depth d needs d more tokens of the document before
    expected[[0, 1, 2, 4], 0] = True
    expected[[1, 2], 1] = True
    expected[2, 2] = True
    np.testing.assert_array_equal(same_document(documents, 2)[0], expected)
