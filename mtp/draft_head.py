"""The multi-token-prediction head: one decoder layer that drafts the token after next, recursively.

Slot p reads the embedding of token p + 1 and the trunk's hidden row p (after the final norm), in this order, and
predicts token p + 2; a further draft feeds the drafted token and the head's own normed output back in. Embedding and
unembedding are the trunk's. Its keys and values share the trunk's page table, each at its token's index (`mtp.cache`).
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from mtp.attention import attend_pages
from mtp.cache import Cache, append, init, keep_recent, set_last_token
from mtp.config import ModelConfig
from mtp.layers import Fp8Linear, Linear, RMSNorm
from mtp.model import DecoderLayer, Qwen35, forward
from mtp.shapes import Array, Float, Float32, Hidden, LaneMask, Logits, PerLane, Tokens


class MTPHead(nnx.Module):
    """The parameters of the head, named as the checkpoint's `mtp.*`."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype: DTypeLike = jnp.bfloat16) -> None:
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = Linear(width, 2 * width, rngs, dtype)
        self.pre_fc_norm_embedding = RMSNorm(width, eps, dtype)
        self.pre_fc_norm_hidden = RMSNorm(width, eps, dtype)
        self.layers = nnx.List([DecoderLayer(config, "full_attention", rngs, dtype)])
        self.norm = RMSNorm(width, eps, dtype)
        # an fp8 copy of the trunk's unembedding; None borrows the trunk's own
        self.lm_head: Fp8Linear | None = None

    def logits(self, model: Qwen35, hidden: Float[Array, "... D"]) -> Float32[Array, "... V"]:
        """Of the next draft, from the head's normed output."""
        if self.lm_head is None:
            return model.unembed(hidden)
        with jax.named_scope("unembed"):
            return self.lm_head.wide(hidden)

    def inputs(self, model: Qwen35, tokens: Tokens, hidden: Hidden) -> Hidden:
        """What the head's layer reads: the token's embedding and the hidden row before it, normed and mixed."""
        embedded = self.pre_fc_norm_embedding(model.embed_tokens(tokens))
        return self.fc(jnp.concatenate([embedded, self.pre_fc_norm_hidden(hidden)], axis=-1))


def fp8_head(head: MTPHead, model: Qwen35) -> MTPHead:
    """The same head with its matrices, and a copy of the unembedding, in fp8: half the bytes of a draft pass.

    What it drafts differs a little; what is accepted is still exact, since q is the law of these very logits.
    """
    made: MTPHead = nnx.merge(*nnx.split(head))
    layer = made.layers[0]
    layer.stack()
    assert layer.self_attn is not None
    for module in (made, layer.self_attn, layer.mlp):
        for name, linear in list(vars(module).items()):
            if isinstance(linear, Linear):
                setattr(module, name, Fp8Linear(linear.weight[...]))
    made.lm_head = nnx.data(Fp8Linear(model.unembedding))
    return made


@jax.jit
def probe_logits(head: MTPHead, model: Qwen35) -> Logits:
    """What a head makes of a fixed batch of 32 rows: [1, 32, V]. Of the trunk, what is around its layers is read."""
    config, size = model.config, 32
    dtype = model.embed_tokens.weight.dtype
    empty = init(
        config, num_lanes=1, num_pages=1, page_size=2 * size, pages_per_lane=1, num_draft_tokens=0, dtype=dtype
    )
    cache = replace(empty, page_table=jnp.zeros((1, 1), jnp.int32))
    # rows are as long as the trunk's final norm makes them
    hidden = model.norm(jax.random.normal(jax.random.key(0), (1, size, config.hidden_size), jnp.float32).astype(dtype))
    tokens = jax.random.randint(jax.random.key(1), (1, size), 0, config.vocab_size, jnp.int32)
    rows, _ = draft_rows(head, model, cache, tokens, hidden, jnp.ones((1,), jnp.int32), jnp.full((1,), size, jnp.int32))
    return head.logits(model, rows)


@jax.jit
def draft_distance(head: MTPHead, other: MTPHead, model: Qwen35) -> Float32[Array, ""]:
    """Mean total variation (0..1) between what two heads would draft, temperature 1, on the rows of `probe_logits`."""
    laws = [jax.nn.softmax(probe_logits(one, model), axis=-1) for one in (head, other)]
    return 0.5 * jnp.mean(jnp.sum(jnp.abs(laws[0] - laws[1]), axis=-1))


def draft_rows(
    head: MTPHead,
    model: Qwen35,
    cache: Cache,
    tokens: Tokens,
    hidden: Hidden,
    starts: PerLane,
    num_rows: PerLane,
) -> tuple[Hidden, Cache]:
    """The head's normed output for rows (token, hidden before it) at cache indices `starts ..`.

    It writes the rows' keys and values. The output is both what `unembed` reads and the next draft's hidden.
    """
    assert cache.draft is not None, "the cache was made without a head"
    pages = cache.draft

    def mix(x: Hidden) -> Hidden:
        nonlocal pages
        y, pages = attend_pages(head.layers[0].self_attn, x, pages, cache.page_table, starts, num_rows, first=1)
        return y

    x = head.layers[0](head.inputs(model, tokens, hidden), mix)
    return head.norm(x), replace(cache, draft=pages)


def write_rows(
    head: MTPHead,
    model: Qwen35,
    cache: Cache,
    tokens: Tokens,
    hidden: Hidden,
    starts: PerLane,
    num_rows: PerLane,
) -> Cache:
    """Only the keys and values of `draft_rows`: what prefill and steps without drafts keep the head primed with."""
    assert cache.draft is not None, "the cache was made without a head"
    layer = head.layers[0]
    x = layer.input_layernorm(head.inputs(model, tokens, hidden))
    positions = starts[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :] - 1
    keys, values = layer.self_attn.keys_values(x, positions)
    return replace(cache, draft=append(cache.draft, cache.page_table, starts, num_rows, keys, values))


def write_recent(head: MTPHead, model: Qwen35, cache: Cache, live: LaneMask) -> Cache:
    """Writes the MTP entries of the newest true hidden rows of the live lanes, up to the last token's."""
    num_rows = jnp.where(live, cache.num_recent, 0)
    starts = cache.lengths - cache.num_recent + 1
    return write_rows(head, model, cache, cache.recent_tokens, cache.recent_hidden, starts, num_rows)


def prefill(
    model: Qwen35, head: MTPHead | None, cache: Cache, tokens: Tokens, num_tokens: PerLane
) -> tuple[Hidden, Cache]:
    """Reads the first `num_tokens` tokens of each lane as the continuation of what it holds, and primes the head.

    Afterwards the newest hidden row is known and the token behind it is not: the next chunk brings it, or
    `cache.set_last_token` names it. A chunk that continues a reply starts with the reply's last token.

    Returns:
        Hidden rows [B, T, D] after the final norm, and the cache with `lengths` moved.
    """
    live = num_tokens > 0
    if head is not None:
        cache = write_recent(head, model, set_last_token(cache, tokens[:, 0], live), live)
    hidden, after = forward(model, cache, tokens, num_tokens, keep=True)
    last = jnp.maximum(num_tokens - 1, 0)
    if head is not None and tokens.shape[1] > 1:
        after = write_rows(head, model, after, tokens[:, 1:], hidden[:, :-1], cache.lengths + 1, last)
    newest = jnp.take_along_axis(hidden, last[:, None, None], axis=1)
    after = keep_recent(after, newest, jnp.zeros_like(tokens[:, :1]), live.astype(jnp.int32))
    return hidden, replace(after, lengths=cache.lengths + num_tokens)
