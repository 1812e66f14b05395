"""A CPython extension: the passes over rows around products on a GPU, for one type of x per build.

Every function but `new_launcher` takes the address of a `Call` and returns 0. Nothing is allocated and nothing
blocks. C++ calls the same passes by the names passes_*.
"""

from std.os import abort
from std.python import PythonObject
from std.python.bindings import PythonModuleBuilder
from std.sys import get_defined_dtype

from op.call import CallPointer
from op.device import Launcher, new_launcher
from op.entry import from_c, from_python
from op.passes.entry import Passes
from op.passes.gpu import GpuRunner
from op.rotary.call import RotaryPointer
from op.rotary.gpu import launch_rotary
from op.rows.operands import accumulator

comptime DTYPE = get_defined_dtype["dtype", DType.float32]()

comptime _Passes = Passes[DTYPE, GpuRunner[accumulator[DTYPE]()]]


def _rotary(call: RotaryPointer) raises:
    launch_rotary[DTYPE](Launcher.at(call[].context)[].gpu, call[])


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
def PyInit_passes_gpu() abi("C") -> PythonObject:
    try:
        var builder = PythonModuleBuilder("passes_gpu")
        builder.def_py_c_function(new_launcher, "new_launcher")
        builder.def_py_c_function(
            from_python[_Passes.plan_normalize], "plan_normalize"
        )
        builder.def_py_c_function(from_python[_Passes.normalize], "normalize")
        builder.def_py_c_function(
            from_python[_Passes.plan_normalize_backward],
            "plan_normalize_backward",
        )
        builder.def_py_c_function(
            from_python[_Passes.normalize_backward], "normalize_backward"
        )
        builder.def_py_c_function(from_python[_Passes.activate], "activate")
        builder.def_py_c_function(
            from_python[_Passes.plan_activate_backward],
            "plan_activate_backward",
        )
        builder.def_py_c_function(
            from_python[_Passes.activate_backward], "activate_backward"
        )
        builder.def_py_c_function(from_python[_rotary], "rotary")
        return builder.finalize()
    except e:
        abort(t"failed to create passes_gpu: {e}")
