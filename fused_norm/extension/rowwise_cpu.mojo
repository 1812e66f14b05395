"""A CPython extension: the ops that are row programs, on the CPU, for one element type per build.

Tensors are dense and given by address; 0 stands for what is not wanted. `threads` is how many to use, and
`gomp_parallel` the address of that function in PyTorch's libgomp, or 0. With `accumulate`, an op adds to its
outputs instead of overwriting them; `o_float32` says that o is float32 whatever the element type.
"""

from std.os import abort
from std.python import Python, PythonObject
from std.python._cpython import GILReleased
from std.python.bindings import PythonModuleBuilder
from std.sys import get_defined_dtype

from op.rowwise import ops
from op.rowwise.cpu import Cpu
from op.rowwise.operands import Operands, RowTarget, accumulator
from op.rowwise.program import RowProgram
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


def _address(value: PythonObject) raises -> Int64:
    return Int64(Int(py=value))


def _cpu(
    threads: PythonObject, gomp_parallel: PythonObject
) raises -> PythonCpu:
    return PythonCpu(Cpu(Team(Int(py=gomp_parallel), Int(py=threads))))


def trainable_eps_forward(
    y: PythonObject,
    x: PythonObject,
    o: PythonObject,
    M: PythonObject,
    K: PythonObject,
    o_float32: PythonObject,
    threads: PythonObject,
    gomp_parallel: PythonObject,
) raises -> PythonObject:
    """Computes y[M, K] from x[M, K] and the scalar o."""
    ops.trainable_eps_forward[DTYPE](
        _cpu(threads, gomp_parallel),
        _address(y),
        _address(x),
        _address(o),
        Int(py=M),
        Int(py=K),
        Bool(py=o_float32),
    )
    return PythonObject(None)


def trainable_eps_backward(
    dx: PythonObject,
    do: PythonObject,
    dy: PythonObject,
    x: PythonObject,
    o: PythonObject,
    workspace: PythonObject,
    M: PythonObject,
    K: PythonObject,
    o_float32: PythonObject,
    accumulate: PythonObject,
    threads: PythonObject,
    gomp_parallel: PythonObject,
) raises -> PythonObject:
    """Computes dx[M, K] and do[1] from dy[M, K], x[M, K] and o; `workspace` holds M numbers if do is wanted."""
    ops.trainable_eps_backward[DTYPE](
        _cpu(threads, gomp_parallel),
        _address(dx),
        _address(do),
        _address(dy),
        _address(x),
        _address(o),
        _address(workspace),
        Int(py=M),
        Int(py=K),
        Bool(py=o_float32),
        Bool(py=accumulate),
    )
    return PythonObject(None)


def mean(
    y: PythonObject,
    x: PythonObject,
    M: PythonObject,
    K: PythonObject,
    accumulate: PythonObject,
    threads: PythonObject,
    gomp_parallel: PythonObject,
) raises -> PythonObject:
    """Computes y[M, K] = x - mean(x)."""
    ops.mean[DTYPE](
        _cpu(threads, gomp_parallel),
        _address(y),
        _address(x),
        Int(py=M),
        Int(py=K),
        Bool(py=accumulate),
    )
    return PythonObject(None)


def norm_forward(
    y: PythonObject,
    v: PythonObject,
    M: PythonObject,
    K: PythonObject,
    threads: PythonObject,
    gomp_parallel: PythonObject,
) raises -> PythonObject:
    """Computes y[M, K] = sqrt(mean(v v))."""
    ops.norm_forward[DTYPE](
        _cpu(threads, gomp_parallel),
        _address(y),
        _address(v),
        Int(py=M),
        Int(py=K),
    )
    return PythonObject(None)


def norm_backward(
    dv: PythonObject,
    dy: PythonObject,
    v: PythonObject,
    M: PythonObject,
    K: PythonObject,
    accumulate: PythonObject,
    threads: PythonObject,
    gomp_parallel: PythonObject,
) raises -> PythonObject:
    """Computes dv[M, K] from dy[M, K] and v[M, K]."""
    ops.norm_backward[DTYPE](
        _cpu(threads, gomp_parallel),
        _address(dv),
        _address(dy),
        _address(v),
        Int(py=M),
        Int(py=K),
        Bool(py=accumulate),
    )
    return PythonObject(None)


def div_forward(
    y: PythonObject,
    a: PythonObject,
    b: PythonObject,
    M: PythonObject,
    K: PythonObject,
    threads: PythonObject,
    gomp_parallel: PythonObject,
) raises -> PythonObject:
    """Computes y[M, K] = a / b."""
    ops.div_forward[DTYPE](
        _cpu(threads, gomp_parallel),
        _address(y),
        _address(a),
        _address(b),
        Int(py=M),
        Int(py=K),
    )
    return PythonObject(None)


def div_backward(
    da: PythonObject,
    db: PythonObject,
    dy: PythonObject,
    a: PythonObject,
    b: PythonObject,
    M: PythonObject,
    K: PythonObject,
    accumulate: PythonObject,
    threads: PythonObject,
    gomp_parallel: PythonObject,
) raises -> PythonObject:
    """Computes da[M, K] and db[M, K] from dy[M, K], a[M, K] and b[M, K]."""
    ops.div_backward[DTYPE](
        _cpu(threads, gomp_parallel),
        _address(da),
        _address(db),
        _address(dy),
        _address(a),
        _address(b),
        Int(py=M),
        Int(py=K),
        Bool(py=accumulate),
    )
    return PythonObject(None)


@export
def PyInit_rowwise_cpu() abi("C") -> PythonObject:
    try:
        var builder = PythonModuleBuilder("rowwise_cpu")
        builder.def_function[trainable_eps_forward]("trainable_eps_forward")
        builder.def_function[trainable_eps_backward]("trainable_eps_backward")
        builder.def_function[mean]("mean")
        builder.def_function[norm_forward]("norm_forward")
        builder.def_function[norm_backward]("norm_backward")
        builder.def_function[div_forward]("div_forward")
        builder.def_function[div_backward]("div_backward")
        return builder.finalize()
    except e:
        abort(t"failed to create rowwise_cpu: {e}")
