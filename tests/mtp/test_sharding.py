"""One mesh from the start: four emulated devices decode what one device decodes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.decode import begin
from infer.speculative import decode_loop
from mtp import cache as kv
from mtp import sharding
from tests import rig


def test_a_mesh_needs_its_devices() -> None:
    with pytest.raises(ValueError, match="needs 64 devices, found 4"):
        sharding.make_mesh(data=8, tensor=8)


def test_an_axis_is_cut_only_where_it_divides() -> None:
    mesh = sharding.make_mesh(data=2, tensor=2)
    spec = lambda *args: sharding.param_sharding(mesh, *args).spec  # noqa: E731
    assert spec(("heads", None), (6, 5)) == jax.P("tensor", None)
    assert spec(("heads", "lanes"), (7, 4)) == jax.P(None, "data")


def test_every_parameter_and_every_cache_field_names_its_axes() -> None:
    model = rig.loaded()
    for module in (model.model, model.head):
        for param in jax.tree.leaves(module, is_leaf=lambda x: hasattr(x, "axes")):
            assert len(param.axes) == param.ndim
    mesh = sharding.make_mesh(data=2, tensor=2)
    placed = kv.shard(rig.lanes(4, 48), mesh)
    cut = [path for path, x in jax.tree_util.tree_leaves_with_path(placed) if not x.sharding.is_fully_replicated]
    whole = [path for path, x in jax.tree_util.tree_leaves_with_path(placed) if x.sharding.is_fully_replicated]
    assert all(len(x.sharding.device_set) == 4 for x in jax.tree.leaves(placed))
    assert cut and not whole, f"not cut along any axis: {whole}"


def test_four_devices_decode_the_same_tokens() -> None:
    """Lanes over `data`, heads, MLP and vocabulary over `tensor`; greedy, 24 tokens, three drafts a step."""
    model = rig.loaded()
    tokens, lengths = rig.prompts([9, 5, 14, 3])
    asked = rig.request(4, 24)
    mesh = sharding.make_mesh(data=2, tensor=2)
    texts = []
    for place in (False, True):
        module = sharding.shard_params(model.model, mesh) if place else model.model
        head = sharding.shard_params(model.head, mesh) if place else model.head
        cache = rig.lanes(4, 64)
        cache = kv.shard(cache, mesh) if place else cache
        hidden, cache = rig.prefill(module, head, cache, tokens, lengths)
        gen = rig.first_token(module, begin(cache, 24), asked, hidden, lengths - 1, jnp.ones(4, bool))
        gen = decode_loop(module, head, gen, asked, jnp.int32(99), num_draft_tokens=3)
        texts.append(np.asarray(gen.tokens))
    np.testing.assert_array_equal(*texts)
