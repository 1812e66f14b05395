"""The tensors of a row program, by address, and the type that it computes in."""

from std.utils import StaticTuple

from ..argument import KernelArgument

comptime MAX_TENSORS = 4
"""The most tensors of one kind."""

comptime Addresses = StaticTuple[Int64, MAX_TENSORS]
"""Addresses of the tensors of one kind; 0 where there is none."""


def accumulator[dtype: DType]() -> DType:
    """Returns the type to compute in: float32, and float64 for float64.

    Parameters:
        dtype: The type of the tensors.

    Returns:
        The type of sums and statistics.
    """
    return DType.float64 if dtype == DType.float64 else DType.float32


# Not passable in registers: the compiler damages structs of many fields that functions pass to each other.
@fieldwise_init
struct Operands[accum: DType](ImplicitlyCopyable, KernelArgument, Movable):
    """The tensors of a row program by address, all of them dense.

    Inputs and outputs are [M, K] in the program's dtype, features are [groups, K], and what is saved or results
    is [M] in the accumulator's type. A missing feature stands for the value in `absent`; a missing output or
    result is not stored. Each of the groups has the same number of rows, and a vector of each feature.

    Parameters:
        accum: The type computed in.
    """

    var rows: Int64
    """The number of rows of a group."""
    var groups: Int32
    """The number of groups."""
    var length: Int32
    """The number of elements K of a row."""
    var inputs: Addresses
    """Tensors [M, K] to read."""
    var features: Addresses
    """Vectors [groups, K] to read, the same for all rows of a group."""
    var feature_pitch: Int64
    """Elements from the features of one group to those of the next."""
    var offset: Scalar[Self.accum]
    """Added to the first feature."""
    var absent: StaticTuple[Float32, MAX_TENSORS]
    """What a missing feature stands for."""
    var saved: Addresses
    """Vectors [M] to read, one number a row."""
    var outputs: Addresses
    """Tensors [M, K] to write."""
    var narrow: Int32
    """Type of outputs that may be narrower than float32 inputs: FLOAT32, BFLOAT16 or FLOAT16 of types.mojo."""
    var residual: Int64
    """Tensor [M, K] added to the first input before all else; the sum is rounded to its type."""
    var sum: Int64
    """Where that sum goes."""
    var addend: Int64
    """Tensor [M, K] added to the first output before it is rounded."""
    var accumulate: Bool
    """The primed form, of programs that have one: adds to the outputs instead of overwriting them."""
    var results: Addresses
    """Vectors [M] to write, one number a row."""
    var column_sums: Int64
    """Workspace [columns, groups, parts, K] for partial sums over the rows; 0 where none is wanted."""
    var n: Scalar[Self.accum]
    """K in the type computed in."""
    var inverse_n: Scalar[Self.accum]
    """1 / K."""
    var number: Scalar[Self.accum]
    """The stages' `Row.number`."""
    var kind: Int32
    """The stages' `Row.kind`."""
    var parameter: Int64
    """Address of a 1-element tensor, the stages' `Row.parameter`."""
    var parameter_is_float32: Bool
    """Whether that tensor is float32, whatever the program's dtype."""

    def __init__(out self, rows: Int, length: Int, groups: Int = 1):
        """Names no tensors yet.

        Args:
            rows: The number of rows, a multiple of the number of groups.
            length: The number of elements of a row.
            groups: The number of groups, at least 1.
        """
        self.rows = Int64(rows // groups)
        self.groups = Int32(groups)
        self.length = Int32(length)
        self.inputs = Addresses(fill=0)
        self.features = Addresses(fill=0)
        self.feature_pitch = Int64(length)
        self.absent = StaticTuple[Float32, MAX_TENSORS](fill=0)
        self.offset = 0
        self.saved = Addresses(fill=0)
        self.outputs = Addresses(fill=0)
        self.narrow = 0
        self.residual = 0
        self.sum = 0
        self.addend = 0
        self.accumulate = False
        self.results = Addresses(fill=0)
        self.column_sums = 0
        self.n = Scalar[Self.accum](length)
        self.inverse_n = 1 / self.n
        self.number = 0
        self.kind = 0
        self.parameter = 0
        self.parameter_is_float32 = False


@fieldwise_init
struct Sums(TrivialRegisterPassable):
    """Where a program's sums over rows go."""

    var outputs: Addresses
    """Vectors [groups, K] to write, one for each column; 0 where it is not wanted."""
    var type: Int32
    """Their type, a number of types.mojo."""

    def any(self) -> Bool:
        """Returns whether any is wanted.

        Returns:
            Whether there is an address that is not 0.
        """
        var found = Int64(0)
        comptime for i in range(MAX_TENSORS):
            found |= self.outputs[i]
        return found != 0
