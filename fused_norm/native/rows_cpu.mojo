"""A CPython extension: the ops that are row programs, on the CPU, for one element type per build.

Tensors are dense and given by address; 0 stands for what is not wanted. `threads` is how many to use, and
`gomp_parallel` the address of that function in PyTorch's libgomp, or 0. With `accumulate`, an op adds to its
outputs instead of overwriting them; `o_float32` says that o is float32 whatever the element type.
"""

from std.os import abort
from std.python import Python, PythonObject
from std.python._cpython import GILReleased, Py_ssize_t, PyObjectPtr
from std.python.bindings import PythonModuleBuilder
from std.sys import get_defined_dtype

from op.python import Arguments, Values, failure, integer
from op.rows import ops
from op.rows.cpu import Cpu
from op.rows.operands import Operands, RowTarget, accumulator
from op.rows.program import RowProgram
from op.team import Team

comptime DTYPE = get_defined_dtype["dtype", DType.float32]()

comptime LONG_ELEMENTS = 1 << 17
"""From so many elements on, other Python threads may run meanwhile."""


@fieldwise_init
struct PythonCpu(RowTarget):
    """The CPU, called from Python: long work runs without the interpreter's lock."""

    var cpu: Cpu

    def run[
        P: RowProgram, dtype: DType, ftype: DType
    ](self, operands: Operands[accumulator[dtype]()]) raises:
        """Takes all rows through a program without columns."""
        if Int(operands.rows) * Int(operands.length) >= LONG_ELEMENTS:
            with GILReleased(Python()):
                self.cpu.run[P, dtype, ftype](operands)
        else:
            self.cpu.run[P, dtype, ftype](operands)

    def add_up[
        accum: DType, dtype: DType
    ](self, terms: Int64, count: Int, output: Int64, accumulate: Bool) raises:
        """Sums a vector in a fixed order."""
        self.cpu.add_up[accum, dtype](terms, count, output, accumulate)


def _cpu(mut arguments: Arguments) -> PythonCpu:
    var threads = arguments.integer()
    return PythonCpu(Cpu(Team(arguments.integer(), threads)))


def trainable_eps_forward(
    module: PyObjectPtr, values: Values, count: Py_ssize_t
) abi("C") -> PyObjectPtr:
    """Computes y[M, K] from x[M, K] and the scalar o."""
    var arguments = Arguments(values)
    var y = arguments.address()
    var x = arguments.address()
    var o = arguments.address()
    var M = arguments.integer()
    var K = arguments.integer()
    var o_float32 = arguments.integer() != 0
    try:
        ops.trainable_eps_forward[DTYPE](
            _cpu(arguments), y, x, o, M, K, o_float32
        )
    except error:
        return failure(error)
    return integer(0)


def trainable_eps_backward(
    module: PyObjectPtr, values: Values, count: Py_ssize_t
) abi("C") -> PyObjectPtr:
    """Computes dx[M, K] and do[1] from dy[M, K], x[M, K] and o; `workspace` holds M numbers if do is wanted."""
    var arguments = Arguments(values)
    var dx = arguments.address()
    var do = arguments.address()
    var dy = arguments.address()
    var x = arguments.address()
    var o = arguments.address()
    var workspace = arguments.address()
    var M = arguments.integer()
    var K = arguments.integer()
    var o_float32 = arguments.integer() != 0
    var accumulate = arguments.integer() != 0
    try:
        ops.trainable_eps_backward[DTYPE](
            _cpu(arguments),
            dx,
            do,
            dy,
            x,
            o,
            workspace,
            M,
            K,
            o_float32,
            accumulate,
        )
    except error:
        return failure(error)
    return integer(0)


def mean(
    module: PyObjectPtr, values: Values, count: Py_ssize_t
) abi("C") -> PyObjectPtr:
    """Computes y[M, K] = x - mean(x)."""
    var arguments = Arguments(values)
    var y = arguments.address()
    var x = arguments.address()
    var M = arguments.integer()
    var K = arguments.integer()
    var accumulate = arguments.integer() != 0
    try:
        ops.mean[DTYPE](_cpu(arguments), y, x, M, K, accumulate)
    except error:
        return failure(error)
    return integer(0)


