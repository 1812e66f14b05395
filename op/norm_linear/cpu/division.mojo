"""How forward and backward divide their work: whether rows are few, and how many threads pay off."""

from ...call import Call

comptime FEW_ROWS = 192
"""Up to this many rows, packing the weight into memory costs more than it saves."""

comptime SERIAL_PRODUCTS = 1 << 19
"""Products that one thread finishes sooner than a team would start."""

comptime SERIAL_WEIGHT = 1 << 16
"""Elements of a weight that one thread reads sooner."""


def workers(call: Call) -> Int:
    """Counts the threads that pay off for an amount of work.

    Args:
        call: The sizes, and how many threads there are.

    Returns:
        Threads that take tasks.
    """
    var weight = call.K * call.N
    var is_small = call.M * weight < SERIAL_PRODUCTS and weight < SERIAL_WEIGHT
    return 1 if is_small else call.threads
