"""The jitted programs of the engine, of scoring and of comparisons, beside `infer.speculative.decode_turn`.

Each takes the whole cache or generation and gives it back: what goes in is donated.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from infer import decode, speculative
from infer.decode import HONEST, Generation, Request, Verbs
from infer.packed import Packed, unpack
from infer.speculative import Packet, Turn
from mtp import cache as kv
from mtp.config import ModelConfig
from mtp.draft_head import MTPHead, prefill
from mtp.kernels.gated_delta import gated_delta_window
from mtp.kernels.paged_attention import paged_attention
from mtp.kernels.sampling import History, Sampling, adjust_logits, forbid_tokens, process_logits, sample, target_noise
from mtp.model import Qwen35
from mtp.shapes import Array, Bool, Float32, Int32, LaneMask, Logits, PerLane, Tokens

# of a cache (see `mtp.cache.init`)
_SIZES = ("num_lanes", "num_pages", "pages_per_lane", "page_size", "num_draft_tokens", "dtype", "with_head")


@partial(jax.jit, donate_argnames="cache")
def read_chunk(model: Qwen35, head: MTPHead | None, cache: kv.Cache, tokens: Tokens, num_tokens: PerLane) -> kv.Cache:
    """The cache after a chunk of the prompts (see `mtp.draft_head.prefill`)."""
    return prefill(model, head, cache, tokens, num_tokens)[1]


@jax.jit
def decision_margin(
    model: Qwen35, cache: kv.Cache, request: Request, produced: PerLane, history: History | None = None
) -> Float32[Array, "B"]:
    """How far the best token lies above the second when plain decoding chooses reply token number `produced`, after the
    prompt and the reply so far have been read: in logits when greedy, else in log-probability plus noise.

    Args:
        history: up to the last token read; None without penalties.
    """
    logits = model.unembed(cache.recent_hidden[:, :1])
    if history is not None:
        before = decode.not_before(logits.shape[0], 1)
        logits = adjust_logits(logits, request.sampling, history, request.mask_table, before)
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


@partial(jax.jit, static_argnames=("config", "top", *_SIZES))
def idle_lanes(config: ModelConfig, *, num_lanes: int, top: int, **sizes: Any) -> Generation:
    """Empty lanes, none of them with a request.

    Args:
        top: log-probabilities a token at most.
        sizes: of `mtp.cache.init`.
    """
    blank = History(
        jnp.zeros((num_lanes, config.vocab_size), bool),
        jnp.zeros((num_lanes, config.vocab_size), jnp.int32),
        jnp.zeros((num_lanes,), jnp.int32),
    )
    return decode.begin(kv.init(config, num_lanes=num_lanes, **sizes), 0, history=blank, top=top)


@partial(jax.jit, static_argnames=("config", "top", *_SIZES))
def busy_lanes(
    config: ModelConfig, context: Int32[Array, ""], *, num_lanes: int, pages_per_lane: int, top: int, **sizes: Any
) -> Generation:
    """Every lane in the middle of a reply behind `context` tokens of random memory: for measuring what steps cost."""
    sizes |= {"num_lanes": num_lanes, "pages_per_lane": pages_per_lane, "num_pages": num_lanes * pages_per_lane}
    gen = idle_lanes(config, top=top, **sizes)
    # one draw a shape: a program that draws every leaf for itself takes minutes to compile
    drawn: dict[Any, Array] = {}

    def fill(x: Array) -> Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        if x.shape not in drawn:
            drawn[x.shape] = 0.1 * jax.random.normal(jax.random.key(len(drawn)), x.shape, jnp.float32)
        return drawn[x.shape].astype(x.dtype)

    cache = jax.tree.map(fill, gen.cache)
    gates = [
        replace(
            one,
            pending_log_decay=-jnp.abs(one.pending_log_decay),
            pending_write_strength=jax.nn.sigmoid(one.pending_write_strength),
        )
        for one in cache.delta
    ]
    ones = jnp.ones((num_lanes,), jnp.int32)
    cache = replace(
        cache,
        delta=tuple(gates),
        page_table=jnp.arange(num_lanes * pages_per_lane, dtype=jnp.int32).reshape(num_lanes, pages_per_lane),
        lengths=ones * context,
        num_pending=ones,
        num_recent=ones,
    )
    return replace(gen, cache=cache, status=jnp.full_like(gen.status, decode.RUNNING))


@partial(jax.jit, donate_argnames=("gen", "request"))
def admit_lane(
    gen: Generation,
    request: Request,
    lane: Int32[Array, ""],
    row: Request,
    history: History,
    num_tokens: Int32[Array, ""],
    status: Int32[Array, ""],
) -> tuple[Generation, Request]:
    """Puts a request into an empty lane, whose state becomes zero.

    Args:
        row: the request of this one lane, with a leading axis of 1; what all lanes share in it is not read.
        history: likewise, as of the `num_tokens` tokens its reply has already.
        status: RUNNING if its reply goes on at once, IDLE if its prompt is still to be read.
    """

    def put(whole: Array, part: Array) -> Array:
        return whole.at[lane].set(part[0])

    shared = {"mask_table": None, "synthetic_acceptance": None}
    lanes = jax.tree.map(put, replace(request, **shared), replace(row, **shared))
    request = replace(lanes, mask_table=request.mask_table, synthetic_acceptance=request.synthetic_acceptance)
    gen = replace(
        gen,
        cache=kv.release(gen.cache, lane),
        history=jax.tree.map(put, gen.history, history),
        num_tokens=gen.num_tokens.at[lane].set(num_tokens),
        num_steps=gen.num_steps.at[lane].set(0),
        drafted=gen.drafted.at[lane].set(0),
        accepted=gen.accepted.at[lane].set(0),
        status=gen.status.at[lane].set(status),
    )
    return gen, request


@partial(jax.jit, donate_argnames=("gen", "request"))
def end_lanes(gen: Generation, request: Request, lanes: LaneMask) -> tuple[Generation, Request]:
    """These lanes idle: their requests have ended, left or been preempted. What they asked for, sampling or penalties,
    is forgotten, for it would cost the others time."""

    def off(value: Array, default: float) -> Array:
        return jnp.where(lanes, jnp.asarray(default, value.dtype), value)

    asked = request.sampling
    plain = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0}
    plain |= {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
    sampling = replace(asked, **{name: off(getattr(asked, name), value) for name, value in plain.items()})
    request = replace(request, sampling=sampling, log_probs=off(request.log_probs, -1))
    history = replace(gen.history, mask_state=off(gen.history.mask_state, 0))
    return replace(gen, status=off(gen.status, decode.IDLE), history=history), request


@partial(jax.jit, donate_argnames="gen")
def read_prompts(
    model: Packed[Qwen35],
    head: Packed[MTPHead | None],
    gen: Generation,
    page_table: Int32[Array, "B M"],
    lanes: Int32[Array, "L"],
    tokens: Int32[Array, "L T"],
    num_tokens: Int32[Array, "L"],
) -> Generation:
    """Reads a chunk of a few lanes' prompts (see `mtp.draft_head.prefill`); lane numbers beyond the last are none."""
    cache = replace(gen.cache, page_table=page_table)
    _, part = prefill(unpack(model), unpack(head), kv.select_lanes(cache, lanes), tokens, num_tokens)
    return replace(gen, cache=kv.put_lanes(cache, part, lanes))


