"""What a matrix kernel takes beside its three matrices."""

from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder

from .row_pass import RowPass


@fieldwise_init
struct Arguments(DevicePassable, TrivialRegisterPassable):
    """Sizes of a product y = x @ w^T, and the vectors that go with it.

    What is not needed is null.
    """

    comptime device_type: AnyType = Self
    """What the kernel sees."""

    var m: Int32
    """Rows of x and y."""
    var n: Int32
    """Columns of y."""
    var k: Int32
    """Length of the sums."""
    var band: Int32
    """Rows of cluster tiles in a band of the walk; 0 to walk in runs."""
    var accumulate: Int32
    """Whether sums in float32 are added to what is there."""
    var follows: Int32
    """Whether the grid before this one makes sums that are added to y; this one
    then starts beside it. Only where blocks of a cluster split tiles."""
    var eps: Float32
    """Added to gathered variances."""
    var mean: Pointer[Float32, MutUntrackedOrigin]
    """Means of the rows of x [m], read or, if gathered, written."""
    var rstd: Pointer[Float32, MutUntrackedOrigin]
    """Reciprocal deviations of the rows [m], read or, if gathered, written."""
    var s: Pointer[Float32, ImmUntrackedOrigin]
    """Row sums of w [n]."""
    var c: Pointer[Float32, ImmUntrackedOrigin]
    """Constants of the columns [n]."""
    var bias: Int64
    """Address of constants of the columns [n] in y's type."""
    var wide: Pointer[Float32, MutUntrackedOrigin]
    """Y in float32 [m, n], or what is added to y."""
    var row_sums: Int64
    """Address of the sums of the rows of x [m], in y's type."""
    var wide_row_sums: Pointer[Float32, MutUntrackedOrigin]
    """What is added to those [m]."""
    var rows: RowPass
    """What becomes of the rows of y."""

    def __init__(out self, m: Int, n: Int, k: Int):
        """Names no vectors yet.

        Args:
            m: Rows of x and y.
            n: Columns of y.
            k: Length of the sums.
        """
        self.m = Int32(m)
        self.n = Int32(n)
        self.k = Int32(k)
        self.band = 0
        self.accumulate = 0
        self.follows = 0
        self.eps = 0
        var none = 0
        self.mean = {unsafe_from_address = none}
        self.rstd = {unsafe_from_address = none}
        self.s = {unsafe_from_address = none}
        self.c = {unsafe_from_address = none}
        self.bias = 0
        self.wide = {unsafe_from_address = none}
        self.row_sums = 0
        self.wide_row_sums = {unsafe_from_address = none}
        self.rows = RowPass()

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        """Returns the type's name for messages about kernel arguments.

        Returns:
            The name.
        """
        return "Arguments"