def norm_forward(
    module: PyObjectPtr, values: Values, count: Py_ssize_t
) abi("C") -> PyObjectPtr:
    """Computes y[M, K] = sqrt(mean(v v))."""
    var arguments = Arguments(values)
    var y = arguments.address()
    var v = arguments.address()
    var M = arguments.integer()
    var K = arguments.integer()
    try:
        ops.norm_forward[DTYPE](_cpu(arguments), y, v, M, K)
    except error:
        return failure(error)
    return integer(0)


def norm_backward(
    module: PyObjectPtr, values: Values, count: Py_ssize_t
) abi("C") -> PyObjectPtr:
    """Computes dv[M, K] from dy[M, K] and v[M, K]."""
    var arguments = Arguments(values)
    var dv = arguments.address()
    var dy = arguments.address()
    var v = arguments.address()
    var M = arguments.integer()
    var K = arguments.integer()
    var accumulate = arguments.integer() != 0
    try:
        ops.norm_backward[DTYPE](_cpu(arguments), dv, dy, v, M, K, accumulate)
    except error:
        return failure(error)
    return integer(0)


def div_forward(
    module: PyObjectPtr, values: Values, count: Py_ssize_t
) abi("C") -> PyObjectPtr:
    """Computes y[M, K] = a / b."""
    var arguments = Arguments(values)
    var y = arguments.address()
    var a = arguments.address()
    var b = arguments.address()
    var M = arguments.integer()
    var K = arguments.integer()
    try:
        ops.div_forward[DTYPE](_cpu(arguments), y, a, b, M, K)
    except error:
        return failure(error)
    return integer(0)


def div_backward(
    module: PyObjectPtr, values: Values, count: Py_ssize_t
) abi("C") -> PyObjectPtr:
    """Computes da[M, K] and db[M, K] from dy[M, K], a[M, K] and b[M, K]."""
    var arguments = Arguments(values)
    var da = arguments.address()
    var db = arguments.address()
    var dy = arguments.address()
    var a = arguments.address()
    var b = arguments.address()
    var M = arguments.integer()
    var K = arguments.integer()
    var accumulate = arguments.integer() != 0
    try:
        ops.div_backward[DTYPE](
            _cpu(arguments), da, db, dy, a, b, M, K, accumulate
        )
    except error:
        return failure(error)
    return integer(0)


@export
def PyInit_rows_cpu() abi("C") -> PythonObject:
    try:
        var builder = PythonModuleBuilder("rows_cpu")
        builder.def_py_c_function(
            trainable_eps_forward,
            "trainable_eps_forward",
            docstring=(
                "trainable_eps_forward(y, x, o, M, K, o_float32, threads,"
                " gomp_parallel) -> 0"
            ),
        )
        builder.def_py_c_function(
            trainable_eps_backward,
            "trainable_eps_backward",
            docstring=(
                "trainable_eps_backward(dx, do, dy, x, o, workspace, M, K,"
                " o_float32, accumulate, threads, gomp_parallel) -> 0"
            ),
        )
        builder.def_py_c_function(
            mean,
            "mean",
            docstring=(
                "mean(y, x, M, K, accumulate, threads, gomp_parallel) -> 0"
            ),
        )
        builder.def_py_c_function(
            norm_forward,
            "norm_forward",
            docstring="norm_forward(y, v, M, K, threads, gomp_parallel) -> 0",
        )
        builder.def_py_c_function(
            norm_backward,
            "norm_backward",
            docstring=(
                "norm_backward(dv, dy, v, M, K, accumulate, threads,"
                " gomp_parallel) -> 0"
            ),
        )
        builder.def_py_c_function(
            div_forward,
            "div_forward",
            docstring="div_forward(y, a, b, M, K, threads, gomp_parallel) -> 0",
        )
        builder.def_py_c_function(
            div_backward,
            "div_backward",
            docstring=(
                "div_backward(da, db, dy, a, b, M, K, accumulate, threads,"
                " gomp_parallel) -> 0"
            ),
        )
        return builder.finalize()
    except e:
        abort(t"failed to create rows_cpu: {e}")
