"""The compile-time shape of a GPU kernel for rows."""


@fieldwise_init
struct Shape(TrivialRegisterPassable):
    """The compile-time shape of a kernel: who works on a row, and what a thread holds of it."""

    var width: Int
    """Elements of one load."""
    var tile: Int
    """Loads of a thread that are in flight together, per input."""
    var whole_block: Bool
    """Whether a block works on a row, or each warp on its own."""
    var resident: Bool
    """Whether the row stays in registers: it has at most tile * width elements a thread."""
    var persistent: Bool
    """Whether blocks go on to further rows."""
    var threads: Int
    """The most threads of a block."""
    var blocks: Int
    """How many such blocks must fit into the registers of an SM."""
