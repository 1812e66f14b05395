"""A CPython extension: the passes over rows around products on a GPU, for one type of x per build.

Every function but `new_launcher` takes the address of a `Call` and returns 0. Nothing is allocated and nothing
waits. C++ finds the same by the names passes_*.
"""

from std.os import abort
from std.python import PythonObject
from std.python._cpython import Py_ssize_t, PyObjectPtr
from std.python.bindings import PythonModuleBuilder
from std.sys import get_defined_dtype

from op.call import CallPointer
from op.device import Launcher, new_launcher
from op.rotary.call import RotaryPointer
from op.rotary.gpu import launch_rotary
from op.passes import passes
from op.passes.entry import from_c, from_python
from op.passes.gpu import GpuRunner
from op.python import Arguments, Values, failure, integer
from op.rows.operands import accumulator

comptime DTYPE = get_defined_dtype["dtype", DType.float32]()

comptime _Runner = GpuRunner[accumulator[DTYPE]()]


def _runner(call: CallPointer) -> _Runner:
    return _Runner(Launcher.at(call[].context)[].gpu)


def _plan_normalize(call: CallPointer) raises:
    passes.plan_normalize[DTYPE](call[])


def _normalize(call: CallPointer) raises:
    var runner = _runner(call)
    passes.normalize[DTYPE](runner, call[])


def _plan_normalize_backward(call: CallPointer) raises:
    passes.plan_normalize_backward[DTYPE](_runner(call), call[])


def _normalize_backward(call: CallPointer) raises:
    var runner = _runner(call)
    passes.normalize_backward[DTYPE](runner, call[])


def _activate(call: CallPointer) raises:
    var runner = _runner(call)
    passes.activate[DTYPE](runner, call[])


def _plan_activate_backward(call: CallPointer) raises:
    passes.plan_activate_backward[DTYPE](_runner(call), call[])


def _activate_backward(call: CallPointer) raises:
    var runner = _runner(call)
    passes.activate_backward[DTYPE](runner, call[])


def _rotary_from_python(
    module: PyObjectPtr, values: Values, count: Py_ssize_t
) abi("C") -> PyObjectPtr:
    """Launches what the address of a `RotaryCall` asks for."""
    var arguments = Arguments(values)
    var call = RotaryPointer(unsafe_from_address=arguments.integer())
    try:
        launch_rotary[DTYPE](Launcher.at(call[].context)[].gpu, call[])
    except error:
        return failure(error)
    return integer(0)


@export
def passes_plan_normalize(call: CallPointer) abi("C") -> Int:
    return from_c[_plan_normalize](call)


@export
def passes_normalize(call: CallPointer) abi("C") -> Int:
    return from_c[_normalize](call)


@export
def passes_plan_normalize_backward(call: CallPointer) abi("C") -> Int:
    return from_c[_plan_normalize_backward](call)


@export
def passes_normalize_backward(call: CallPointer) abi("C") -> Int:
    return from_c[_normalize_backward](call)


@export
def passes_activate(call: CallPointer) abi("C") -> Int:
    return from_c[_activate](call)


@export
def passes_plan_activate_backward(call: CallPointer) abi("C") -> Int:
    return from_c[_plan_activate_backward](call)


@export
def passes_activate_backward(call: CallPointer) abi("C") -> Int:
    return from_c[_activate_backward](call)


@export
def PyInit_passes_gpu() abi("C") -> PythonObject:
    try:
        var builder = PythonModuleBuilder("passes_gpu")
        builder.def_py_c_function(new_launcher, "new_launcher")
        builder.def_py_c_function(
            from_python[_plan_normalize], "plan_normalize"
        )
        builder.def_py_c_function(from_python[_normalize], "normalize")
        builder.def_py_c_function(
            from_python[_plan_normalize_backward], "plan_normalize_backward"
        )
        builder.def_py_c_function(
            from_python[_normalize_backward], "normalize_backward"
        )
        builder.def_py_c_function(from_python[_activate], "activate")
        builder.def_py_c_function(
            from_python[_plan_activate_backward], "plan_activate_backward"
        )
        builder.def_py_c_function(
            from_python[_activate_backward], "activate_backward"
        )
        builder.def_py_c_function(_rotary_from_python, "rotary")
        return builder.finalize()
    except e:
        abort(t"failed to create passes_gpu: {e}")
