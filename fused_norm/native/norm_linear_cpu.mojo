"""A CPython extension: norm + Linear on the CPU, for one element type per build.

Each function takes the address of a `Call`. The caller validates, allocates and serves empty tensors.
"""

from std.os import abort
from std.python import Python, PythonObject
from std.python._cpython import GILReleased, Py_ssize_t, PyObjectPtr
from std.python.bindings import PythonModuleBuilder
from std.sys import get_defined_dtype

from op.call import CallPointer
from op.norm_linear.cpu.backward import backward
from op.norm_linear.cpu.forward import forward
from op.norm_linear.cpu.plan import plan_backward, plan_forward
from op.python import Arguments, Values, integer

comptime DTYPE = get_defined_dtype["dtype", DType.float32]()

comptime LONG_PRODUCTS = 1 << 21
"""From so much work on, other Python threads may run meanwhile."""


def _door[
    run: def(CallPointer) thin -> None, may_be_long: Bool
](module: PyObjectPtr, values: Values, count: Py_ssize_t) abi(
    "C"
) -> PyObjectPtr:
    var arguments = Arguments(values)
    var call = CallPointer(unsafe_from_address=arguments.integer())
    comptime if may_be_long:
        if call[].M * call[].K * call[].N >= LONG_PRODUCTS:
            with GILReleased(Python()):
                run(call)
            return integer(0)
    run(call)
    return integer(0)


@export
def norm_linear_plan_forward(call: CallPointer) abi("C") -> Int:
    """Sets a forward's way and workspace, and returns 0."""
    plan_forward[DTYPE](call)
    return 0


@export
def norm_linear_forward(call: CallPointer) abi("C") -> Int:
    """Computes y, and mean and rstd where their address is given, and returns 0."""
    forward[DTYPE](call)
    return 0


@export
def norm_linear_plan_backward(call: CallPointer) abi("C") -> Int:
    """Sets a backward's way and workspace, and returns 0."""
    plan_backward[DTYPE](call)
    return 0


@export
def norm_linear_backward(call: CallPointer) abi("C") -> Int:
    """Computes the gradients whose address is given, and returns 0."""
    backward[DTYPE](call)
    return 0


@export
def PyInit_norm_linear_cpu() abi("C") -> PythonObject:
    try:
        var builder = PythonModuleBuilder("norm_linear_cpu")
        builder.def_py_c_function(
            _door[plan_forward[DTYPE], False],
            "plan_forward",
            docstring="plan_forward(call) -> 0; sets way and workspace_bytes",
        )
        builder.def_py_c_function(
            _door[forward[DTYPE], True],
            "forward",
            docstring="forward(call) -> 0; computes y, mean and rstd",
        )
        builder.def_py_c_function(
            _door[plan_backward[DTYPE], False],
            "plan_backward",
            docstring="plan_backward(call) -> 0; sets way and workspace_bytes",
        )
        builder.def_py_c_function(
            _door[backward[DTYPE], True],
            "backward",
            docstring="backward(call) -> 0; computes the gradients wanted",
        )
        return builder.finalize()
    except e:
        abort(t"failed to create norm_linear_cpu: {e}")
