"""Transposes a matrix through tiles in shared memory."""

from layout.tile_layout import TensorLayout, row_major
from layout.tile_tensor import TileTensor, stack_allocation
from max.gpu import barrier, block_idx, thread_idx
from max.gpu.memory import AddressSpace

comptime TRANSPOSE_BLOCK_DIM_XY = 16
"""Rows and columns of a tile, and of a block of threads."""


def transpose_kernel[
    layout_in: TensorLayout,
    layout_out: TensorLayout,
    rows: Int,
    cols: Int,
    dtype: DType = DType.float32,
](
    output: TileTensor[mut=True, dtype, layout_out, MutAnyOrigin],
    inp: TileTensor[dtype, layout_in, ImmutAnyOrigin],
):
    """Writes the transpose of a matrix.

    Grid: one block a tile, columns of `inp` on x. Block: `(16, 16)`. Shared
    memory holds one tile, so that neighboring threads both read and write
    neighboring addresses.

    Parameters:
        layout_in: Layout of `inp`.
        layout_out: Layout of `output`.
        rows: Rows of `inp`.
        cols: Columns of `inp`.
        dtype: Element type.

    Args:
        output: Transposed matrix, `[cols, rows]`.
        inp: Matrix, `[rows, cols]`.
    """
    comptime assert output.flat_rank == 2, "output must be rank 2"
    comptime assert inp.flat_rank == 2, "inp must be rank 2"

    # FILL IN (roughly 18 lines)
    # 1. Get shared memory for one tile: stack_allocation[dtype=dtype,
    #    address_space=AddressSpace.SHARED] of the layout
    #    row_major[TRANSPOSE_BLOCK_DIM_XY, TRANSPOSE_BLOCK_DIM_XY]().
    # 2. thread_idx.y and .x are this thread's row and column in the tile;
    #    block_idx.y and .x say which tile. Load that element of inp, if it lies
    #    inside the matrix.
    # 3. Wait for the other threads with barrier(): you are about to read what
    #    they loaded.
    # 4. Block (x, y) of inp is block (y, x) of output. Find this thread's place
    #    there so that neighboring threads still write neighboring columns,
    #    and take the element from the mirrored place in the tile.
    # Convert elements with rebind[shared_tile.ElementType](...) and
    # rebind[output.ElementType](...).

    var shared_tile = stack_allocation[
        dtype=dtype, address_space=AddressSpace.SHARED
    ](row_major[TRANSPOSE_BLOCK_DIM_XY, TRANSPOSE_BLOCK_DIM_XY]())

    var local_row = Int(thread_idx.y)
    var local_col = Int(thread_idx.x)

    var global_row = Int(block_idx.y) * TRANSPOSE_BLOCK_DIM_XY + local_row
    var global_col = Int(block_idx.x) * TRANSPOSE_BLOCK_DIM_XY + local_col

    if global_row < rows and global_col < cols:
        shared_tile[local_row, local_col] = rebind[shared_tile.ElementType](
            inp[global_row, global_col]
        )

    # The tile is complete before any thread reads what another one loaded.
    barrier()

    var out_row = Int(block_idx.x) * TRANSPOSE_BLOCK_DIM_XY + local_row
    var out_col = Int(block_idx.y) * TRANSPOSE_BLOCK_DIM_XY + local_col

    # The block writes its tile at the mirrored place; the indices into shared
    # memory are swapped instead of those into global memory.
    if out_row < cols and out_col < rows:
        output[out_row, out_col] = rebind[output.ElementType](
            shared_tile[local_col, local_row]
        )
    # END
