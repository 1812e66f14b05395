"""The epilogue of a product, applied to its sums before they are rounded, on every architecture.

    c[m, n] = round(finish(sum over k of a[m, k] b[n, k]))

An epilogue declares which vectors along n it needs, and whether it has terms of each row m. A kernel loads both as
suits it (to registers, or to shared memory while it multiplies) and passes them with some sums of one row.
An operand of c's shape, such as a residual, is only located here: kernels add it, to the sums or to what is finished.
"""

from std.utils import StaticTuple

from .activation import ANY, NOTHING


@fieldwise_init
struct RowTerms[dtype: DType = DType.float32](TrivialRegisterPassable):
    """What scales a row of sums, and how much of the column's correction is subtracted before.

    Parameters:
        dtype: Type of the sums.
    """

    var scale: Scalar[Self.dtype]
    """Factor of the row."""
    var offset: Scalar[Self.dtype]
    """Factor of the column's correction."""


comptime ColumnTerms[dtype: DType, width: Int, vectors: Int] = StaticTuple[
    SIMD[dtype, width], max(vectors, 1)
]
"""Elements of an epilogue's vectors, for some neighboring columns.

Parameters:
    dtype: Type of the sums.
    width: How many columns.
    vectors: How many vectors; with none there is still room for one.
"""


@fieldwise_init
struct Gradients[width: Int](TrivialRegisterPassable):
    """What becomes of gradients of an activation, and the activation.

    Parameters:
        width: How many elements.
    """

    var a: SIMD[DType.float32, Self.width]
    """The activation, for a gate what it gates multiplied by it."""
    var dh: SIMD[DType.float32, Self.width]
    """Gradient of its input."""
    var dup: SIMD[DType.float32, Self.width]
    """Gradient of what a gate multiplies; otherwise the same as `dh`."""


comptime Vector[dtype: DType] = Pointer[Scalar[dtype], MutUntrackedOrigin]
"""Points to what an epilogue reads along the rows or the columns.

Parameters:
    dtype: Type of the elements.
"""


