"""What a decoding step can't go below on an H200, bytes over the memory's speed and operations over the matrix units';
and what weights and lanes take of its memory."""

from collections.abc import Mapping

import jax
from flax import nnx

from infer import programs
from mtp.config import ModelConfig
from mtp.draft_head import MTPHead, fp8_head
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
    """Of all arrays in a tree, or of what their shapes say."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def memory_terms(
    config: ModelConfig, *, num_draft_tokens: int, length: int, page_size: int, dtype: str
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes on the device: those that are there once, and those of each lane that holds `length` tokens.

    With drafts the head is fp8, with an fp8 copy of the unembedding. Nothing is allocated: shapes alone are asked. The
    logits and laws are those that a step has to have at once; activations, which are small and shared, are left out.
    """
    k, rows = num_draft_tokens, num_draft_tokens + 1
    model = nnx.eval_shape(lambda: Qwen35(config, nnx.Rngs(0), dtype))
    once = {"weights": num_bytes(model)}
    if k:
        draft = nnx.eval_shape(
            lambda: fp8_head(MTPHead(config, nnx.Rngs(1), dtype), Qwen35(config, nnx.Rngs(0), dtype))
        )
        once["draft head"] = num_bytes(draft)
    pages = -(-length // page_size)
    gen = jax.eval_shape(
        lambda: programs.idle_lanes(
            config,
            num_lanes=1,
            num_pages=pages,
            page_size=page_size,
            pages_per_lane=pages,
            num_draft_tokens=k,
            dtype=dtype,
            with_head=k > 0,
            top=0,
        )
    )
    cache, logits = gen.cache, rows * config.vocab_size * 4
    lane = {
        "keys and values": num_bytes(cache.attention),
        "keys and values of the head": num_bytes(cache.draft),
        "committed state": num_bytes([(one.state, one.conv) for one in cache.delta]),
        "pending rows": num_bytes(
            [(one.pending_qkv, one.pending_log_decay, one.pending_write_strength) for one in cache.delta]
        ),
        "logits": logits,
        "laws of the target": logits,
        "laws of the drafts": k * config.vocab_size * 4,
        # counts of penalties and the bias of every token
        "bookkeeping": num_bytes(gen.history) + config.vocab_size * 4,
    }
    return once, lane
