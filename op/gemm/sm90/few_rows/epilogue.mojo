"""The terms of the epilogue for few rows: of a lane's rows of a, and of its columns of c.

The product is b a^T: a lane's sums are of row lane / 4 of b's 16 in its warp and of the one 8 below, and of the rows
group * 8 + lane % 4 * 2 + side of a, for each group of 8 and side 0 or 1.
"""

from std.utils import StaticTuple

from ...epilogue import ColumnTerms, Epilogue, RowTerms
from ...row_hook import RowHook
from ..barriers import named_barrier_sync
from ..parts import HALVES, SIDE_BY_SIDE, first_of
from ..product import Product
from ..shared_memory import shared_pair, store_shared_pair
from ..wgmma import K_BLOCK
from .layout import FewRowsShared
from .tile import FewRowsTile


@doc_hidden
@always_inline
def load_row_terms[
    rows: Int, E: Epilogue, H: RowHook, //
](
    shared: FewRowsShared[rows, H.gathers],
    product: Product[E, H],
    first_half: UInt32,
    blocks: UInt32,
    thread: UInt32,
    is_first_tile: Bool,
) -> StaticTuple[RowTerms[], rows // 4]:
    """Returns the terms of a lane's rows: those that a hook makes of what both blocks have gathered, of which
    `first_half` of all k `blocks` are the first one's, or those that the epilogue loads.
    """
    var lane = thread & 31
    var m = product.m
    # All are loaded at once, even for rows that do not exist.
    var terms = StaticTuple[RowTerms[], rows // 4](RowTerms[](1, 0))
    comptime if H.gathers:
        if thread < UInt32(rows):
            var counts = SIMD[DType.float32, 2](
                Float32(first_half * K_BLOCK),
                Float32((blocks - first_half) * K_BLOCK),
            )
            var own = product.hook.terms(
                product.hook.join(
                    shared_pair(shared.row_sums(0) + thread * 8),
                    shared_pair(shared.row_sums(1) + thread * 8),
                    counts,
                ),
                counts.reduce_add(),
            )
            store_shared_pair(
                shared.row_sums(0) + thread * 8, {own.offset, own.scale}
            )
            if is_first_tile and thread < UInt32(m):
                product.hook.keep(Int(thread), own)
        named_barrier_sync(1, 128)
    comptime if E.has_row_terms:
        comptime for i in range(rows // 4):
            comptime row = i // 2 * 8 + i % 2
            comptime if H.gathers:
                var pair = shared_pair(
                    shared.row_sums(0) + UInt32(row * 8) + (lane & 3) * 16
                )
                terms[i] = RowTerms[](pair[1], pair[0])
                continue
            terms[i] = product.epilogue.row_terms(
                Int(min(Int32(row) + Int32(lane & 3) * 2, m - 1))
            )
    return terms


@doc_hidden
@always_inline
def load_column_terms[
    parts: Int, E: Epilogue, H: RowHook, //, below: Int
](
    product: Product[E, H],
    tile: FewRowsTile[parts],
    output: UInt32,
    column: Int,
) -> ColumnTerms[DType.float32, 1, E.vectors]:
    """Returns the elements of the epilogue's vectors of a column of c; `column` is its place in a gate's half."""
    var columns = ColumnTerms[DType.float32, 1, E.vectors](fill=0)
    comptime for i in range(E.vectors):
        comptime if E.may_lack_vectors:
            if product.epilogue.vector_address[i](0, 0, 0) == 0:
                continue
        var vector: Int
        comptime if parts == HALVES:
            vector = product.epilogue.vector_address[i](below, 0, column)
        elif parts == SIDE_BY_SIDE:
            vector = product.epilogue.vector_address[i](
                Int(tile.part),
                first_of(product.sizes, Int(tile.part)),
                Int(output),
            )
        else:
            vector = product.epilogue.vector_address[i](0, 0, Int(output))
        columns[i] = (
            Pointer[Scalar[E.vector_type(i)], MutUntrackedOrigin](
                unsafe_from_address=vector
            )
            .unsafe_load()
            .cast[DType.float32]()
        )
    return columns
