"""Arguments and results of functions that Python calls, through CPython's C API alone.

Converting an argument to a `PythonObject` takes a tenth of a microsecond, too long for kernels of several arguments.
Functions registered with `def_py_c_function` take CPython's vector of arguments and return a new reference.
"""

from std.python import Python
from std.python._cpython import PyObjectPtr

comptime Values = Pointer[PyObjectPtr, MutUntrackedOrigin]
"""The arguments of a call as CPython passes them."""


@fieldwise_init
struct Arguments(Movable):
    """Reads the arguments of a call one after the other."""

    var values: Values
    """All of them."""
    var next: Int
    """Which is next."""

    def __init__(out self, values: Values):
        """Starts with the first argument.

        Args:
            values: The arguments as CPython passes them.
        """
        self.values = values
        self.next = 0

    def _take(mut self) -> PyObjectPtr:
        self.next += 1
        return self.values.unsafe_offset(self.next - 1)[]

    def integer(mut self) -> Int:
        """Reads an integer, or a bool.

        Returns:
            Its value.
        """
        return Int(Python().cpython().PyLong_AsSsize_t(self._take()))

    def address(mut self) -> Int64:
        """Reads an address.

        Returns:
            Its value.
        """
        return Int64(self.integer())

    def number(mut self) -> Float64:
        """Reads a float.

        Returns:
            Its value.
        """
        return Float64(Python().cpython().PyFloat_AsDouble(self._take()))


def integer(value: Int) -> PyObjectPtr:
    """Makes the result of a call.

    Args:
        value: The result.

    Returns:
        A new reference to it.
    """
    return Python().cpython().PyLong_FromSsize_t(value)


def failure(error: Error) -> PyObjectPtr:
    """Makes a call raise a RuntimeError.

    Args:
        error: What happened.

    Returns:
        What the call has to return.
    """
    ref cpython = Python().cpython()
    var text = String(error)
    cpython.PyErr_SetString(
        cpython.get_error_global("PyExc_RuntimeError"),
        text.as_c_string_span().ptr().unsafe_origin_cast[ImmutAnyOrigin](),
    )
    return PyObjectPtr()
