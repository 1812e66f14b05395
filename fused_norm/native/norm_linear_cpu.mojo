"""A CPython extension: norm + Linear on the CPU, for one element type per build.

Each function takes the address of a `Call`. The caller validates, allocates and serves empty tensors.
"""

from std.os import abort
from std.python import PythonObject
from std.python.bindings import PythonModuleBuilder
from std.sys import get_defined_dtype

from op.call import Call, CallPointer
from op.entry import from_python, from_python_unlocked
from op.norm_linear.cpu.backward import backward
from op.norm_linear.cpu.forward import forward
from op.norm_linear.cpu.plan import plan_backward, plan_forward

comptime DTYPE = get_defined_dtype["dtype", DType.float32]()

comptime LONG_PRODUCTS = 1 << 21
"""From this many multiply-additions on, other Python threads may run meanwhile."""


def _products(call: Call) -> Int:
    return call.M * call.K * call.N


@export
def norm_linear_plan_forward(call: CallPointer) abi("C") -> Int:
    """Sets a forward's strategy and workspace, and returns 0."""
    plan_forward[DTYPE](call)
    return 0


@export
def norm_linear_forward(call: CallPointer) abi("C") -> Int:
    """Computes y, and mean and rstd where their address is given, and returns 0."""
    forward[DTYPE](call)
    return 0


@export
def norm_linear_plan_backward(call: CallPointer) abi("C") -> Int:
    """Sets a backward's strategy and workspace, and returns 0."""
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
            from_python[plan_forward[DTYPE]],
            "plan_forward",
            docstring="plan_forward(call) -> 0; sets strategy and workspace_bytes",
        )
        builder.def_py_c_function(
            from_python_unlocked[forward[DTYPE], _products, LONG_PRODUCTS],
            "forward",
            docstring="forward(call) -> 0; computes y, mean and rstd",
        )
        builder.def_py_c_function(
            from_python[plan_backward[DTYPE]],
            "plan_backward",
            docstring="plan_backward(call) -> 0; sets strategy and workspace_bytes",
        )
        builder.def_py_c_function(
            from_python_unlocked[backward[DTYPE], _products, LONG_PRODUCTS],
            "backward",
            docstring="backward(call) -> 0; computes the gradients wanted",
        )
        return builder.finalize()
    except e:
        abort(t"failed to create norm_linear_cpu: {e}")
