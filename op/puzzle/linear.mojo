"""Multiplies tiled matrices and adds a bias: the linear half of the unfused version."""

from layout.tile_layout import TensorLayout, row_major
from layout.tile_tensor import TileTensor, stack_allocation
from max.gpu import barrier, block_idx, thread_idx
from max.gpu.memory import AddressSpace, async_copy, async_copy_wait_all
from std.math import ceildiv
from std.sys import size_of

comptime MATMUL_BLOCK_DIM_XY = 16
"""Rows and columns of a tile of each matrix, and of a block of threads."""


def matmul_idiomatic_tiled[
    a_layout: TensorLayout,
    b_layout: TensorLayout,
    out_layout: TensorLayout,
    rows: Int,
    cols: Int,
    inner: Int,
    dtype: DType = DType.float32,
](
    output: TileTensor[mut=True, dtype, out_layout, MutAnyOrigin],
    a: TileTensor[dtype, a_layout, ImmutAnyOrigin],
    b: TileTensor[dtype, b_layout, ImmutAnyOrigin],
):
    """Multiplies two matrices tile by tile.

    Grid: one block a tile of `output`, columns on x. Block: `(16, 16)`. Shared
    memory holds one tile of `a` and one of `b`, filled by asynchronous copies of
    one element a thread. Sums are accumulated in `dtype`.

    Parameters:
        a_layout: Layout of `a`.
        b_layout: Layout of `b`.
        out_layout: Layout of `output`.
        rows: Rows of `a` and `output`.
        cols: Columns of `b` and `output`.
        inner: Columns of `a` and rows of `b`.
        dtype: Element type, 4 bytes wide.

    Args:
        output: The product, `[rows, cols]`.
        a: Left matrix, `[rows, inner]`.
        b: Right matrix, `[inner, cols]`.
    """
    comptime assert output.flat_rank == 2, "output must be rank 2"
    comptime assert size_of[dtype]() == 4, "copies move 4 bytes"

    var local_row = Int(thread_idx.y)
    var local_col = Int(thread_idx.x)
    var tiled_row = Int(block_idx.y) * MATMUL_BLOCK_DIM_XY + local_row
    var tiled_col = Int(block_idx.x) * MATMUL_BLOCK_DIM_XY + local_col

    comptime tile_layout = row_major[MATMUL_BLOCK_DIM_XY, MATMUL_BLOCK_DIM_XY]()
    var a_shared = stack_allocation[
        dtype=dtype, address_space=AddressSpace.SHARED
    ](tile_layout)
    var b_shared = stack_allocation[
        dtype=dtype, address_space=AddressSpace.SHARED
    ](tile_layout)
    var acc: Scalar[dtype] = 0

    for idx in range(ceildiv(inner, MATMUL_BLOCK_DIM_XY)):
        var tile_start = idx * MATMUL_BLOCK_DIM_XY
        _copy_element_async[rows, inner](
            a_shared, a, tiled_row, tile_start + local_col
        )
        _copy_element_async[inner, cols](
            b_shared, b, tile_start + local_row, tiled_col
        )

        # Both tiles are in shared memory, for every thread of the block.
        async_copy_wait_all()
        barrier()

        comptime for k in range(MATMUL_BLOCK_DIM_XY):
            acc += rebind[Scalar[dtype]](a_shared[local_row, k]) * rebind[
                Scalar[dtype]
            ](b_shared[k, local_col])

        # Both tiles are read before the next copies overwrite them.
        barrier()

    if tiled_row < rows and tiled_col < cols:
        output[tiled_row, tiled_col] = rebind[output.ElementType](acc)


def _copy_element_async[
    dtype: DType,
    dst_layout: TensorLayout,
    src_layout: TensorLayout,
    //,
    rows: Int,
    cols: Int,
](
    dst: TileTensor[
        mut=True, dtype, dst_layout, _, address_space=AddressSpace.SHARED, ...
    ],
    src: TileTensor[dtype, src_layout, ImmutAnyOrigin],
    row: Int,
    col: Int,
):
    """Starts copying this thread's element of a tile; a zero if it is outside.

    Zeros add nothing to a product, so tiles that hang over an edge need no other
    care.
    """
    var inside = row < rows and col < cols
    # A copy of zero bytes reads nothing; its address stays inside all the same.
    var offset = row * cols + col if inside else 0
    async_copy[4, fill=Scalar[dtype](0)](
        src.ptr.unsafe_offset(offset).unsafe_address_space_cast[
            AddressSpace.GLOBAL
        ](),
        dst.ptr.unsafe_offset(
            Int(thread_idx.y) * MATMUL_BLOCK_DIM_XY + Int(thread_idx.x)
        ),
        Int32(4) if inside else Int32(0),
    )


def add_bias_kernel[
    input_layout: TensorLayout,
    bias_layout: TensorLayout,
    output_layout: TensorLayout,
    batch_size: Int,
    seq_len: Int,
    output_dim: Int,
    dtype: DType = DType.float32,
](
    output: TileTensor[mut=True, dtype, output_layout, MutAnyOrigin],
    input: TileTensor[dtype, input_layout, ImmutAnyOrigin],
    bias: TileTensor[dtype, bias_layout, ImmutAnyOrigin],
):
    """Adds a bias to each sequence position.

    Grid: `(batch_size, seq_len)`. Block: `(output_dim,)`.

    Parameters:
        input_layout: Layout of `input`.
        bias_layout: Layout of `bias`.
        output_layout: Layout of `output`.
        batch_size: Number of sequences.
        seq_len: Positions in a sequence.
        output_dim: Elements of a position.
        dtype: Element type.

    Args:
        output: Sums, `[batch_size, seq_len, output_dim]`.
        input: Summands, `[batch_size, seq_len, output_dim]`.
        bias: Added to each position, `[output_dim]`.
    """
    comptime assert output.flat_rank == 3, "output must be rank 3"
    comptime assert input.flat_rank == 3, "input must be rank 3"
    comptime assert bias.flat_rank == 1, "bias must be rank 1"

    var batch_idx = Int(block_idx.x)
    var seq_idx = Int(block_idx.y)
    var out_idx = Int(thread_idx.x)

    if batch_idx >= batch_size or seq_idx >= seq_len or out_idx >= output_dim:
        return

    output[batch_idx, seq_idx, out_idx] = rebind[output.ElementType](
        rebind[Scalar[dtype]](input[batch_idx, seq_idx, out_idx])
        + rebind[Scalar[dtype]](bias[out_idx])
    )
