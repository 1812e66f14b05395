"""Step 2: a block shares tiles of both matrices in shared memory, a thread an 8 x 8 tile in registers.

A factor that is fetched from memory serves 128 products, one from shared memory
eight. The sums are still taken by the ordinary float32 units.
"""

from max.gpu import barrier, block_idx, thread_idx
from max.gpu.memory import AddressSpace
from std.math import ceildiv
from std.memory import stack_allocation
from std.python import PythonObject
from std.utils import StaticTuple

from op.device import Gpu

from entry import Task, new_module

comptime TILE = 128
"""Rows and columns of c that a block computes."""
comptime SLICE = 16
"""Columns of a and b that are in shared memory at one time."""
comptime THREADS = 256
"""Threads of a block, 16 by 16."""
comptime OWN = 8
"""Rows and columns of c that a thread computes."""
comptime CHUNK = 8
"""Elements of 16 bytes, which a thread fetches of each matrix."""

comptime Matrix = Pointer[BFloat16, ImmutAnyOrigin]
comptime Result = Pointer[BFloat16, MutAnyOrigin]
comptime Shared = Pointer[
    Float32, MutUntrackedOrigin, address_space=AddressSpace.SHARED
]
comptime Four = SIMD[DType.float32, 4]


@always_inline
def fetch(
    tile: Shared, matrix: Matrix, first_row: Int, rows: Int, k: Int, at: Int
):
    """Loads this thread's 16 bytes of a slice, and stores them where slices are by columns.

    Two neighboring threads share a row. Elements outside the matrix are zero.
    """
    var thread = Int(thread_idx.x)
    var row = thread // 2
    var column = thread % 2 * CHUNK
    var values = SIMD[DType.bfloat16, CHUNK](0)
    if first_row + row < rows and at + column < k:
        values = matrix.unsafe_offset(
            (first_row + row) * k + at + column
        ).unsafe_load[width=CHUNK, alignment=16]()
    comptime for i in range(CHUNK):
        tile.unsafe_offset((column + i) * TILE + row).unsafe_store(
            values[i].cast[DType.float32]()
        )


@always_inline
def four(tile: Shared, at: Int) -> Four:
    """Loads four neighboring values, from a multiple of four."""
    return tile.unsafe_offset(at).unsafe_load[width=4, alignment=16]()


def tiled_kernel(c: Result, a: Matrix, b: Matrix, m: Int32, n: Int32, k: Int32):
    """Computes a tile of 128 by 128 for each block.

    Grid: tile columns on x, tile rows on y. Block: 256. Thread (tx, ty) of 16 by
    16 has rows 8 ty to 8 ty + 7, and columns 4 tx to 4 tx + 3 of both halves of
    the tile, so that neighbors read neighboring banks.

    Args:
        c: Receives c [M, N].
        a: Left matrix [M, K].
        b: Right matrix [N, K].
        m: Rows of a.
        n: Rows of b, a multiple of 8.
        k: Columns of both, a multiple of 8.
    """
    var of_a = stack_allocation[
        SLICE * TILE, Float32, address_space=AddressSpace.SHARED, alignment=16
    ]()
    var of_b = stack_allocation[
        SLICE * TILE, Float32, address_space=AddressSpace.SHARED, alignment=16
    ]()
    var first_row = Int(block_idx.y) * TILE
    var first_column = Int(block_idx.x) * TILE
    var tx = Int(thread_idx.x) % 16
    var ty = Int(thread_idx.x) // 16
    var left = StaticTuple[Four, OWN](fill=Four(0))
    var right = StaticTuple[Four, OWN](fill=Four(0))
    for at in range(0, Int(k), SLICE):
        fetch(of_a, a, first_row, Int(m), Int(k), at)
        fetch(of_b, b, first_column, Int(n), Int(k), at)
        # The slices are complete.
        barrier()
        comptime for i in range(SLICE):
            var upper = four(of_a, i * TILE + ty * OWN)
            var lower = four(of_a, i * TILE + ty * OWN + 4)
            var near = four(of_b, i * TILE + tx * 4)
            var far = four(of_b, i * TILE + TILE // 2 + tx * 4)
            comptime for row in range(OWN):
                var value = Four(upper[row] if row < 4 else lower[row % 4])
                left[row] = value.fma(near, left[row])
                right[row] = value.fma(far, right[row])
        # Nobody needs them any more.
        barrier()
    comptime for row in range(OWN):
        var its_row = first_row + ty * OWN + row
        comptime for half in range(2):
            var column = first_column + half * (TILE // 2) + tx * 4
            # N is a multiple of 8: four neighbors are all inside or all outside.
            if its_row < Int(m) and column < Int(n):
                var sums = left[row] if half == 0 else right[row]
                c.unsafe_offset(its_row * Int(n) + column).unsafe_store[
                    alignment=8
                ](sums.cast[DType.bfloat16]())


def launch(gpu: Gpu, task: Task) raises:
    """Queues the kernel.

    Args:
        gpu: Where to run.
        task: What to multiply.

    Raises:
        If the driver refuses.
    """
    var kernel = gpu.context.compile_function[tiled_kernel]()
    gpu.stream.enqueue_function(
        kernel,
        Result(unsafe_from_address=task.c),
        Matrix(unsafe_from_address=task.a),
        Matrix(unsafe_from_address=task.b),
        Int32(task.m),
        Int32(task.n),
        Int32(task.k),
        grid_dim=(ceildiv(task.n, TILE), ceildiv(task.m, TILE)),
        block_dim=THREADS,
    )


@export
def PyInit_step2_tiled() abi("C") -> PythonObject:
    """Makes the module.

    Returns:
        The module.
    """
    return new_module["step2_tiled", launch]()
