"""A CPython extension: what the composed way on a GPU does besides matrix products, on a stream of PyTorch's.

Tensors are dense and given by address; 0 stands for None, or for what is not wanted. Nothing is allocated and
nothing waits. One build serves one dtype of x; its LayerNorm parameters are of that type or float32. `narrow` says
which of `NARROW` the normalised rows, dy and db are of.
"""

from max.gpu.host import DeviceContext
from std.memory import OpaquePointer
from std.os import abort
from std.python import PythonObject
from std.python.bindings import PythonModuleBuilder
from std.sys import get_defined_dtype

from op.layernorm_linear.between_products import (
    BetweenProducts,
    workspace_bytes,
)
from op.device import Gpu
from op.rows.launch import launch_rows
from op.rows.layernorm import LayerNorm, LayerNormTo
from op.rows.operands import Operands, accumulator
from op.rows.values import SAME

comptime DTYPE = get_defined_dtype["dtype", DType.float32]()
comptime ACCUM = accumulator[DTYPE]()
comptime NARROW = [SAME, DType.bfloat16, DType.float16]
"""What the product's side of a call may be of: x's type or, beside float32 under autocast, a narrower one."""
comptime KINDS = 3 if DTYPE == DType.float32 else 1
"""How many of those this build serves."""
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
        narrow: PythonObject,
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
        var kind = Int(py=narrow)
        comptime for i in range(KINDS):
            if kind == i:
                launch_rows[LayerNormTo[NARROW[i]], DTYPE, DTYPE](gpu, operands)
        return PythonObject(None)

    @staticmethod
    def backward_workspace(
        py_self: PythonObject,
        M: PythonObject,
        K: PythonObject,
        N: PythonObject,
    ) raises -> PythonObject:
        """Returns the bytes of workspace that `backward` needs: K for dgamma and dbeta, N for db, 0 without."""
        ref gpu = py_self.downcast_value_ptr[Self]()[].gpu
        var size = 0
        comptime for i in range(KINDS):
            size = max(
                size,
                workspace_bytes[DTYPE, NARROW[i]](
                    gpu, Int(py=M), Int(py=K), Int(py=N)
                ),
            )
        return PythonObject(size)

    @staticmethod
    def backward(
        py_self: PythonObject,
        dx: PythonObject,
        dgamma: PythonObject,
        dbeta: PythonObject,
        db: PythonObject,
        z: PythonObject,
        dz: PythonObject,
        dy: PythonObject,
        x: PythonObject,
        ln_weight: PythonObject,
        ln_bias: PythonObject,
        mean: PythonObject,
        rstd: PythonObject,
        workspace: PythonObject,
        M: PythonObject,
        K: PythonObject,
        N: PythonObject,
        eps: PythonObject,
        ln_float32: PythonObject,
        narrow: PythonObject,
    ) raises -> PythonObject:
        """Computes dx[M, K], dgamma[K], dbeta[K] and z[M, K] from dz[M, K] and x[M, K], db[N] from dy[M, N]."""
        var between = BetweenProducts(
            M=Int(py=M),
            K=Int(py=K),
            N=Int(py=N),
            dx=_address(dx),
            dgamma=_address(dgamma),
            dbeta=_address(dbeta),
            db=_address(db),
            z=_address(z),
            dz=_address(dz),
            dy=_address(dy),
            x=_address(x),
            gamma=_address(ln_weight),
            beta=_address(ln_bias),
            mean=_address(mean),
            rstd=_address(rstd),
            eps=Float64(py=eps),
            workspace=_address(workspace),
        )
        ref gpu = py_self.downcast_value_ptr[Self]()[].gpu
        comptime if _IS_LOW:
            if Bool(py=ln_float32):
                between.launch[DTYPE, DType.float32](gpu)
                return PythonObject(None)
        var kind = Int(py=narrow)
        comptime for i in range(KINDS):
            if kind == i:
                between.launch[DTYPE, DTYPE, NARROW[i]](gpu)
        return PythonObject(None)


@export
def PyInit_norm_linear_gpu() abi("C") -> PythonObject:
    try:
        var builder = PythonModuleBuilder("norm_linear_gpu")
        comptime L = Launcher[DTYPE]
        _ = (
            builder.add_type[L]("Launcher")
            .def_py_init[L.py_init]()
            .def_method[L.layernorm_forward]("layernorm_forward")
            .def_method[L.backward_workspace]("backward_workspace")
            .def_method[L.backward]("backward")
        )
        return builder.finalize()
    except e:
        abort(t"failed to create norm_linear_gpu: {e}")
