"""A CPython extension: LayerNorm forward and backward on a GPU, on a stream of PyTorch's.

Tensors are dense and given by address; 0 stands for None, or for what is not wanted. Nothing is allocated and
nothing waits. One build serves one dtype of x; its LayerNorm parameters are of that type or float32.
"""

from max.gpu.host import DeviceContext
from std.memory import OpaquePointer
from std.os import abort
from std.python import PythonObject
from std.python.bindings import PythonModuleBuilder
from std.sys import get_defined_dtype

from op.rowwise.launch import Gpu, launch_rows
from op.rowwise.launch_columns import (
    column_sums_bytes,
    launch_rows_and_columns,
)
from op.rowwise.layernorm import (
    LayerNorm,
    LayerNormBackward,
    LayerNormInputGradient,
)
from op.rowwise.operands import Addresses, Operands, accumulator

comptime DTYPE = get_defined_dtype["dtype", DType.float32]()
comptime ACCUM = accumulator[DTYPE]()
# only these mix with parameters in float32
comptime _IS_LOW = DTYPE == DType.bfloat16 or DTYPE == DType.float16


def _address(value: PythonObject) raises -> Int64:
    return Int64(Int(py=value))


@fieldwise_init
struct Launcher[dtype: DType](Movable, Writable):
    """A device and one of its streams, kept between calls.

    The parameter keeps apart the Python types of builds for different dtypes, which share a process.
    """

    var gpu: Gpu

    @staticmethod
    def py_init(
        out self: Self, args: PythonObject, kwargs: PythonObject
    ) raises:
        """Launcher(device_index, raw_stream)."""
        var context = DeviceContext(Int(py=args[0]))
        var stream = context.create_external_stream(
            OpaquePointer[MutAnyOrigin](unsafe_from_address=Int(py=args[1]))
        )
        self = Self(Gpu(context, stream))

    def write_to(self, mut writer: Some[Writer]):
        writer.write("Launcher")

    def write_repr_to(self, mut writer: Some[Writer]):
        writer.write("Launcher")

    @staticmethod
    def layernorm_forward(
        py_self: PythonObject,
        y: PythonObject,
        mean: PythonObject,
        rstd: PythonObject,
        x: PythonObject,
        ln_weight: PythonObject,
        ln_bias: PythonObject,
        M: PythonObject,
        K: PythonObject,
        eps: PythonObject,
        ln_float32: PythonObject,
    ) raises -> PythonObject:
        """Computes y[M, K], mean[M] and rstd[M] from x[M, K]."""
        var operands = Operands[ACCUM](Int(py=M), Int(py=K))
        operands.inputs[0] = _address(x)
        operands.features[0] = _address(ln_weight)
        operands.features[1] = _address(ln_bias)
        operands.absent[0] = 1
        operands.outputs[0] = _address(y)
        operands.results[0] = _address(mean)
        operands.results[1] = _address(rstd)
        operands.number = Float64(py=eps).cast[ACCUM]()
        ref gpu = py_self.downcast_value_ptr[Self]()[].gpu
        comptime if _IS_LOW:
            if Bool(py=ln_float32):
                launch_rows[LayerNorm, DTYPE, DType.float32](gpu, operands)
                return PythonObject(None)
        launch_rows[LayerNorm, DTYPE, DTYPE](gpu, operands)
        return PythonObject(None)

    @staticmethod
    def layernorm_backward_workspace(
        py_self: PythonObject, M: PythonObject, K: PythonObject
    ) raises -> PythonObject:
        """Returns the bytes of workspace that the backward needs for dgamma and dbeta."""
        ref gpu = py_self.downcast_value_ptr[Self]()[].gpu
        return PythonObject(
            column_sums_bytes[LayerNormBackward, DTYPE](
                gpu, Int(py=M), Int(py=K)
            )
        )

    @staticmethod
    def layernorm_backward(
        py_self: PythonObject,
        dx: PythonObject,
        dgamma: PythonObject,
        dbeta: PythonObject,
        dy: PythonObject,
        x: PythonObject,
        mean: PythonObject,
        rstd: PythonObject,
        ln_weight: PythonObject,
        workspace: PythonObject,
        M: PythonObject,
        K: PythonObject,
        ln_float32: PythonObject,
    ) raises -> PythonObject:
        """Computes dx[M, K], dgamma[K] and dbeta[K] from dy[M, K], x[M, K] and the statistics."""
        var operands = Operands[ACCUM](Int(py=M), Int(py=K))
        operands.inputs[0] = _address(dy)
        operands.inputs[1] = _address(x)
        operands.features[0] = _address(ln_weight)
        operands.absent[0] = 1
        operands.saved[0] = _address(mean)
        operands.saved[1] = _address(rstd)
        operands.outputs[0] = _address(dx)
        operands.column_sums = _address(workspace)
        var sums = Addresses(fill=0)
        sums[0] = _address(dgamma)
        sums[1] = _address(dbeta)
        ref gpu = py_self.downcast_value_ptr[Self]()[].gpu
        comptime if _IS_LOW:
            if Bool(py=ln_float32):
                _backward[DType.float32](gpu, operands, sums)
                return PythonObject(None)
        _backward[DTYPE](gpu, operands, sums)
        return PythonObject(None)


def _backward[
    ftype: DType
](gpu: Gpu, operands: Operands[ACCUM], sums: Addresses) raises:
    if sums[0] == 0 and sums[1] == 0:
        launch_rows[LayerNormInputGradient, DTYPE, ftype](gpu, operands)
    else:
        launch_rows_and_columns[
            LayerNormBackward, LayerNormInputGradient, DTYPE, ftype
        ](gpu, operands, sums)


@export
def PyInit_layernorm_gpu() abi("C") -> PythonObject:
    try:
        var builder = PythonModuleBuilder("layernorm_gpu")
        comptime L = Launcher[DTYPE]
        _ = (
            builder.add_type[L]("Launcher")
            .def_py_init[L.py_init]()
            .def_method[L.layernorm_forward]("layernorm_forward")
            .def_method[L.layernorm_backward_workspace](
                "layernorm_backward_workspace"
            )
            .def_method[L.layernorm_backward]("layernorm_backward")
        )
        return builder.finalize()
    except e:
        abort(t"failed to create layernorm_gpu: {e}")