trait Epilogue(TrivialRegisterPassable):
    """Finishes sums of products; part of what a kernel gets by value."""

    comptime name: StaticString
    """Tells kernels apart."""
    comptime vectors: Int = 0
    """How many vectors along the columns it needs."""
    comptime vector_dtype: DType = DType.float32
    """Their type."""
    comptime may_lack_vectors: Bool = False
    """Whether they may be at address 0, all of them: they are then zeros."""
    comptime has_row_terms: Bool = False
    """Whether it needs terms of each row."""
    comptime activates: Bool = False
    """Whether finished sums, as `h`, become something else before they are c."""
    comptime adds: Bool = False
    """Whether kernels add a tensor of the shape and the type of c to the sums, before these are finished."""
    comptime adds_last: Bool = False
    """Whether they add such a tensor to what is finished, before it is rounded."""
    comptime is_gate: Bool = False
    """Whether c has half of the columns of h: of 16 columns of b, the first eight gate the others."""
    comptime gradients: Int = 0
    """How many gradients c has of each sum, which is that of an activation, whose input h is loaded: 1, or 2 for a
    gate, whose own are the left half of c, as of h."""
    comptime may_store_a: Bool = False
    """Whether the activation may be stored in addition to its gradients."""
    comptime stores: Bool = True
    """Whether c is stored; otherwise only sums of it are kept."""
    comptime sums_rows: Bool = False
    """Whether what is finished of a row is added up over the columns of each tile, before it is rounded."""
    comptime weighs: Bool = False
    """Whether what is finished is multiplied by weights once its rows are summed, before it is stored."""
    comptime scales_blocks: Bool = False
    """Whether the sums over each 128 elements of K have scales of their own, by which they are multiplied before they
    are added up in float32."""
    comptime quantizes: Bool = False
    """Whether finished sums are activated, rounded to bfloat16 and stored in 8 bits with scales; of two matrices in
    turn, what the first gives gates what the second gives."""
    comptime keeps_maxima: Bool = False
    """Whether the largest magnitudes of rows and columns may be kept, in bfloat16: of an activation, or of gradients."""
    comptime finds_scales: Bool = False
    """Whether such scales are found of the largest magnitudes, for each 128 columns of a row; otherwise one is given."""

    @always_inline
    def row_block_scale(self, row: Int, block: Int, blocks: Int) -> Float32:
        """Loads the scale of a row's sums over a block of K.

        Args:
            row: The row.
            block: The block.
            blocks: How many there are.

        Returns:
            The scale.
        """
        return 1

    @always_inline
    def column_block_scale[
        second: Bool = False
    ](self, column: Int, block: Int, blocks: Int) -> Float32:
        """Loads the scale of sums over a block of K, of 128 columns.

        Parameters:
            second: Whether they are of the second of two matrices in turn.

        Args:
            column: One of the columns.
            block: The block.
            blocks: How many there are.

        Returns:
            The scale.
        """
        return 1

    @always_inline
    def block_scale(self, most: UInt32) -> Float32:
        """Finds the scale of columns of a row that are stored in 8 bits.

        Args:
            most: The bits of the largest magnitude in float32, whose order is that of the numbers, NaN last: of 128
                columns, or of some of them where the scale is given.

        Returns:
            The scale; NaN where one is given and the numbers are too large for it.
        """
        return 1

    @always_inline
    def in_eight_bits(
        self,
        pairs: SIMD[DType.uint32, 2],
        scales: SIMD[DType.float32, 2],
        inverses: SIMD[DType.float32, 2],
    ) -> UInt32:
        """Divides numbers by scales and rounds them to 8 bits.

        Args:
            pairs: Two numbers of each of two rows, in bfloat16, the first in the lower half.
            scales: Those of the rows.
            inverses: 1 / scales.

        Returns:
            Their bytes, the first one lowest.
        """
        return 0

    @always_inline
    def keep_block_scale(
        self, row: Int, block: Int, blocks: Int, scale: Float32
    ):
        """Stores a scale of columns of a row.

        Args:
            row: The row.
            block: Which columns: those of a box of the tile.
            blocks: How many blocks of columns there are.
            scale: The scale.
        """
        pass

    @always_inline
    def addend(self) -> Int:
        """Locates what is added.

        Returns:
            Its address.
        """
        return 0

    @always_inline
    def h(self) -> Int:
        """Locates h, which is stored in addition to c, or loaded where c is its gradient.

        Returns:
            Its address, 0 if it is not. Before a gate, its left half holds the gates.
        """
        return 0

    @always_inline
    def maxima(self) -> Int64:
        """Locates the largest magnitudes of c, in the format of op/passes/maxima.mojo.

        Returns:
            Their address, 0 if they are not kept.
        """
        return 0

    @always_inline
    def second_maxima(self) -> Int64:
        """Locates those of the gradient of what a gate multiplies, where it is a matrix of its own.

        Returns:
            Their address, 0 if it is the right half of c.
        """
        return 0

    @always_inline
    def has_one_maximum(self) -> Bool:
        """Tells whether that is one for all of a matrix.

        Returns:
            Whether it is.
        """
        return False

    @always_inline
    def a(self) -> Int:
        """Locates the activation, which is stored in addition to the gradient of its input.

        Returns:
            Its address, 0 if it is not.
        """
        return 0

    @always_inline
    def differentiated[
        width: Int
    ](
        self,
        da: SIMD[DType.float32, width],
        h: SIMD[DType.float32, width],
        up: SIMD[DType.float32, width],
    ) -> Gradients[width]:
        """Makes c of sums that are the gradient of an activation.

        Parameters:
            width: How many elements.

        Args:
            da: The sums.
            h: The activation's input; of a gate, the gates.
            up: What the gates are multiplied by; not used otherwise.

        Returns:
            The elements of c and of the activation, still to be rounded.
        """
        return {h, da, da}

    @always_inline
    def activation(self) -> Int32:
        """Tells which activation it applies, where it quantizes.

        Returns:
            Its number.
        """
        return NOTHING

    @always_inline
    def activated[
        width: Int, among: Int = ANY
    ](
        self, h: SIMD[DType.float32, width], other: SIMD[DType.float32, width]
    ) -> SIMD[DType.float32, width]:
        """Makes c of h.

        Parameters:
            width: How many elements.
            among: Which activations it may be.

        Args:
            h: Finished sums; before a gate, the gates.
            other: What the gates are multiplied by; not used otherwise.

        Returns:
            The elements of c, still to be rounded.
        """
        return h

    def vector[i: Int](self) -> Vector[Self.vector_dtype]:
        """Locates a vector.

        Parameters:
            i: Which one.

        Returns:
            Its first element, at a multiple of 16 bytes.
        """
        var none = 0
        return {unsafe_from_address = none}

    @always_inline
    def vector_of_part[
        i: Int
    ](self, part: Int, first: Int) -> Vector[Self.vector_dtype]:
        """Locates a vector of one of several matrices that stand side by side for c.

        Parameters:
            i: Which one.

        Args:
            part: Which matrix, 0 for the first or the only one.
            first: Columns of those before it.

        Returns:
            Its first element, at a multiple of 16 bytes.
        """
        return self.vector[i]().unsafe_offset(first)

    @staticmethod
    def vector_type(i: Int) -> DType:
        """Tells the type of a vector, where they differ.

        Args:
            i: Which one.

        Returns:
            Its type.
        """
        return Self.vector_dtype

    @always_inline
    def vector_address[
        i: Int
    ](self, part: Int, first: Int, column: Int, row: Int) -> Int:
        """Locates what a vector has for a column.

        Parameters:
            i: Which vector.

        Args:
            part: Which of several matrices, 0 for the only one.
            first: Columns of those before it.
            column: The column, of that matrix.
            row: The first row of a tile, all of which have the same vector.

        Returns:
            The address; 0 for the first column of all if the vector is lacking.
        """
        return Int(self.vector_of_part[i](part, first).unsafe_offset(column))

    @always_inline
    def row_terms(self, row: Int) -> RowTerms[]:
        """Loads the terms of a row, where no hook computes them in the kernel.

        Args:
            row: The row.

        Returns:
            Its terms.
        """
        return {1, 0}

    @always_inline
    def keep_row_sum(self, row: Int, tile: Int, sum: Float32):
        """Stores the sum of a row over the columns of a tile.

        Args:
            row: The row.
            tile: Which tile of the row.
            sum: The sum of what was finished.
        """
        pass

    @always_inline
    def weights[
        dtype: DType, width: Int
    ](
        self,
        sums: SIMD[dtype, width],
        column_terms: ColumnTerms[dtype, width, Self.vectors],
    ) -> SIMD[dtype, width]:
        """Finds what finished sums are multiplied by before they are stored.

        Parameters:
            dtype: Type of the sums.
            width: How many neighboring columns.

        Args:
            sums: The sums, before they are finished.
            column_terms: Elements of the vectors.

        Returns:
            Their weights.
        """
        return SIMD[dtype, width](1)

    def finish[
        dtype: DType, width: Int
    ](
        self,
        sums: SIMD[dtype, width],
        row_terms: RowTerms[dtype],
        column_terms: ColumnTerms[dtype, width, Self.vectors],
        row: Int,
        column: Int,
    ) -> SIMD[dtype, width]:
        """Finishes sums of one row.

        Parameters:
            dtype: Type of the sums.
            width: How many neighboring columns.

        Args:
            sums: The sums.
            row_terms: Terms of the row.
            column_terms: Elements of the vectors.
            row: The row.
            column: The first of the columns.

        Returns:
            The elements of c, still to be rounded.
        """
        ...
