"""Zeroes what an epilogue's vectors have in shared memory for columns past the last one, where sums are 0."""

from std.sys import size_of

from ..epilogue import Epilogue
from .barriers import warp_sync
from .shared_memory import store_shared_element


@doc_hidden
@always_inline
def clear_vectors[
    E: Epilogue, columns: Int, matrices: Int, of_c: Int
](vectors: UInt32, used: UInt32, lane: UInt32):
    """Zeroes them for one or two matrices that have `of_c` columns each of a tile of `columns`, the first `used` of which
    there are.

    Each warp does so for itself. A later copy to the same place follows the fence that it has before it sends a box.
    """
    comptime first_size = size_of[E.vector_type(0)]()
    if used >= UInt32(of_c):
        return
    for column in range(used + lane, UInt32(of_c), 32):
        comptime for i in range(E.vectors):
            comptime for part in range(matrices):
                comptime size = size_of[E.vector_type(i)]()
                comptime first = i * columns * first_size + part * of_c * size
                store_shared_element[E.vector_type(i)](
                    vectors + UInt32(first) + column * UInt32(size), 0
                )
    warp_sync()
