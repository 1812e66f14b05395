"""The terms of the epilogue for a column of c, where there are few rows."""

from ...epilogue import ColumnTerms, Epilogue
from ...row_hook import RowHook
from ..parts import HALVES, SIDE_BY_SIDE, first_of
from ..product import Product
from .tile import FewRowsTile


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
