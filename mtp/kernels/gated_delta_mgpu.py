"""Mosaic GPU kernel of `mtp.kernels.gated_delta.gated_delta_window` for Hopper.

A block takes items one after the other: half the value rows of the heads that share a key head, of one lane. For each
head it folds the pending rows into a tile of the state, writes it back in place, and runs the window on from the
registers that hold it: the state crosses the memory bus once each way, and the next tiles are on their way meanwhile.
The convolution is done in the block too, so that q, k and v are never written. All of it is float32.
"""

from functools import partial
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mtp.shapes import Array, Float, Float32, PerLane

# qkv, log_decay and write_strength of `mtp.kernels.gated_delta.DeltaRows`
Rows = tuple[Float[Array, "B _ C"], Float32[Array, "B _ U"], Float32[Array, "B _ U"]]
WIDTH = 128  # of keys and values
# the state tile as the memory copies and the register layout like it
TILE = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
# value rows of a head's state that are one tile, and tiles that a block holds at once
VALUE_ROWS, BUFFERS = 64, 2
HALVES = WIDTH // VALUE_ROWS
# blocks that a Hopper GPU runs at once, two on each of 132 multiprocessors
BLOCKS = 264
# parts of a block's channels; a block with several heads has several values
QUERY, KEY, VALUE = range(3)


def unfit(state: Float32[Array, "B U Z Y"], conv: Float[Array, "B history C"], taps: int) -> str | None:
    """Why the kernel can't take these arrays; None if it can."""
    if state.shape[2:] != (WIDTH, WIDTH):
        return f"heads of {state.shape[2]} x {state.shape[3]} are not {WIDTH} x {WIDTH}"
    if taps < 2:
        return f"a convolution of {taps} taps has no history"
    return None if conv.dtype in (jnp.bfloat16, jnp.float32) else f"{conv.dtype} is neither bfloat16 nor float32"


