"""The terms of the epilogue for a column of c, where there are few rows."""

from ....pdl import prefetch
from ...epilogue import ColumnTerms, Epilogue
from ...row_hook import RowHook
from ..parts import SIDE_BY_SIDE, first_of
from ..product import Product
from .tile import FewRowsTile


@doc_hidden
@always_inline
def load_column_terms[
    parts: Int, E: Epilogue, H: RowHook, //
](
    product: Product[E, H],
    tile: FewRowsTile[parts],
    output: UInt32,
    half: UInt32,
) -> ColumnTerms[DType.float32, 1, E.vectors]:
    """Returns the elements of the epilogue's vectors of a column of c, of one half of a gate's."""
    var columns = ColumnTerms[DType.float32, 1, E.vectors](fill=0)
    comptime for i in range(E.vectors):
        comptime if E.may_lack_vectors:
            if product.epilogue.vector_address[i](0, 0, 0, 0) == 0:
                continue
        columns[i] = (
            Pointer[Scalar[E.vector_type(i)], MutUntrackedOrigin](
                unsafe_from_address=_address[i](product, tile, output, half)
            )
            .unsafe_load()
            .cast[DType.float32]()
        )
    return columns


@doc_hidden
@always_inline
def prefetch_column_terms[
    parts: Int, E: Epilogue, H: RowHook, //
](
    product: Product[E, H],
    tile: FewRowsTile[parts],
    output: UInt32,
    half: UInt32,
):
    """Has these fetched while the products are computed, with those of the columns after it."""
    comptime for i in range(E.vectors):
        comptime if E.may_lack_vectors:
            if product.epilogue.vector_address[i](0, 0, 0, 0) == 0:
                continue
        prefetch(_address[i](product, tile, output, half))


@always_inline
def _address[
    parts: Int, E: Epilogue, H: RowHook, //, i: Int
](
    product: Product[E, H],
    tile: FewRowsTile[parts],
    output: UInt32,
    half: UInt32,
) -> Int:
    """Returns where the element of a vector is."""
    comptime if parts == SIDE_BY_SIDE:
        return product.epilogue.vector_address[i](
            Int(tile.part),
            first_of(product.sizes, Int(tile.part)),
            Int(output),
            0,
        )
    return product.epilogue.vector_address[i](Int(half), 0, Int(output), 0)
