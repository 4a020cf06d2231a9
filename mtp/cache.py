"""What is remembered between calls, as one value: pages, lengths, committed recurrent state and pending rows.

Attention layers keep keys and values in pages of one pool; a rejected token is a shorter length. Delta-rule layers keep
one committed state a lane plus the pending rows that the next pass folds, so a rejection is a count there too. All
functions are pure: a `Cache` goes in and comes out.

Two rules hold for every lane. Tokens `0 .. lengths - 1` are in the cache; the last token (`last_token`) is known but in
no cache yet. The MTP entry made from token p + 1 and the true hidden row p lies at cache index p + 1, the index of its
token; index 0 of the MTP layer is never read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from mtp.config import ModelConfig
from mtp.kernels.gated_delta import DeltaRows
from mtp.shapes import Array, Bool, Float, Float32, Hidden, Int32, PerLane, Tokens
from mtp.sharding import param_sharding


def _axes(*names: str | None) -> Any:
    """A dataclass field whose array has these named axes (see `mtp.sharding.RULES`)."""
    return field(metadata={"axes": names})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pages:
    """Keys and values of one attention layer: a pool of pages that all lanes draw from."""

    keys: Float[Array, "P page K H"] = _axes(None, None, "kv_heads", None)
    values: Float[Array, "P page K H"] = _axes(None, None, "kv_heads", None)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeltaState:
    """What one delta-rule layer remembers of each lane."""

    # committed: up to `lengths - num_pending`
    state: Float32[Array, "B U Z Y"] = _axes("lanes", "heads", None, None)
    # the W - 1 rows before that point, as they enter the convolution
    conv: Float[Array, "B history C"] = _axes("lanes", None, None)
    # inputs of the last window; the first `num_pending` rows hold
    pending_qkv: Float[Array, "B R C"] = _axes("lanes", None, None)
    pending_log_decay: Float32[Array, "B R U"] = _axes("lanes", None, "heads")
    pending_write_strength: Float32[Array, "B R U"] = _axes("lanes", None, "heads")

    @property
    def pending(self) -> DeltaRows:
        """The pending rows as one value."""
        return DeltaRows(self.pending_qkv, self.pending_log_decay, self.pending_write_strength)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Everything the model remembers of its lanes."""

    # one a full-attention layer, in order
    attention: tuple[Pages, ...]
    # the MTP layer's pages, same page table; None without a head
    draft: Pages | None
    # one a delta-rule layer, in order
    delta: tuple[DeltaState, ...]
    # page ids of each lane; `num_pages` where there is none
    page_table: Int32[Array, "B M"] = _axes("lanes", None)
    # committed tokens
    lengths: PerLane = _axes("lanes")
    # rows of the delta layers' pending that the next pass folds, 0..R
    num_pending: PerLane = _axes("lanes")
    # true hidden rows (after the final norm) whose MTP entries are still to be written from them ...
    recent_hidden: Float[Array, "B R D"] = _axes("lanes", None, None)
    # ... and the token that followed each of them; the last of these is the lane's last token
    recent_tokens: Int32[Array, "B R"] = _axes("lanes", None)
    num_recent: PerLane = _axes("lanes")

    @property
    def last_token(self) -> PerLane:
        """The newest token of each lane: known, in no cache yet."""
        index = jnp.maximum(self.num_recent - 1, 0)
        return jnp.take_along_axis(self.recent_tokens, index[:, None], axis=1)[:, 0]

    @property
    def num_pages(self) -> int:
        """Pages in the pool."""
        pools = (*self.attention, *(() if self.draft is None else (self.draft,)))
        return pools[0].keys.shape[0] if pools else 0

    @property
    def window_rows(self) -> int:
        """R: the longest window, one token and its drafts."""
        return self.recent_tokens.shape[1]


