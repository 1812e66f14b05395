"""A CPython extension: the ops of op/rows/op.mojo on the CPU, for one element type per build.

C++ calls rows_run, which runs any of them.
"""

from std.os import abort
from std.python import PythonObject
from std.python.bindings import PythonModuleBuilder
from std.sys import get_defined_dtype

from op.rows.op import OPS, RowCall
from op.rows.op_cpu import run_op
from op.team import Team

comptime DTYPE = get_defined_dtype["dtype", DType.float32]()


@export
def rows_run(op: Int, address: Int) abi("C") -> Int:
    """Runs the op at a place of OPS.

    Args:
        op: The place.
        address: That of a `RowCall`.

    Returns:
        0, or 1 if there is none.
    """
    var call = RowCall.at(address)
    comptime for i in range(OPS.length):
        if op == i:
            run_op[OPS[i], DTYPE](Team(call.context, call.threads), call)
            return 0
    return 1


@export
def PyInit_rows_cpu() abi("C") -> PythonObject:
    try:
        var builder = PythonModuleBuilder("rows_cpu")
        return builder.finalize()
    except e:
        abort(t"failed to create rows_cpu: {e}")
