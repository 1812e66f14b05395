"""A CPython extension: the ops of op/rows/op.mojo on the CPU, for one element type per build.

Each is a function of one argument, the address of a `RowCall`, and returns 0.
"""

from std.os import abort
from std.python import Python, PythonObject
from std.python._cpython import GILReleased, Py_ssize_t, PyObjectPtr
from std.python.bindings import PythonModuleBuilder
from std.sys import get_defined_dtype

from op.python import Arguments, Values, integer
from op.rows.op import OPS, RowCall, RowOp
from op.rows.op_cpu import run_op
from op.team import Team

comptime DTYPE = get_defined_dtype["dtype", DType.float32]()

comptime LONG_ELEMENTS = 1 << 17
"""From so many elements on, other Python threads may run meanwhile."""


def run[
    Op: RowOp
](module: PyObjectPtr, values: Values, count: Py_ssize_t) abi(
    "C"
) -> PyObjectPtr:
    """Runs an op."""
    var arguments = Arguments(values)
    var call = RowCall.at(arguments.integer())
    var team = Team(call.context, call.threads)
    if call.M * call.K >= LONG_ELEMENTS:
        with GILReleased(Python()):
            run_op[Op, DTYPE](team, call)
    else:
        run_op[Op, DTYPE](team, call)
    return integer(0)


@export
def PyInit_rows_cpu() abi("C") -> PythonObject:
    try:
        var builder = PythonModuleBuilder("rows_cpu")
        comptime for i in range(OPS.length):
            builder.def_py_c_function(run[OPS[i]], OPS[i].name)
        return builder.finalize()
    except e:
        abort(t"failed to create rows_cpu: {e}")
