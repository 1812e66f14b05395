"""Turns a step's kernel into a function for Python."""

from std.os import abort
from std.python import PythonObject
from std.python._cpython import Py_ssize_t, PyObjectPtr
from std.python.bindings import PythonModuleBuilder

from op.device import Gpu, Launcher, new_launcher
from op.python import Arguments, Values, failure, integer


@fieldwise_init
struct Task(TrivialRegisterPassable):
    """A product c = a b^T, and what goes with it; addresses of dense row-major tensors in bfloat16.

    Addresses are multiples of 16, sizes are at least 1, N and K are multiples of 8.
    """

    var c: Int
    """Address of c [M, N]."""
    var a: Int
    """Address of a [M, K]."""
    var b: Int
    """Address of b [N, K]."""
    var m: Int
    """Rows of a and c."""
    var n: Int
    """Rows of b, columns of c."""
    var k: Int
    """Length of the sums."""


comptime Launch = def(Gpu, Task) raises thin -> None
"""Queues the kernel of a step."""


def product[
    launch: Launch
](module: PyObjectPtr, values: Values, count: Py_ssize_t) abi(
    "C"
) -> PyObjectPtr:
    """Is `product(launcher, c, a, b, m, n, k)` for Python: queues the kernel and returns 0, or raises a RuntimeError.

    Parameters:
        launch: Queues it.

    Args:
        module: The extension.
        values: Seven integers.
        count: 7.

    Returns:
        The integer 0.
    """
    var arguments = Arguments(values)
    ref gpu = Launcher.at(arguments.integer())[].gpu
    var c = arguments.integer()
    var a = arguments.integer()
    var b = arguments.integer()
    var m = arguments.integer()
    var n = arguments.integer()
    var k = arguments.integer()
    try:
        launch(gpu, Task(c, a, b, m, n, k))
    except error:
        return failure(error)
    return integer(0)


def new_module[name: StaticString, launch: Launch]() -> PythonObject:
    """Makes the extension of a step that multiplies.

    Parameters:
        name: Of the file.
        launch: Queues its kernel.

    Returns:
        The module.
    """
    try:
        var builder = PythonModuleBuilder(name)
        builder.def_py_c_function(new_launcher, "new_launcher")
        builder.def_py_c_function(product[launch], "product")
        return builder.finalize()
    except e:
        abort(t"failed to create {name}: {e}")