@partial(jax.jit, static_argnames="verbs", donate_argnames="gen")
def start_lanes(
    model: Packed[Qwen35], gen: Generation, request: Request, lanes: LaneMask, *, verbs: Verbs = HONEST
) -> tuple[Generation, Packet]:
    """The first token of the replies of `lanes`, whose prompts the cache holds; as a turn of one step."""
    rows = jnp.zeros_like(gen.status)
    gen = decode.first_token(unpack(model), gen, request, gen.cache.recent_hidden, rows, lanes, verbs=verbs)
    emitted = replace(gen.emitted, count=jnp.where(lanes, gen.emitted.count, 0))
    return gen, Turn(jax.tree.map(lambda x: x[None], emitted), jnp.int32(1), gen.status, gen.num_tokens).pack()


@jax.jit
def take_snapshot(cache: kv.Cache, lane: Int32[Array, ""]) -> tuple[kv.Snapshot, Bool[Array, ""]]:
    """A lane's state, and whether it is sound: a state with a NaN in it makes the newest hidden row NaN."""
    kept = kv.snapshot(cache, lane)
    row = jnp.arange(cache.window_rows) < kept.num_recent
    return kept, jnp.all(
        jnp.isfinite(jnp.where(row[:, None], kept.recent_hidden, jnp.zeros((), kept.recent_hidden.dtype)))
    )


