"""The jitted programs of the host drivers `infer.batch` and `infer.score`, beside `infer.speculative.decode_loop`.

Each takes the whole cache or generation and gives it back: what goes in is donated.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from infer import decode, speculative
from infer.decode import Generation, Request
from mtp import cache as kv
from mtp.draft_head import MTPHead, prefill
from mtp.kernels.sampling import forbid_tokens, process_logits, target_noise
from mtp.model import Qwen35
from mtp.shapes import Array, Float32, Int32, LaneMask, Logits, PerLane, Tokens


@partial(jax.jit, donate_argnames="cache")
def read_chunk(model: Qwen35, head: MTPHead | None, cache: kv.Cache, tokens: Tokens, num_tokens: PerLane) -> kv.Cache:
    """The cache after a chunk of the prompts (see `mtp.draft_head.prefill`)."""
    return prefill(model, head, cache, tokens, num_tokens)[1]


@partial(jax.jit, static_argnames="max_reply", donate_argnames="cache")
def start_replies(model: Qwen35, cache: kv.Cache, request: Request, lanes: LaneMask, *, max_reply: int) -> Generation:
    """The first token of each of `lanes`, whose prompts the cache holds; the other lanes stay idle."""
    gen = decode.begin(cache, max_reply)
    return decode.first_token(model, gen, request, cache.recent_hidden, jnp.zeros_like(cache.lengths), lanes)


@partial(jax.jit, donate_argnames="gen")
def end_replies(gen: Generation, lanes: LaneMask) -> Generation:
    """Ends the replies of `lanes` where the host found a stop string."""
    return replace(gen, status=jnp.where(lanes, decode.STOPPED, gen.status))


@jax.jit
def decision_margin(model: Qwen35, cache: kv.Cache, request: Request, produced: PerLane) -> Float32[Array, "B"]:
    """How far the best token lies above the second when plain decoding chooses reply token number `produced`, after the
    prompt and the reply so far have been read: in logits when greedy, else in log-probability plus noise."""
    logits = model.unembed(cache.recent_hidden[:, :1])
    logits = forbid_tokens(logits, request.stop_ids, (produced < request.min_tokens)[:, None])
    noise = target_noise(request.sampling, cache.lengths[:, None], logits.shape[-1])
    sampled = process_logits(logits, request.sampling) + noise
    if request.sampling.bias is not None:
        logits = logits + request.sampling.bias[:, None, :]
    greedy = request.sampling.temperature == 0
    best, _ = lax.top_k(jnp.where(greedy[:, None], logits[:, 0], sampled[:, 0]), 2)
    return best[:, 0] - best[:, 1]


@partial(jax.jit, donate_argnames="cache")
def score_chunk(
    model: Qwen35,
    head: MTPHead | None,
    cache: kv.Cache,
    tokens: Tokens,
    num_tokens: PerLane,
    targets: Tokens,
) -> tuple[Float32[Array, "B T"], kv.Cache]:
    """Log-probability of `targets`, the token behind each row of a chunk, and the cache after the chunk."""
    hidden, cache = prefill(model, head, cache, tokens, num_tokens)
    return _pick(jax.nn.log_softmax(model.unembed(hidden), axis=-1), targets), cache


@partial(jax.jit, static_argnames="max_reply", donate_argnames="cache")
def start_scoring(cache: kv.Cache, last_token: PerLane, *, max_reply: int) -> Generation:
    """All lanes as if in the middle of a reply, behind what the cache holds and this token."""
    lanes = jnp.ones(cache.lengths.shape, bool)
    gen = decode.begin(kv.set_last_token(cache, last_token, lanes), max_reply)
    return replace(gen, status=jnp.full_like(gen.status, decode.RUNNING))


@partial(jax.jit, donate_argnames="gen")
def score_window(
    model: Qwen35,
    gen: Generation,
    request: Request,
    drafts: Int32[Array, "B k"],
    num_drafts: PerLane,
    targets: Int32[Array, "B R"],
    num_committed: PerLane,
) -> tuple[Float32[Array, "B R"], Generation]:
    """One verify step whose drafts, and whose outcome, the caller decides: `num_committed` rows are kept.

    Returns the log-probability of `targets`, the text's own token behind each row, and the generation behind the kept.
    """
    lanes, num_draft_tokens = drafts.shape
    laws = jnp.zeros((lanes, num_draft_tokens, model.config.vocab_size), jnp.float32)
    proposal = speculative.Proposal(drafts, laws, num_drafts)
    verification, cache = speculative.verify(model, gen, gen.cache, request, proposal)
    cache = kv.commit(cache, verification.hidden, targets, num_committed)
    return _pick(verification.log_probs, targets), replace(gen, cache=cache)


def _pick(log_probs: Logits, tokens: Tokens) -> Float32[Array, "B T"]:
    return jnp.take_along_axis(log_probs, tokens[:, :, None], axis=-1)[:, :, 0]