@partial(jax.jit, static_argnames=("block_heads", "interpret"))
def gated_delta_window(
    state: Float32[Array, "B U Z Y"],
    conv: Float[Array, "B history C"],
    pending: Rows,
    num_pending: PerLane,
    window: Rows,
    num_rows: PerLane,
    weight: Float[Array, "C W"],
    *,
    block_heads: int | None = None,
    interpret: bool = False,
) -> tuple[Float32[Array, "B U Z Y"], Float32[Array, "B T U Z"]]:
    """The folded state and the window's outputs (see `mtp.kernels.gated_delta`); those of lanes without rows are unset.

    Args:
        block_heads: value heads that one block takes, all of one key head; many amortise the work on keys and queries,
            one spreads few lanes over more of the device. None chooses.
    """
    lanes, heads = state.shape[:2]
    length, channels = window[0].shape[1:]
    limit, history, taps = pending[0].shape[1], conv.shape[1], weight.shape[1]
    before, rows = history + limit, limit + length
    padded = -(-rows // 4) * 4
    key_heads = (channels - heads * WIDTH) // (2 * WIDTH)
    repeat = heads // key_heads
    count = block_heads or (repeat if lanes * key_heads * HALVES >= BLOCKS // 2 else 1)
    buffers, parts = min(BUFFERS, count), VALUE + count
    items_a_lane = heads // count * HALVES
    num_blocks = min(BLOCKS, lanes * items_a_lane)
    dtype, f32 = window[0].dtype, jnp.float32

    def body(
        state: Any,
        conv: Any,
        pending: Any,
        num_pending: Any,
        window: Any,
        gates: Any,
        live: Any,
        num_live: Any,
        weight: Any,
        outputs: Any,
        state_s: Any,
        before_s: Any,
        window_s: Any,
        weight_s: Any,
        gates_s: Any,
        mixed_s: Any,
        scales_s: Any,
        outputs_s: Any,
        loaded: Any,
        rows_loaded: Any,
    ) -> None:
        me = lax.axis_index("block")
        # the items that are this block's turn, one after the other
        turns = (num_live[0] * items_a_lane - me + num_blocks - 1) // num_blocks

        def lane_of(turn: Any) -> Any:
            return live[jnp.minimum((me + turn * num_blocks) // items_a_lane, lanes - 1)]

        def place(turn: Any) -> tuple[Any, Any]:
            """First head and first value row of an item."""
            rest = (me + turn * num_blocks) % items_a_lane
            return rest // HALVES * count, rest % HALVES * VALUE_ROWS

        def tile(turn: Any, lane: Any, head: Any) -> Any:
            first_head, first = place(turn)
            return state.at[lane, first_head + head, pl.ds(first, VALUE_ROWS)]

        def load_tile(turn: Any, lane: Any, head: Any) -> None:
            buffer = (turn * count + head) % buffers
            plgpu.copy_gmem_to_smem(tile(turn, lane, head), state_s.at[buffer], loaded.at[buffer])

        def load_rows(turn: Any, lane: Any) -> None:
            first_head, _ = place(turn)
            key_head = first_head // repeat
            starts = [key_head, key_heads + key_head, *(2 * key_heads + first_head + head for head in range(count))]
            plgpu.copy_gmem_to_smem(gates.at[lane, first_head // count], gates_s, rows_loaded)
            for part, start in enumerate(starts):
                columns = pl.ds(start * WIDTH, WIDTH)
                plgpu.copy_gmem_to_smem(conv.at[lane, :, columns], before_s.at[part, pl.ds(0, history)], rows_loaded)
                pending_rows = before_s.at[part, pl.ds(history, limit)]
                plgpu.copy_gmem_to_smem(pending.at[lane, :, columns], pending_rows, rows_loaded)
                plgpu.copy_gmem_to_smem(window.at[lane, :, columns], window_s.at[part], rows_loaded)
                plgpu.copy_gmem_to_smem(weight.at[:, columns], weight_s.at[part], rows_loaded)

        @pl.when(turns > 0)
        def _() -> None:
            lane = lane_of(0)
            load_rows(0, lane)
            for head in range(buffers):
                load_tile(0, lane, head)

        def one_item(turn: Array, lane: Array) -> Array:
            first_head, first = place(turn)
            folds, following_lane = num_pending[lane], lane_of(turn + 1)

            plgpu.barrier_wait(rows_loaded)
            for part in range(parts):
                taps_of = [_vector(weight_s, part, tap) for tap in range(taps)]

                def mix(recent: list[Array], row: int, part: int = part, taps_of: list[Array] = taps_of) -> None:
                    total = recent[0] * taps_of[0]
                    for x, tap in zip(recent[1:], taps_of[1:], strict=True):
                        total = total + x * tap
                    mixed_s[part, row] = (total / (1.0 + jnp.exp(-total))).astype(dtype).astype(f32)

                if part != QUERY:
                    old = [_vector(before_s, part, row) for row in range(before)]
                    for t in range(limit):
                        mix(old[t : t + taps], t)
                recent = [_vector(before_s, part, folds + row) for row in range(history)]
                recent += [_vector(window_s, part, row) for row in range(length)]
                for t in range(length):
                    mix(recent[t : t + taps], limit + t)
            # the gates too leave the buffer that the next item's come into
            for gate in range(2 * count):
                for row in range(rows):
                    scales_s[2 + gate, row] = gates_s[gate, row]
            plgpu.commit_smem()

            @pl.when(turn + 1 < turns)
            def _() -> None:
                load_rows(turn + 1, following_lane)

            # keys and queries are of unit length, which is a factor here
            for row in range(rows):
                scales_s[KEY, row] = _inverse_length(_along_keys(mixed_s, KEY, row))
                if row >= limit:
                    scales_s[QUERY, row] = _inverse_length(_along_keys(mixed_s, QUERY, row)) * WIDTH**-0.5
            plgpu.commit_smem()

            def one_head(head: Array, carry: None) -> None:
                number = turn * count + head
                buffer = number % buffers
                plgpu.barrier_wait(loaded.at[buffer])
                s = plgpu.load(state_s.at[buffer], layout=plgpu.Layout.WGMMA)

                def step(row: Any, s: Array) -> Array:
                    decay, write = scales_s[2 + 2 * head, row], scales_s[3 + 2 * head, row]
                    scale = scales_s[KEY, row]
                    value = plgpu.load(
                        mixed_s.at[VALUE + head, row, pl.ds(first, VALUE_ROWS)], layout=plgpu.Layout.WGMMA.reduce(1)
                    )
                    keys = lax.broadcast_in_dim(_along_keys(mixed_s, KEY, row), s.shape, (1,))
                    s = s * decay
                    update = (value - jnp.sum(s * keys, axis=1) * scale) * (write * scale)
                    return s + lax.broadcast_in_dim(update, s.shape, (0,)) * keys

                s = lax.fori_loop(0, folds, step, s)

                @pl.when(folds > 0)
                def _() -> None:
                    state_s[buffer] = s
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(state_s.at[buffer], tile(turn, lane, head))

                for t in range(length):
                    s = step(limit + t, s)
                    queries = lax.broadcast_in_dim(_along_keys(mixed_s, QUERY, limit + t), s.shape, (1,))
                    outputs_s[head, t] = jnp.sum(s * queries, axis=1) * scales_s[QUERY, limit + t]
                plgpu.commit_smem()
                target = outputs.at[lane, :, first_head + head, pl.ds(first, VALUE_ROWS)]
                plgpu.copy_smem_to_gmem(outputs_s.at[head], target)
                # the state's copy has left its buffer, and the last outputs' theirs
                plgpu.wait_smem_to_gmem(1 if count > 1 else 0, wait_read_only=True)
                following = number + buffers

                @pl.when(following < turns * count)
                def _() -> None:
                    after = following // count
                    load_tile(after, jnp.where(after == turn, lane, following_lane), following % count)

            lax.fori_loop(0, count, one_head, None)
            return following_lane

        lax.fori_loop(0, turns, one_item, lane_of(0))
        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((lanes, length, heads, WIDTH), f32),
        grid=(num_blocks,),
        grid_names=("block",),
        scratch_types=(
            plgpu.SMEM((buffers, VALUE_ROWS, WIDTH), f32, transforms=TILE),
            plgpu.SMEM((parts, before, WIDTH), dtype),
            plgpu.SMEM((parts, length, WIDTH), dtype),
            plgpu.SMEM((parts, taps, WIDTH), dtype),
            plgpu.SMEM((2 * count, padded), f32),
            plgpu.SMEM((parts, rows, WIDTH), f32),
            # factors of queries and keys, then the gates of each head
            plgpu.SMEM((2 + 2 * count, rows), f32),
            plgpu.SMEM((count, length, VALUE_ROWS), f32),
            plgpu.Barrier(num_barriers=buffers),
            plgpu.Barrier(num_arrivals=4 * parts + 1),
        ),
        # what one thread writes to shared memory and another reads is parted by `commit_smem`
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        **({"interpret": plgpu.InterpretGPUParams(detect_races=True)} if interpret else {}),
    )
    is_live = num_rows > 0
    # numbers of the live lanes, then of the others
    live = jnp.argsort(~is_live, stable=True).astype(jnp.int32)
    folded = jax.new_ref(state)
    num_live = jnp.sum(is_live, dtype=jnp.int32)[None]
    # [B, blocks, 2 count, rows]: decay and write strength of each head; rows in fours, as copies take them
    decay, write = (jnp.concatenate([old, new], axis=1) for old, new in zip(pending[1:], window[1:], strict=True))
    gates = jnp.moveaxis(jnp.stack([jnp.exp(decay), write], axis=-1), 1, -1)
    gates = jnp.pad(gates, ((0, 0), (0, 0), (0, 0), (0, padded - rows)))
    gates = gates.reshape(lanes, heads // count, 2 * count, padded)
    outputs = kernel(folded, conv, pending[0], num_pending, window[0], gates, live, num_live, weight.T)
    return jax.freeze(folded), outputs


def _vector(rows: Any, part: int, row: int | Array) -> Array:
    """A row of channels, one a thread."""
    return plgpu.load(rows.at[part, row], layout=plgpu.Layout.WG_STRIDED((WIDTH,), vec_size=1)).astype(jnp.float32)


def _along_keys(rows: Any, part: int, row: int | Array) -> Array:
    """A query or key as every row of the state tile meets it."""
    return plgpu.load(rows.at[part, row], layout=plgpu.Layout.WGMMA.reduce(0)).astype(jnp.float32)


def _inverse_length(x: Array) -> Array:
    return lax.rsqrt(jnp.sum(x * x) + 1e-6)