@partial(jax.jit, donate_argnames="gen")
def restore_snapshot(gen: Generation, lane: Int32[Array, ""], kept: kv.Snapshot) -> Generation:
    """The lane as it was when the snapshot was taken; its page table is whatever the next call brings."""
    return replace(gen, cache=kv.restore(gen.cache, lane, kept))


@jax.jit
def fetch_pages(cache: kv.Cache, ids: Int32[Array, "n"]) -> tuple[kv.Pages, ...]:
    """Copies of some pages, for the host to keep."""
    return kv.read_pages(cache, ids)


@partial(jax.jit, donate_argnames="gen")
def fill_pages(gen: Generation, ids: Int32[Array, "n"], contents: tuple[kv.Pages, ...]) -> Generation:
    """Puts kept contents into pages of the pool."""
    return replace(gen, cache=kv.write_pages(gen.cache, ids, contents))


@partial(jax.jit, donate_argnames="gen")
def copy_page(gen: Generation, source: Int32[Array, ""], target: Int32[Array, ""]) -> Generation:
    """A page that two requests share in part, copied for the one that will write on in it."""
    contents = kv.read_pages(gen.cache, source[None])
    return replace(gen, cache=kv.write_pages(gen.cache, target[None], contents))


@partial(jax.jit, static_argnames="implementation", donate_argnames="state")
def delta_windows(state: Array, *rest: Any, repeats: Int32[Array, ""], implementation: str) -> tuple[Array, Array]:
    """`mtp.kernels.gated_delta.gated_delta_window` so many times, each on the state that the one before has left.

    Returns the last state and the last outputs.
    """

    def turn(_: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        state, _, outputs = gated_delta_window(carry[0], *rest, implementation=implementation)
        return state, outputs

    window = rest[3].qkv
    nothing = jnp.zeros((*window.shape[:2], *state.shape[1:3]), jnp.float32)
    return lax.fori_loop(0, repeats, turn, (state, nothing))


@partial(jax.jit, static_argnames="implementation")
def attentions(queries: Array, *rest: Any, repeats: Int32[Array, ""], implementation: str) -> Array:
    """`mtp.kernels.paged_attention.paged_attention` so many times, each asking what the one before has answered."""
    turn = lambda _, queries: paged_attention(queries, *rest, implementation=implementation)  # noqa: E731
    return lax.fori_loop(0, repeats, turn, queries)


@jax.jit
def samples(logits: Logits, sampling: Sampling, *, repeats: Int32[Array, ""]) -> Int32[Array, "B T"]:
    """Tokens drawn from the logits so many times, each with noise of its own and a temperature that the ones before
    have changed a little, so that nothing is done once for all."""
    rows = jnp.arange(logits.shape[1], dtype=jnp.int32)[None, :]

    def turn(number: Array, tokens: Array) -> Array:
        warmer = sampling.temperature + 1e-12 * tokens[:, 0].astype(jnp.float32)
        law = process_logits(logits, replace(sampling, temperature=warmer))
        return sample(law, target_noise(sampling, jnp.broadcast_to(number + rows, tokens.shape), logits.shape[-1]))

    return lax.fori_loop(0, repeats, turn, jnp.zeros(logits.shape[:2], jnp.int32))
