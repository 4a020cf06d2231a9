"""What a decoding step can't go below on an H200: bytes over the memory's speed, operations over the matrix units'."""

from collections.abc import Mapping

import jax

from mtp.config import ModelConfig
from mtp.draft_head import MTPHead
from mtp.model import Qwen35

# bytes read, bytes copied and bfloat16 operations a second, measured (LOG.md)
READ, COPY, MATRIX = 4.40e12, 4.18e12, 790e12


def step_terms(
    config: ModelConfig,
    model: Qwen35,
    head: MTPHead | None,
    *,
    num_lanes: int,
    context: float,
    num_draft_tokens: int,
) -> dict[str, float]:
    """Seconds of each part of a step.

    The weights are read once (the embedding only if it unembeds too) and multiply every row, every lane's recurrent
    state is read and written, its keys and values are read, and each draft reads the head, what it unembeds with, and
    its own keys and values.

    Args:
        head: as it drafts; not read where nothing is drafted.
        context: tokens that a lane holds.
    """
    itemsize = model.embed_tokens.weight.dtype.itemsize
    weights = num_bytes(model) - (0 if config.tie_word_embeddings else num_bytes(model.embed_tokens))
    rows = num_lanes * (num_draft_tokens + 1)
    state = config.linear_num_value_heads * config.linear_value_head_dim * config.linear_key_head_dim * 4
    held = num_lanes * context * 2 * config.num_key_value_heads * config.head_dim * itemsize
    drafting = 0.0
    if num_draft_tokens and head is not None:
        table = model.unembedding.nbytes if head.lm_head is None else 0
        drafting = num_draft_tokens * (num_bytes(head) + table + held)
    return {
        "weights": weights / READ,
        "matrices": 2 * rows * weights / itemsize / MATRIX,
        "state": 2 * num_lanes * config.layer_types.count("linear_attention") * state / COPY,
        "keys and values": held * config.layer_types.count("full_attention") / READ,
        "drafting": drafting / READ,
    }


def whole(terms: Mapping[str, float]) -> float:
    """All terms together: reading the weights and multiplying with them overlap."""
    return max(terms["weights"], terms["matrices"]) + terms["state"] + terms["keys and values"] + terms["drafting"]


def num_bytes(tree: object) -> int:
    """Of all arrays in a tree."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
