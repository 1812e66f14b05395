"""A CPython extension: the ops of op/rows/op.mojo on a GPU, for one element type per build.

Each is a function of one argument, the address of a `RowCall`, and returns 0. Nothing is allocated and nothing
waits.
"""

from std.os import abort
from std.python import PythonObject
from std.python._cpython import Py_ssize_t, PyObjectPtr
from std.python.bindings import PythonModuleBuilder
from std.sys import get_defined_dtype

from op.device import Launcher, new_launcher
from op.python import Arguments, Values, failure, integer
from op.rows.op import OPS, RowCall, RowOp
from op.rows.op_gpu import launch_op

comptime DTYPE = get_defined_dtype["dtype", DType.float32]()


def run[
    Op: RowOp
](module: PyObjectPtr, values: Values, count: Py_ssize_t) abi(
    "C"
) -> PyObjectPtr:
    """Launches an op."""
    var arguments = Arguments(values)
    var call = RowCall.at(arguments.integer())
    try:
        launch_op[Op, DTYPE](Launcher.at(call.context)[].gpu, call)
    except error:
        return failure(error)
    return integer(0)


@export
def PyInit_rows_gpu() abi("C") -> PythonObject:
    try:
        var builder = PythonModuleBuilder("rows_gpu")
        builder.def_py_c_function(new_launcher, "new_launcher")
        comptime for i in range(OPS.length):
            builder.def_py_c_function(run[OPS[i]], OPS[i].name)
        return builder.finalize()
    except e:
        abort(t"failed to create rows_gpu: {e}")
