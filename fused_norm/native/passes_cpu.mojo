"""A CPython extension: the passes over rows around products on the CPU, for one type of x per build.

Every function takes the address of a `Call` and returns 0. The caller validates, allocates and serves empty
tensors. C++ finds the same by the names passes_*.
"""

from std.os import abort
from std.python import Python, PythonObject
from std.python._cpython import GILReleased, Py_ssize_t, PyObjectPtr
from std.python.bindings import PythonModuleBuilder
from std.sys import get_defined_dtype

from op.call import CallPointer
from op.rotary.call import RotaryPointer
from op.rotary.cpu import run_rotary
from op.passes import passes
from op.passes.cpu import CpuRunner
from op.passes.entry import Pass, from_c, from_python
from op.python import Arguments, Values, failure, integer
from op.team import Team

comptime DTYPE = get_defined_dtype["dtype", DType.float32]()

comptime LONG_ELEMENTS = 1 << 17
"""From this many elements on, other Python threads may run meanwhile."""


def _runner(call: CallPointer) -> CpuRunner:
    return CpuRunner(Team(call[].context, call[].threads))


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


def _long_from_python[
    does: Pass
](module: PyObjectPtr, values: Values, count: Py_ssize_t) abi(
    "C"
) -> PyObjectPtr:
    """Lets other Python threads run meanwhile, where that is worth it."""
    var arguments = Arguments(values)
    var call = CallPointer(unsafe_from_address=arguments.integer())
    if call[].M * max(call[].K, call[].N) < LONG_ELEMENTS:
        return from_python[does](module, values, count)
    var status: Int
    with GILReleased(Python()):
        status = from_c[does](call)
    if status != 0:
        return failure(Error("the pass failed"))
    return integer(0)


def _rotary_from_python(
    module: PyObjectPtr, values: Values, count: Py_ssize_t
) abi("C") -> PyObjectPtr:
    """Runs what the address of a `RotaryCall` asks for; other Python threads may run meanwhile."""
    var arguments = Arguments(values)
    var call = RotaryPointer(unsafe_from_address=arguments.integer())
    if call[].units() * call[].D < LONG_ELEMENTS:
        run_rotary[DTYPE](call[])
        return integer(0)
    with GILReleased(Python()):
        run_rotary[DTYPE](call[])
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
def PyInit_passes_cpu() abi("C") -> PythonObject:
    try:
        var builder = PythonModuleBuilder("passes_cpu")
        builder.def_py_c_function(
            from_python[_plan_normalize], "plan_normalize"
        )
        builder.def_py_c_function(_long_from_python[_normalize], "normalize")
        builder.def_py_c_function(
            from_python[_plan_normalize_backward], "plan_normalize_backward"
        )
        builder.def_py_c_function(
            _long_from_python[_normalize_backward], "normalize_backward"
        )
        builder.def_py_c_function(_long_from_python[_activate], "activate")
        builder.def_py_c_function(
            from_python[_plan_activate_backward], "plan_activate_backward"
        )
        builder.def_py_c_function(
            _long_from_python[_activate_backward], "activate_backward"
        )
        builder.def_py_c_function(_rotary_from_python, "rotary")
        return builder.finalize()
    except e:
        abort(t"failed to create passes_cpu: {e}")
