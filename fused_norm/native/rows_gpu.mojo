"""A CPython extension: the ops of op/rows/op.mojo on a GPU, for one element type per build.

C++ calls rows_run, which launches any of them. Nothing is allocated and nothing blocks.
"""

from std.os import abort
from std.python import PythonObject
from std.python.bindings import PythonModuleBuilder
from std.sys import get_defined_dtype

from op.device import Launcher, new_launcher
from op.rows.op import OPS, RowCall
from op.rows.op_gpu import launch_op

comptime DTYPE = get_defined_dtype["dtype", DType.float32]()


@export
def rows_run(op: Int, address: Int) abi("C") -> Int:
    """Launches the op at a place of OPS.

    Args:
        op: The place.
        address: That of a `RowCall`.

    Returns:
        0, or 1 if it could not be launched.
    """
    var call = RowCall.at(address)
    try:
        comptime for i in range(OPS.length):
            if op == i:
                launch_op[OPS[i], DTYPE](Launcher.at(call.context)[].gpu, call)
                return 0
    except:
        pass
    return 1


@export
def PyInit_rows_gpu() abi("C") -> PythonObject:
    try:
        var builder = PythonModuleBuilder("rows_gpu")
        builder.def_py_c_function(new_launcher, "new_launcher")
        return builder.finalize()
    except e:
        abort(t"failed to create rows_gpu: {e}")
