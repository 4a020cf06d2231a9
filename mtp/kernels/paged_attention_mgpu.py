"""Attention over pages on Hopper: one streaming pass over a lane's keys and values, split over the sequence.

A program handles one (lane, KV head, split): its query rows (window rows x query heads of the group, in the 64 rows of
a wgmma) meet tiles of 64 keys, with a running softmax in registers. Tile i of a lane belongs to split i % splits, and
`splits` follows from shapes alone, so a row's arithmetic does not depend on its neighbours. A small step in jnp joins
the splits.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mtp.shapes import Array, Float, Int32, PerLane

# rows of one wgmma, and keys of one tile
TILE = 64
# columns of the head dim that are handled at a time
COLUMNS = 64
# the score of a key that a row does not see, as in the reference
UNSEEN = -1e30


@dataclass(frozen=True)
class Tiles:
    """How the work is cut."""

    # tiles of keys, and of values, in shared memory; 1 lets two programs share a multiprocessor
    stages: int = 1
    # programs that the splits should make together, if all lanes are long
    programs: int = 256
    # no fewer splits than this, so that lanes of unequal length share the chip
    min_splits: int = 2

    def __post_init__(self) -> None:
        for name in ("stages", "programs", "min_splits"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")

    def splits(self, pairs: int, capacity: int) -> int:
        """Splits of each of `pairs` (lane, KV head) whose page tables reach `capacity` keys."""
        wanted = max(self.min_splits, -(-self.programs // pairs))
        return min(wanted, -(-capacity // TILE))


def unfit(queries: Any, keys: Any, values: Any, page_table: Any) -> str | None:
    """Why the kernel does not take these shapes and dtypes, in one line; None if it does."""
    batch, rows, heads, dim = queries.shape
    _, page_size, groups, _ = keys.shape
    for name, x in (("queries", queries), ("keys", keys), ("values", values)):
        if x.dtype != jnp.bfloat16:
            return f"{name} are {x.dtype}, the kernel takes bfloat16"
    if dim % COLUMNS or dim > 256:
        return f"head dim {dim} is no multiple of {COLUMNS} up to 256"
    if page_size % TILE and (TILE % page_size or page_size < 8):
        return f"page size {page_size} is neither 8, 16, 32 nor a multiple of {TILE}"
    if heads % groups or heads // groups > TILE:
        return f"{heads} heads over {groups} KV heads are no groups of up to {TILE}"
    if 0 in (batch, rows, keys.shape[0], page_table.shape[1]):
        return "an array is empty"
    return None


# a function of its own in the program: layers of one shape share what tracing and lowering the kernel costs
@partial(jax.jit, static_argnames=("first", "tiles", "interpret"))
def paged_attention(
    queries: Float[Array, "B T N H"],
    keys: Float[Array, "P page K H"],
    values: Float[Array, "P page K H"],
    page_table: Int32[Array, "B M"],
    starts: PerLane,
    num_rows: PerLane,
    first: int = 0,
    *,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """`mtp.kernels.paged_attention.paged_attention` on a Hopper GPU; `interpret` runs it in GPU interpret mode.

    Where an entry that a row attends to is not finite, all heads of that row are NaN. Empty lanes return zeros. More
    rows than fit a wgmma, as in a prefill, are cut into windows, each of which reads keys and values for itself.
    """
    batch, rows, heads, dim = queries.shape
    groups, share = keys.shape[2], heads // keys.shape[2]
    most = TILE // share
    if rows > most:
        windows = -(-rows // most)
        offsets = most * jnp.arange(windows, dtype=jnp.int32)[None, :]
        queries = jnp.pad(queries, ((0, 0), (0, windows * most - rows), (0, 0), (0, 0)))
        out = paged_attention(
            queries.reshape(batch * windows, most, heads, dim),
            keys,
            values,
            jnp.repeat(page_table, windows, axis=0),
            (starts[:, None] + offsets).reshape(-1),
            jnp.clip(num_rows[:, None] - offsets, 0, most).reshape(-1),
            first,
            tiles=tiles,
            interpret=interpret,
        )
        return out.reshape(batch, windows * most, heads, dim)[:, :rows]
    capacity = page_table.shape[1] * keys.shape[1]
    tiles = tiles or Tiles()
    splits = tiles.splits(batch * groups, capacity)
    # row t * share + g of a KV head: window row t, query head g of its group; in eights, as shared memory is tiled
    padded = -(-rows * share // 8) * 8
    grouped = jnp.swapaxes(queries.reshape(batch, rows, groups, share, dim), 1, 2)
    grouped = grouped.reshape(batch, groups, rows * share, dim)
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, padded - rows * share), (0, 0)))

    program = _kernel(grouped.shape, keys.shape, share, splits, first, tiles.stages, interpret)
    mixed, tops, sums = program(grouped, keys, values, page_table, starts, num_rows)

    # a split that had no tile has written nothing
    ends = jnp.where(num_rows > 0, starts + num_rows, 0)
    used = jnp.arange(splits, dtype=jnp.int32)[None, :] * TILE < ends[:, None]
    used = used[:, None, :, None]
    tops = jnp.where(used, tops[..., : rows * share], UNSEEN)
    weights = jnp.where(used, jnp.exp2(tops - jnp.max(tops, axis=2, keepdims=True)), 0.0)
    total = jnp.sum(weights * jnp.where(used, sums[..., : rows * share], 0.0), axis=2)  # [B, K, rows * share]
    broken = jnp.any(jnp.isnan(total.reshape(batch, groups, rows, share)), axis=(1, 3))  # [B, T]
    broken = jnp.repeat(broken, share, axis=1)[:, None, :]
    total = jnp.where(broken, jnp.nan, jnp.where(total == 0.0, 1.0, total))
    weights = (weights / total[:, :, None, :])[..., None]
    out = jnp.sum(weights * jnp.where(used[..., None], mixed[..., : rows * share, :], 0.0), axis=2)
    out = jnp.swapaxes(out.astype(queries.dtype).reshape(batch, groups, rows, share, dim), 1, 2)
    return out.reshape(batch, rows, heads, dim)


def _kernel(
    queries: tuple[int, ...], pages: tuple[int, ...], share: int, splits: int, first: int, stages: int, interpret: bool
) -> Any:
    """Returns, for each split: weighted values (not divided), the row's greatest score (base 2), the sum of weights."""
    batch, groups, padded, dim = queries
    num_pages, page_size, _, _ = pages
    chunk = min(page_size, TILE)
    scale = dim**-0.5 * math.log2(math.e)
    parts = [pl.ds(column, COLUMNS) for column in range(0, dim, COLUMNS)]
    layout = plgpu.Layout.WGMMA
    by_row = layout.reduce(1)

    def body(
        q_hbm: Any,
        k_hbm: Any,
        v_hbm: Any,
        table: Any,
        starts: Any,
        counts: Any,
        mixed_hbm: Any,
        tops_hbm: Any,
        sums_hbm: Any,
        q: Any,
        p: Any,
        shared: Any,
        tops: Any,
        sums: Any,
        *barriers: Any,
    ) -> None:
        q_ready, k_ready, v_ready = barriers
        (k, v), staged = shared
        lane, group, split = (lax.axis_index(name) for name in ("lane", "group", "split"))
        start, count = starts[lane], counts[lane]
        end = jnp.where(count > 0, jnp.minimum(start + count, table.shape[1] * page_size), 0)
        turns = lax.div(lax.div(end + (TILE - 1), TILE) + (splits - 1) - split, splits)

        def key_index(turn: Array) -> Array:
            return (split + turn * splits) * TILE

        def slot_of(turn: Array, slots: int) -> Array:
            """`turn` modulo `slots`; 0 is hidden from the compiler, it would keep 50 fixed addresses in registers."""
            return lax.rem(turn, slots) if slots > 1 else jnp.minimum(turn, lax.shift_right_logical(end, 31))

        def page_ids(turn: Array) -> list[Array]:
            """The pages of a tile; any page where there is none, which is masked or not waited for."""
            column = lax.div(key_index(turn), page_size)
            last = table.shape[1] - 1
            ids = [table[lane, jnp.minimum(column + i, last)] for i in range(TILE // chunk)]
            return [jnp.minimum(page, num_pages - 1) for page in ids]

        def fetch(source: Any, buffer: Any, ready: Any, turn: Array, ids: list[Array]) -> None:
            slot, offset = slot_of(turn, stages), lax.rem(key_index(turn), page_size)
            for i, page in enumerate(ids):
                plgpu.copy_gmem_to_smem(
                    source.at[page, pl.ds(offset if page_size > TILE else 0, chunk), group],
                    buffer.at[slot, pl.ds(i * chunk, chunk)],
                    ready.at[slot],
                )

        def clean(slot: Array, base: Array) -> None:
            """Zeroes values that are not the lane's, and window values that are not finite; these spoil their key."""
            index = plgpu.broadcasted_iota(jnp.int32, (TILE, COLUMNS), 0, layout=layout) + base
            own = index < end
            if first:
                own &= index >= first
            old = index < start
            lost = plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), by_row)
            for part in parts:
                x = plgpu.load(v.at[slot, :, part], layout=layout).astype(jnp.float32)
                sound = old | (jnp.abs(x) < jnp.inf)
                lost = jnp.maximum(lost, jnp.max(jnp.where(sound, 0.0, 1.0), axis=1))
                v.at[slot, :, part][...] = jnp.where(own & sound, x, 0.0).astype(jnp.bfloat16)
            x = plgpu.load(k.at[slot, :, parts[0]], layout=layout).astype(jnp.float32)
            spoilt = lax.broadcast_in_dim(lost, (TILE, COLUMNS), (0,)) > 0.0
            k.at[slot, :, parts[0]][...] = jnp.where(spoilt, jnp.nan, x).astype(jnp.bfloat16)
            plgpu.commit_smem()

        @pl.when(turns > 0)
        def _() -> None:
            plgpu.copy_gmem_to_smem(q_hbm.at[lane, group], q.at[0, pl.ds(0, padded)], q_ready)
            for turn in range(stages):

                @pl.when(turn < turns)
                def _(turn: int = turn) -> None:
                    ids = page_ids(jnp.int32(turn))
                    fetch(k_hbm, k, k_ready, jnp.int32(turn), ids)
                    fetch(v_hbm, v, v_ready, jnp.int32(turn), ids)

            # the first cache index that a row does not see
            row = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=by_row)
            bound = jnp.minimum(lax.div(row, share) + (start + 1), end)
            column = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 1, layout=layout)
            plgpu.barrier_wait(q_ready)

            def one_tile(turn: Array, carry: Any) -> Any:
                acc, top, total = carry
                slot, base = slot_of(turn, stages), key_index(turn)
                more = turn + stages < turns
                ids = page_ids(turn + stages)
                careful = base + TILE > start
                if first:
                    careful |= base == 0
                plgpu.barrier_wait(k_ready.at[slot])

                @pl.when(careful)
                def _() -> None:
                    plgpu.barrier_wait(v_ready.at[slot])
                    clean(slot, base)

                def products(scores: Any) -> Array:
                    plgpu.wgmma(scores, q.at[slot_of(turn, 1)], k.at[slot].transpose((1, 0)))
                    return scores[...]

                scores = pl.run_scoped(products, plgpu.ACC((TILE, TILE), jnp.float32))

                @pl.when(more)
                def _() -> None:
                    fetch(k_hbm, k, k_ready, turn + stages, ids)

                seen = column < lax.broadcast_in_dim(bound - base, (TILE, TILE), (0,))
                if first:
                    seen &= column >= first - base
                scores = jnp.where(seen, scores * scale, UNSEEN)
                higher = jnp.maximum(top, jnp.max(scores, axis=1))
                fade = jnp.exp2(top - higher)
                weights = jnp.exp2(scores - lax.broadcast_in_dim(higher, (TILE, TILE), (0,)))
                total = total * fade + jnp.sum(weights, axis=1)
                p[...] = weights.astype(jnp.bfloat16)
                plgpu.commit_smem()

                @pl.when(jnp.logical_not(careful))
                def _() -> None:
                    plgpu.barrier_wait(v_ready.at[slot])

                def product(mixed: Any, part: Any) -> Array:
                    plgpu.wgmma(mixed, p, v.at[slot, :, part])
                    return mixed[...]

                fade = lax.broadcast_in_dim(fade, (TILE, COLUMNS), (0,))
                square = plgpu.ACC((TILE, COLUMNS), jnp.float32)
                acc = list(acc)
                for i, part in enumerate(parts):
                    acc[i] = acc[i] * fade + pl.run_scoped(partial(product, part=part), square)
                    # one product after the other: together they don't fit into registers
                    acc = list(lax.optimization_barrier(tuple(acc)))

                @pl.when(more)
                def _() -> None:
                    fetch(v_hbm, v, v_ready, turn + stages, ids)

                return acc, higher, total

            full = lambda shape, value, layout: plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)  # noqa: E731
            empty = [full((TILE, COLUMNS), 0.0, layout) for _ in parts]
            carry = empty, full((TILE,), UNSEEN, by_row), full((TILE,), 0.0, by_row)
            acc, top, total = lax.fori_loop(0, turns, one_tile, carry)

            for x, part in zip(acc, parts, strict=True):
                staged.at[:, part][...] = x
                # what is not finite in one column of a row is told to the whole row
                total += jnp.sum(x * 0.0, axis=1)
            tops[...] = top
            sums[...] = total
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staged.at[pl.ds(0, padded)], mixed_hbm.at[lane, group, split])
            plgpu.copy_smem_to_gmem(tops, tops_hbm.at[lane, group, split])
            plgpu.copy_smem_to_gmem(sums, sums_hbm.at[lane, group, split])
            plgpu.wait_smem_to_gmem(0)

    def smem(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        tile = plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize))
        return plgpu.SMEM(shape, dtype, transforms=(tile, plgpu.SwizzleTransform(128)))

    tile = smem(stages, TILE, dim)
    row_numbers = plgpu.SMEM((TILE,), jnp.float32)
    copies = TILE // chunk
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((batch, groups, splits, padded, dim), jnp.float32),
            jax.ShapeDtypeStruct((batch, groups, splits, TILE), jnp.float32),
            jax.ShapeDtypeStruct((batch, groups, splits, TILE), jnp.float32),
        ),
        grid=(splits, groups, batch),
        grid_names=("split", "group", "lane"),
        scratch_types=(
            smem(1, TILE, dim),
            smem(TILE, TILE),
            # the result is staged where the tiles were
            plgpu.RefUnion((tile, tile), smem(TILE, dim, dtype=jnp.float32)),
            row_numbers,
            row_numbers,
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
            plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
    )
