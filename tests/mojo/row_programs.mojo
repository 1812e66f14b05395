"""Row programs of a few lines each, as a CPython extension for the tests.

Every function ends with the arguments `device` and `stream`: -1 selects the CPU, with Mojo's own threads.
"""

from max.gpu.host import DeviceContext
from std.math import exp
from std.memory import OpaquePointer
from std.os import abort
from std.python import PythonObject
from std.python.bindings import PythonModuleBuilder
from std.sys import get_defined_dtype, has_accelerator

from op.device import Gpu
from op.norms.norm import inverse_sqrt
from op.rows.cpu import column_sums_bytes, run_rows, run_rows_and_columns
from op.rows.launch import launch_rows
from op.rows.operands import Addresses, Operands, Sums, accumulator
from op.rows.program import Program, RowProgram
from op.rows.programs.norm import NormBackward
from op.rows.types import code_of
from op.rows.stage import Stage
from op.rows.values import Redo, Row, Values
from op.team import Team

comptime DTYPE = get_defined_dtype["dtype", DType.float32]()
comptime ACCUM = accumulator[DTYPE]()


# softmax(x) = e / sum(e) with e = exp(x - max(x))
struct Exponential(Stage):
    comptime redo = Redo.MAX

    @staticmethod
    def map_out[
        dtype: DType, width: Int, //
    ](
        row: Row[dtype], v: Values[dtype, width], largest: Values[dtype, 1]
    ) -> Values[dtype, width]:
        comptime assert dtype.is_floating_point()
        return {exp(v[0] - largest[0])}


struct Share(Stage):
    @staticmethod
    def map_out[
        dtype: DType, width: Int, //
    ](
        row: Row[dtype], v: Values[dtype, width], total: Values[dtype, 1]
    ) -> Values[dtype, width]:
        return {v[0] / total[0]}


comptime Softmax = Program[Exponential, Share]


# rms_norm(x) = x / sqrt(mean(x x) + eps) gamma
struct Scale(Stage):
    @staticmethod
    def map_in[
        dtype: DType, width: Int, //
    ](row: Row[dtype], v: Values[dtype, width]) -> Values[dtype, width]:
        return {v[0] * v[0]}

    @staticmethod
    def map_out[
        dtype: DType, width: Int, //
    ](
        row: Row[dtype], v: Values[dtype, width], total: Values[dtype, 1]
    ) -> Values[dtype, width]:
        return {
            v[0] * inverse_sqrt(total[0] * row.inverse_n + row.number) * v[1]
        }


comptime RmsNorm = Program[Scale, features_=1]


# y = 2 x - sum(2 x), with two intermediate results: sum(x), which is not broadcast, and min(y) at the end
struct Doubled(Stage):
    comptime broadcast = False
    comptime results = 1

    @staticmethod
    def map_out[
        dtype: DType, width: Int, //
    ](
        row: Row[dtype], v: Values[dtype, width], total: Values[dtype, 1]
    ) -> Values[dtype, width]:
        return {2 * v[0] + total[0]}


struct LessSum(Stage):
    @staticmethod
    def map_out[
        dtype: DType, width: Int, //
    ](
        row: Row[dtype], v: Values[dtype, width], total: Values[dtype, 1]
    ) -> Values[dtype, width]:
        return {v[0] - total[0]}


struct Smallest(Stage):
    comptime redo = Redo.MAX
    comptime broadcast = False
    comptime results = 1

    @staticmethod
    def map_in[
        dtype: DType, width: Int, //
    ](row: Row[dtype], v: Values[dtype, width]) -> Values[dtype, width]:
        return {-v[0]}

    @staticmethod
    def finish[
        dtype: DType, //
    ](
        row: Row[dtype], total: Values[dtype, 1], before: Values[dtype, 1]
    ) -> Values[dtype, 1]:
        return {-total[0]}


comptime Measured = Program[Doubled, LessSum, Smallest]


