"""Maps of the same input stored as one matrix: the same model, the same bytes, fewer products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp import weights
from mtp.draft_head import draft_rows, fp8_head, write_rows
from mtp.layers import Fp8Linear
from tests import rig


def fresh() -> weights.Loaded:
    """The rig's model once more, so that it can be changed."""
    return weights.from_tensors(rig.CONFIG, rig.tensors(), jnp.float32)


def num_bytes(module: object) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(module))


def test_a_stacked_model_and_head_compute_the_same():
    """Hidden rows of a prefill and the head's, what is primed, and the state: within 2e-6 (float32, order one)."""
    plain, stacked = rig.loaded(), fresh()
    stacked.model.stack()
    stacked.head.layers[0].stack()
    tokens, lengths = rig.prompts([7, 12, 3])
    found = []
    for loaded in (plain, stacked):
        hidden, cache = rig.prefill(loaded.model, loaded.head, rig.lanes(3, 32), tokens, lengths)
        arguments = loaded.head, loaded.model, cache, tokens[:, :2], hidden[:, :2], lengths, jnp.full((3,), 2)
        rows, cache = jax.jit(draft_rows)(*arguments)
        primed = jax.jit(write_rows)(*arguments).draft
        valid = jnp.arange(12)[None, :, None] < lengths[:, None, None]
        found.append((jnp.where(valid, hidden, 0), rows, primed.keys, primed.values, cache.delta[0].state))
    for ours, theirs in zip(*found, strict=True):
        assert np.abs(np.asarray(theirs)).max() > 0.1
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6)


def test_stacking_moves_the_weights_and_keeps_no_copy():
    stacked, size = fresh(), num_bytes(rig.loaded().model)
    before = len(jax.tree.leaves(stacked.model))
    stacked.model.stack()
    assert num_bytes(stacked.model) == size
    kinds = rig.CONFIG.layer_types
    fewer = len(kinds) + 2 * kinds.count("full_attention") + 3 * kinds.count("linear_attention")
    assert before - len(jax.tree.leaves(stacked.model)) == fewer


def test_an_fp8_head_is_stacked_and_leaves_the_head_it_is_made_of_alone():
    loaded = fresh()
    before = jax.tree.structure(loaded.head)
    made = fp8_head(loaded.head, loaded.model)
    assert jax.tree.structure(loaded.head) == before
    layer = made.layers[0]
    maps = layer.mlp.gate_up_proj, layer.mlp.down_proj, layer.self_attn.qkv_proj, layer.self_attn.o_proj, made.fc
    assert all(isinstance(linear, Fp8Linear) for linear in maps)
    assert layer.mlp.gate_proj is None and layer.self_attn.k_proj is None


def test_a_stacked_model_is_not_exported(tmp_path):
    stacked = fresh()
    stacked.model.stack()
    with pytest.raises(weights.CheckpointError, match="stacked for decoding.*load the checkpoint again"):
        weights.export(stacked, tmp_path / "out")
