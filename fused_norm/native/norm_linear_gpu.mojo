"""A CPython extension: what the backend of any GPU does around PyTorch's products, for one type of x per build.

Every function but `new_launcher` takes the address of a `Call` and returns 0. Nothing is allocated and nothing
waits. C++ finds the same by the names norm_linear_*.
"""

from std.os import abort
from std.python import PythonObject
from std.python.bindings import PythonModuleBuilder
from std.sys import get_defined_dtype

from op.call import CallPointer
from op.device import Launcher, new_launcher
from op.passes.door import from_c, from_python
from op.norm_linear.gpu import passes

comptime DTYPE = get_defined_dtype["dtype", DType.float32]()


def _plan_forward(call: CallPointer) raises:
    passes.plan_forward(call[])


def _forward(call: CallPointer) raises:
    passes.forward[DTYPE](Launcher.at(call[].context)[].gpu, call[])


def _plan_backward(call: CallPointer) raises:
    passes.plan_backward[DTYPE](Launcher.at(call[].context)[].gpu, call[])


def _backward(call: CallPointer) raises:
    passes.backward[DTYPE](Launcher.at(call[].context)[].gpu, call[])


@export
def norm_linear_plan_forward(call: CallPointer) abi("C") -> Int:
    return from_c[_plan_forward](call)


@export
def norm_linear_forward(call: CallPointer) abi("C") -> Int:
    return from_c[_forward](call)


@export
def norm_linear_plan_backward(call: CallPointer) abi("C") -> Int:
    return from_c[_plan_backward](call)


@export
def norm_linear_backward(call: CallPointer) abi("C") -> Int:
    return from_c[_backward](call)


@export
def PyInit_norm_linear_gpu() abi("C") -> PythonObject:
    try:
        var builder = PythonModuleBuilder("norm_linear_gpu")
        builder.def_py_c_function(new_launcher, "new_launcher")
        builder.def_py_c_function(from_python[_plan_forward], "plan_forward")
        builder.def_py_c_function(from_python[_forward], "forward")
        builder.def_py_c_function(from_python[_plan_backward], "plan_backward")
        builder.def_py_c_function(from_python[_backward], "backward")
        return builder.finalize()
    except e:
        abort(t"failed to create norm_linear_gpu: {e}")