def _run[
    P: RowProgram
](
    operands: Operands[ACCUM], device: PythonObject, stream: PythonObject
) raises -> PythonObject:
    comptime if has_accelerator():
        if Int(py=device) >= 0:
            var context = DeviceContext(Int(py=device))
            var external = context.create_external_stream(
                OpaquePointer[MutAnyOrigin](unsafe_from_address=Int(py=stream))
            )
            launch_rows[P, DTYPE, DTYPE](Gpu(context, external), operands)
            return PythonObject(None)
    run_rows[P, DTYPE, DTYPE](Team(0, 2), operands)
    return PythonObject(None)


@always_inline
def _operands(y: Int, x: Int, M: Int, K: Int) -> Operands[ACCUM]:
    var operands = Operands[ACCUM](M, K)
    operands.inputs[0] = Int64(x)
    operands.outputs[0] = Int64(y)
    return operands


def softmax(
    y: PythonObject,
    x: PythonObject,
    M: PythonObject,
    K: PythonObject,
    device: PythonObject,
    stream: PythonObject,
) raises -> PythonObject:
    return _run[Softmax](
        _operands(Int(py=y), Int(py=x), Int(py=M), Int(py=K)), device, stream
    )


def rms_norm(
    y: PythonObject,
    x: PythonObject,
    gamma: PythonObject,
    M: PythonObject,
    K: PythonObject,
    device: PythonObject,
    stream: PythonObject,
) raises -> PythonObject:
    var operands = _operands(Int(py=y), Int(py=x), Int(py=M), Int(py=K))
    operands.features[0] = Int64(Int(py=gamma))
    operands.number = 1e-6
    return _run[RmsNorm](operands, device, stream)


def measured(
    y: PythonObject,
    total: PythonObject,
    smallest: PythonObject,
    x: PythonObject,
    M: PythonObject,
    K: PythonObject,
    device: PythonObject,
    stream: PythonObject,
) raises -> PythonObject:
    var operands = _operands(Int(py=y), Int(py=x), Int(py=M), Int(py=K))
    operands.results[0] = Int64(Int(py=total))
    operands.results[1] = Int64(Int(py=smallest))
    return _run[Measured](operands, device, stream)


def layernorm_backward(
    dx: PythonObject,
    dgamma: PythonObject,
    dbeta: PythonObject,
    dy: PythonObject,
    x: PythonObject,
    mean: PythonObject,
    rstd: PythonObject,
    gamma: PythonObject,
    M: PythonObject,
    K: PythonObject,
) raises -> PythonObject:
    """Runs a program with sums over rows, on the CPU."""
    var operands = _operands(Int(py=dx), Int(py=dy), Int(py=M), Int(py=K))
    operands.inputs[1] = Int64(Int(py=x))
    operands.saved[0] = Int64(Int(py=mean))
    operands.saved[1] = Int64(Int(py=rstd))
    operands.features[0] = Int64(Int(py=gamma))
    var bytes = column_sums_bytes[NormBackward[], DTYPE](Int(py=M), Int(py=K))
    var workspace = List[UInt8](length=bytes + 1, fill=255)
    operands.column_sums = Int64(Int(workspace.unsafe_ptr()))
    var sums = Addresses(fill=0)
    sums[0] = Int64(Int(py=dgamma))
    sums[1] = Int64(Int(py=dbeta))
    run_rows_and_columns[NormBackward[], DTYPE, DTYPE](
        Team(0, 2), operands, Sums(sums, code_of[DTYPE]())
    )
    _ = workspace^
    return PythonObject(None)


@export
def PyInit_row_programs() abi("C") -> PythonObject:
    try:
        var builder = PythonModuleBuilder("row_programs")
        builder.def_function[softmax]("softmax")
        builder.def_function[rms_norm]("rms_norm")
        builder.def_function[measured]("measured")
        builder.def_function[layernorm_backward]("layernorm_backward")
        return builder.finalize()
    except e:
        abort(t"failed to create row_programs: {e}")