def init(
    config: ModelConfig,
    *,
    num_lanes: int,
    num_pages: int,
    page_size: int,
    pages_per_lane: int,
    num_draft_tokens: int,
    dtype: DTypeLike = jnp.bfloat16,
    with_head: bool = True,
) -> Cache:
    """An empty cache: every lane idle, no page assigned.

    Memory at 27B in bf16: 147 MiB a lane of committed state, 0.96 MiB a lane and window row, 64 KiB a token of pages
    (68 with the head).
    """
    rows = num_draft_tokens + 1
    heads, channels = config.linear_num_value_heads, config.conv_channels

    def pages() -> Pages:
        shape = (num_pages, page_size, config.num_key_value_heads, config.head_dim)
        return Pages(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def delta() -> DeltaState:
        square = (config.linear_value_head_dim, config.linear_key_head_dim)
        return DeltaState(
            state=jnp.zeros((num_lanes, heads, *square), jnp.float32),
            conv=jnp.zeros((num_lanes, config.linear_conv_kernel_dim - 1, channels), dtype),
            pending_qkv=jnp.zeros((num_lanes, rows, channels), dtype),
            pending_log_decay=jnp.zeros((num_lanes, rows, heads), jnp.float32),
            pending_write_strength=jnp.zeros((num_lanes, rows, heads), jnp.float32),
        )

    return Cache(
        attention=tuple(pages() for kind in config.layer_types if kind == "full_attention"),
        draft=pages() if with_head else None,
        delta=tuple(delta() for kind in config.layer_types if kind == "linear_attention"),
        page_table=jnp.full((num_lanes, pages_per_lane), num_pages, jnp.int32),
        lengths=jnp.zeros((num_lanes,), jnp.int32),
        num_pending=jnp.zeros((num_lanes,), jnp.int32),
        recent_hidden=jnp.zeros((num_lanes, rows, config.hidden_size), dtype),
        recent_tokens=jnp.zeros((num_lanes, rows), jnp.int32),
        num_recent=jnp.zeros((num_lanes,), jnp.int32),
    )


def append(
    pages: Pages,
    page_table: Int32[Array, "B M"],
    starts: PerLane,
    num_rows: PerLane,
    keys: Float[Array, "B T K H"],
    values: Float[Array, "B T K H"],
) -> Pages:
    """Writes rows `0 .. num_rows - 1` of each lane at cache indices `starts ..`.

    Other rows, and rows that have no page, are dropped.
    """
    num_pages, page_size = pages.keys.shape[:2]
    row = jnp.arange(keys.shape[1], dtype=jnp.int32)[None, :]
    index = starts[:, None] + row
    slot = jnp.clip(index // page_size, 0, page_table.shape[1] - 1)
    valid = (row < num_rows[:, None]) & (index >= 0) & (index < page_table.shape[1] * page_size)
    page = jnp.where(valid, jnp.take_along_axis(page_table, slot, axis=1), num_pages)
    return Pages(
        pages.keys.at[page, index % page_size].set(keys, mode="drop"),
        pages.values.at[page, index % page_size].set(values, mode="drop"),
    )


def commit(cache: Cache, hidden: Hidden, tokens: Tokens, num_committed: PerLane) -> Cache:
    """Keeps the first `num_committed` rows of the window just verified; lanes with 0 stay as they are.

    Args:
        hidden: the window's hidden rows, after the final norm.
        tokens: row t holds the token emitted after window row t, so row `num_committed - 1` is the new last token.
        num_committed: tokens emitted, 1..T for a live lane: accepted drafts plus the target's own token, less what an
            end of the reply cut off.
    """
    cache = keep_recent(cache, hidden, tokens, num_committed)
    return replace(
        cache,
        lengths=cache.lengths + num_committed,
        num_pending=jnp.where(num_committed > 0, num_committed, cache.num_pending),
    )


def keep_recent(cache: Cache, hidden: Hidden, tokens: Tokens, count: PerLane) -> Cache:
    """Makes these the newest true hidden rows, each with the token behind it; lanes with count 0 keep theirs."""
    live = count > 0
    gap = cache.window_rows - tokens.shape[1]
    hidden = jnp.pad(hidden, ((0, 0), (0, gap), (0, 0)))
    tokens = jnp.pad(tokens, ((0, 0), (0, gap)))
    return replace(
        cache,
        recent_hidden=jnp.where(live[:, None, None], hidden, cache.recent_hidden),
        recent_tokens=jnp.where(live[:, None], tokens, cache.recent_tokens),
        num_recent=jnp.where(live, count, cache.num_recent),
    )


def set_last_token(cache: Cache, tokens: PerLane, lanes: Bool[Array, "B"]) -> Cache:
    """Names the token that follows the newest hidden row, in the lanes asked for (a prefill knows none)."""
    row = jnp.arange(cache.window_rows, dtype=jnp.int32)[None, :]
    here = lanes[:, None] & (row == (cache.num_recent - 1)[:, None])
    return replace(cache, recent_tokens=jnp.where(here, tokens[:, None], cache.recent_tokens))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Snapshot:
    """One lane at one moment: its recurrent state, counts and newest rows.

    Its pages stay in the pool, their ids are kept. It costs what a lane's committed state costs (147 MiB at 27B).
    """

    delta: tuple[DeltaState, ...]
    page_table: Int32[Array, "M"]
    lengths: Int32[Array, ""]
    num_pending: Int32[Array, ""]
    recent_hidden: Float[Array, "R D"]
    recent_tokens: Int32[Array, "R"]
    num_recent: Int32[Array, ""]


_LANE_FIELDS = tuple(f.name for f in fields(Snapshot))


def snapshot(cache: Cache, lane: int | Int32[Array, ""]) -> Snapshot:
    """A copy of the lane's state. The tokens it covers must stay in its pages for as long as it is to be restored."""
    taken = {name: jax.tree.map(lambda x: x[lane], getattr(cache, name)) for name in _LANE_FIELDS}
    return Snapshot(**taken)


def restore(cache: Cache, lane: int | Int32[Array, ""], kept: Snapshot) -> Cache:
    """The lane as it was when the snapshot was taken. Raises ValueError when the snapshot lacks the delta-rule part."""
    if len(kept.delta) != len(cache.delta):
        raise ValueError(
            f"the snapshot holds {len(kept.delta)} delta-rule layers and the model has {len(cache.delta)}: "
            "a prefix without its recurrent state can't be resumed; prefill it again"
        )
    put = lambda whole, part: whole.at[lane].set(part)  # noqa: E731
    restored = {n: jax.tree.map(put, getattr(cache, n), getattr(kept, n)) for n in _LANE_FIELDS}
    return replace(cache, **restored)


def release(cache: Cache, lane: int | Int32[Array, ""]) -> Cache:
    """The lane empty and idle, its recurrent state zero, its pages no longer its own."""
    blank = jax.tree.map(jnp.zeros_like, snapshot(cache, lane))
    return restore(cache, lane, replace(blank, page_table=jnp.full_like(blank.page_table, cache.num_pages)))


def admit(cache: Cache, lane: int | Int32[Array, ""], page_ids: Sequence[int] | Int32[Array, "M"]) -> Cache:
    """The lane empty, holding these pages (in order; fewer than M leave the rest unassigned)."""
    ids = jnp.asarray(page_ids, jnp.int32)
    cache = release(cache, lane)
    return replace(cache, page_table=cache.page_table.at[lane, : ids.shape[0]].set(ids))


def select_lanes(cache: Cache, lanes: Int32[Array, "L"]) -> Cache:
    """A cache of these lanes alone, around the same pages; a number beyond the last lane gives an empty one."""

    def take(x: Array) -> Array:
        return jnp.take(x, lanes, axis=0, mode="fill", fill_value=0)

    return replace(cache, **{name: jax.tree.map(take, getattr(cache, name)) for name in _LANE_FIELDS})


def put_lanes(cache: Cache, part: Cache, lanes: Int32[Array, "L"]) -> Cache:
    """The cache with the lanes of `part` at these numbers, and its pages; numbers beyond the last are dropped."""

    def put(whole: Array, rows: Array) -> Array:
        return whole.at[lanes].set(rows, mode="drop")

    lane_fields = {n: jax.tree.map(put, getattr(cache, n), getattr(part, n)) for n in _LANE_FIELDS}
    return replace(cache, attention=part.attention, draft=part.draft, **lane_fields)


def read_pages(cache: Cache, ids: Int32[Array, "n"]) -> tuple[Pages, ...]:
    """What these pages hold, layer by layer, the MTP layer last; ids beyond the pool read zeros."""
    take = lambda x: jnp.take(x, ids, axis=0, mode="fill", fill_value=0)  # noqa: E731
    return jax.tree.map(take, (*cache.attention, *(() if cache.draft is None else (cache.draft,))))


def write_pages(cache: Cache, ids: Int32[Array, "n"], contents: tuple[Pages, ...]) -> Cache:
    """The cache with these pages filled from what `read_pages` gave; ids beyond the pool are dropped."""
    put = lambda pool, part: pool.at[ids].set(part, mode="drop")  # noqa: E731
    pools = (*cache.attention, *(() if cache.draft is None else (cache.draft,)))
    *attention, last = jax.tree.map(put, pools, contents)
    if cache.draft is None:
        return replace(cache, attention=(*attention, last))
    return replace(cache, attention=tuple(attention), draft=last)


def shard(cache: Cache, mesh: Mesh) -> Cache:
    """The cache with every field placed by the axes it names."""

    def place(value: Any, axes: tuple[str | None, ...] | None) -> Any:
        if is_dataclass(value) and not isinstance(value, type):
            parts = {f.name: place(getattr(value, f.name), f.metadata.get("axes")) for f in fields(value)}
            return replace(value, **parts)
        if isinstance(value, tuple):
            return tuple(place(item, None) for item in value)
        if value is None or axes is None:
            return value
        return jax.device_put(value, param_sharding(mesh, axes, value.shape))

    return place(cache, None)
