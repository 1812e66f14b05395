"""What the passing of rows needs before it starts."""

from std.utils import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    block_dim,
    block_idx,
    grid_dim,
    thread_idx,
)

from ...rows.gpu_row import GlobalPointer
from .counters import Counter
from .ptx import let_later_grids_start, wait_on_earlier_grids

comptime PREPARE_THREADS = 256
"""Threads of a block."""


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(PREPARE_THREADS))
)
@__name(t"fused_norm_prepare_{ln_dtype}")
def prepare_kernel[
    ln_dtype: DType
](
    counters: Counter,
    count: Int32,
    affine: Int64,
    gamma: Int64,
    beta: Int64,
    length: Int32,
):
    """Sets counters to zero, and brings gamma and beta to float32.

    Parameters:
        ln_dtype: Type of gamma and beta.

    Args:
        counters: The counters.
        count: How many there are.
        affine: Address of both in float32 [2, length], to write.
        gamma: Address of LayerNorm's weight [length]; 0 stands for ones.
        beta: Address of LayerNorm's bias [length]; 0 stands for zeros.
        length: K.
    """
    wait_on_earlier_grids()
    let_later_grids_start()
    var first = Int(block_idx.x * block_dim.x + thread_idx.x)
    var step = Int(grid_dim.x * block_dim.x)
    for i in range(first, Int(count), step):
        counters.unsafe_offset(i).unsafe_store(0)
    for i in range(first, Int(length), step):
        _write(affine, i, _read[ln_dtype](gamma, i, 1))
        _write(affine, Int(length) + i, _read[ln_dtype](beta, i, 0))


@always_inline
def _read[dtype: DType](address: Int64, index: Int, absent: Float32) -> Float32:
    if address == 0:
        return absent
    return (
        GlobalPointer[dtype](unsafe_from_address=Int(address))
        .unsafe_offset(index)
        .unsafe_load()
        .cast[DType.float32]()
    )


@always_inline
def _write(address: Int64, index: Int, value: Float32):
    GlobalPointer[DType.float32](
        unsafe_from_address=Int(address)
    ).unsafe_offset(index).unsafe_store(value)
