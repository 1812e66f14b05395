"""How forward and backward divide their work: whether rows are few, and how many threads pay off."""

from ...call import Call

comptime FEW_ROWS = 192
"""Up to this many rows, packing the weight into memory costs more than it saves."""

comptime SERIAL_PRODUCTS = 1 << 19
"""Products that one thread finishes sooner than a team would start."""


def workers(call: Call) -> Int:
    """Counts the threads that pay off for an amount of work.

    Args:
        call: The sizes, and how many threads there are.

    Returns:
        Threads that take tasks.
    """
    return 1 if call.M * call.K * call.N < SERIAL_PRODUCTS else call.threads
