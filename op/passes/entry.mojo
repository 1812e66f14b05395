"""Entry points: a pass as a function of C, and as one of Python. Both take the address of a `Call`."""

from std.python._cpython import Py_ssize_t, PyObjectPtr

from ..call import CallPointer
from ..python import Arguments, Values, failure, integer

comptime Pass = def(CallPointer) raises thin -> None
"""Plans or runs a pass of the call."""


def from_python[
    does: Pass
](module: PyObjectPtr, values: Values, count: Py_ssize_t) abi(
    "C"
) -> PyObjectPtr:
    """Runs a pass as a function to register with `def_py_c_function`: returns 0, or raises a RuntimeError.

    Parameters:
        does: The pass.

    Args:
        module: The extension.
        values: One integer, the address of a call.
        count: 1.

    Returns:
        The integer 0.
    """
    var arguments = Arguments(values)
    try:
        does(CallPointer(unsafe_from_address=arguments.integer()))
    except error:
        return failure(error)
    return integer(0)


def from_c[does: Pass](call: CallPointer) -> Int:
    """Runs a pass as the body of an exported function.

    Parameters:
        does: The pass.

    Args:
        call: The call.

    Returns:
        0 if nothing failed.
    """
    try:
        does(call)
    except:
        return 1
    return 0
