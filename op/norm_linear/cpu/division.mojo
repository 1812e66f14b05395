"""How forward and backward divide their work: whether rows are few, and how many threads pay off."""

from ...call import Call
from ...gemm.cpu.few_rows_gradients import MOST_ROWS

comptime FEW_ROWS = 192
"""Up to this many rows, packing the weight into memory costs more than it saves."""

comptime SERIAL_PRODUCTS = 1 << 19
"""Products that one thread finishes sooner than a team would start."""

comptime SERIAL_WEIGHT = 1 << 16
"""Elements of a weight that one thread reads sooner."""


comptime SERIAL_GRADIENT = 1 << 17
"""Elements of a weight's gradient that one thread writes sooner than many; twice as many sooner than two, which save half of
the time at most. What the last call wrote is in the caches of several cores."""


def workers(call: Call) -> Int:
    """Counts the threads that pay off for an amount of work.

    Args:
        call: The sizes, and how many threads there are.

    Returns:
        Threads that take tasks.
    """
    var weight = call.K * call.N
    var is_small = call.M * weight < SERIAL_PRODUCTS and weight < SERIAL_WEIGHT
    if call.dweight != 0 and call.M <= MOST_ROWS:
        # Threads save all of the time but one part for each.
        is_small |= weight * (call.threads - 1) < SERIAL_GRADIENT * call.threads
    return 1 if is_small else call.threads
