"""Step 1: one thread computes one element of c = a b^T.

Every product fetches its two factors from memory again: 4 bytes for 2 FLOP.
"""

from max.gpu import block_idx, thread_idx
from std.math import ceildiv
from std.python import PythonObject

from op.device import Gpu

from entry import Task, new_module

comptime BLOCK = 16
"""Rows and columns of c that a block computes."""
comptime Matrix = Pointer[BFloat16, ImmutAnyOrigin]
comptime Result = Pointer[BFloat16, MutAnyOrigin]


def naive_kernel(c: Result, a: Matrix, b: Matrix, m: Int32, n: Int32, k: Int32):
    """Computes one element of c for each thread.

    Grid: 16 columns of c on x, 16 rows on y. Block: (16, 16).

    Args:
        c: Receives c [M, N].
        a: Left matrix [M, K].
        b: Right matrix [N, K].
        m: Rows of a.
        n: Rows of b.
        k: Columns of both.
    """
    var row = Int(block_idx.y) * BLOCK + Int(thread_idx.y)
    var column = Int(block_idx.x) * BLOCK + Int(thread_idx.x)
    if row >= Int(m) or column >= Int(n):
        return
    var of_a = a.unsafe_offset(row * Int(k))
    var of_b = b.unsafe_offset(column * Int(k))
    var sum = Float32(0)
    for i in range(Int(k)):
        sum += (
            of_a.unsafe_offset(i).unsafe_load().cast[DType.float32]()
            * of_b.unsafe_offset(i).unsafe_load().cast[DType.float32]()
        )
    c.unsafe_offset(row * Int(n) + column).unsafe_store(
        sum.cast[DType.bfloat16]()
    )


def launch(gpu: Gpu, task: Task) raises:
    """Queues the kernel.

    Args:
        gpu: Where to run.
        task: What to multiply.

    Raises:
        If the driver refuses.
    """
    var kernel = gpu.context.compile_function[naive_kernel]()
    gpu.stream.enqueue_function(
        kernel,
        Result(unsafe_from_address=task.c),
        Matrix(unsafe_from_address=task.a),
        Matrix(unsafe_from_address=task.b),
        Int32(task.m),
        Int32(task.n),
        Int32(task.k),
        grid_dim=(ceildiv(task.n, BLOCK), ceildiv(task.m, BLOCK)),
        block_dim=(BLOCK, BLOCK),
    )


@export
def PyInit_step1_naive() abi("C") -> PythonObject:
    """Makes the module.

    Returns:
        The module.
    """
    return new_module["step1_naive", launch]()
