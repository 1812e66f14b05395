"""A CPython extension: the passes over rows around products on the CPU, for one type of x per build.

Every function takes the address of a `Call` and returns 0. The caller validates, allocates and serves empty
tensors. C++ calls the same passes by the names passes_*.
"""

from std.os import abort
from std.python import PythonObject
from std.python.bindings import PythonModuleBuilder
from std.sys import get_defined_dtype

from op.call import Call, CallPointer
from op.entry import from_c, from_python, from_python_unlocked
from op.passes.cpu import CpuRunner
from op.passes.entry import Passes
from op.rotary.call import RotaryCall, RotaryPointer
from op.rotary.cpu import run_rotary

comptime DTYPE = get_defined_dtype["dtype", DType.float32]()

comptime LONG_ELEMENTS = 1 << 17
"""From this many elements on, other Python threads may run meanwhile."""

comptime _Passes = Passes[DTYPE, CpuRunner]


def _elements(call: Call) -> Int:
    return call.M * max(call.K, call.N)


def _rotary(call: RotaryPointer) raises:
    run_rotary[DTYPE](call[])


def _rotary_elements(call: RotaryCall) -> Int:
    return (call.units() + call.second_units()) * call.D


@export
def passes_plan_normalize(call: CallPointer) abi("C") -> Int:
    return from_c[_Passes.plan_normalize](call)


@export
def passes_normalize(call: CallPointer) abi("C") -> Int:
    return from_c[_Passes.normalize](call)


@export
def passes_plan_normalize_backward(call: CallPointer) abi("C") -> Int:
    return from_c[_Passes.plan_normalize_backward](call)


@export
def passes_normalize_backward(call: CallPointer) abi("C") -> Int:
    return from_c[_Passes.normalize_backward](call)


@export
def passes_activate(call: CallPointer) abi("C") -> Int:
    return from_c[_Passes.activate](call)


@export
def passes_plan_activate_backward(call: CallPointer) abi("C") -> Int:
    return from_c[_Passes.plan_activate_backward](call)


@export
def passes_activate_backward(call: CallPointer) abi("C") -> Int:
    return from_c[_Passes.activate_backward](call)


@export
def PyInit_passes_cpu() abi("C") -> PythonObject:
    try:
        var builder = PythonModuleBuilder("passes_cpu")
        builder.def_py_c_function(
            from_python[_Passes.plan_normalize], "plan_normalize"
        )
        builder.def_py_c_function(
            from_python_unlocked[_Passes.normalize, _elements, LONG_ELEMENTS],
            "normalize",
        )
        builder.def_py_c_function(
            from_python[_Passes.plan_normalize_backward],
            "plan_normalize_backward",
        )
        builder.def_py_c_function(
            from_python_unlocked[
                _Passes.normalize_backward, _elements, LONG_ELEMENTS
            ],
            "normalize_backward",
        )
        builder.def_py_c_function(
            from_python_unlocked[_Passes.activate, _elements, LONG_ELEMENTS],
            "activate",
        )
        builder.def_py_c_function(
            from_python[_Passes.plan_activate_backward],
            "plan_activate_backward",
        )
        builder.def_py_c_function(
            from_python_unlocked[
                _Passes.activate_backward, _elements, LONG_ELEMENTS
            ],
            "activate_backward",
        )
        builder.def_py_c_function(
            from_python_unlocked[_rotary, _rotary_elements, LONG_ELEMENTS],
            "rotary",
        )
        return builder.finalize()
    except e:
        abort(t"failed to create passes_cpu: {e}")
