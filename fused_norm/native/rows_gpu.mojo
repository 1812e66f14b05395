"""A CPython extension: the ops that are row programs, on a GPU, for one element type per build.

Tensors are dense and given by address; 0 stands for what is not wanted. Nothing is allocated and nothing
waits. With `accumulate`, an op adds to its outputs instead of overwriting them; `o_float32` says that o is
float32 whatever the element type.
"""

from max.gpu.host import DeviceContext
from std.memory import OpaquePointer
from std.os import abort
from std.python import PythonObject
from std.python.bindings import PythonModuleBuilder
from std.sys import get_defined_dtype

from op.rows import ops
from op.device import Gpu

comptime DTYPE = get_defined_dtype["dtype", DType.float32]()


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
    def trainable_eps_forward(
        py_self: PythonObject,
        y: PythonObject,
        x: PythonObject,
        o: PythonObject,
        M: PythonObject,
        K: PythonObject,
        o_float32: PythonObject,
    ) raises -> PythonObject:
        """Computes y[M, K] from x[M, K] and the scalar o."""
        ops.trainable_eps_forward[DTYPE](
            py_self.downcast_value_ptr[Self]()[].gpu,
            _address(y),
            _address(x),
            _address(o),
            Int(py=M),
            Int(py=K),
            Bool(py=o_float32),
        )
        return PythonObject(None)

    @staticmethod
    def trainable_eps_backward(
        py_self: PythonObject,
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
    ) raises -> PythonObject:
        """Computes dx[M, K] and do[1] from dy[M, K], x[M, K] and o; `workspace` holds M numbers if do is wanted."""
        ops.trainable_eps_backward[DTYPE](
            py_self.downcast_value_ptr[Self]()[].gpu,
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

    @staticmethod
    def mean(
        py_self: PythonObject,
        y: PythonObject,
        x: PythonObject,
        M: PythonObject,
        K: PythonObject,
        accumulate: PythonObject,
    ) raises -> PythonObject:
        """Computes y[M, K] = x - mean(x)."""
        ops.mean[DTYPE](
            py_self.downcast_value_ptr[Self]()[].gpu,
            _address(y),
            _address(x),
            Int(py=M),
            Int(py=K),
            Bool(py=accumulate),
        )
        return PythonObject(None)

    @staticmethod
    def norm_forward(
        py_self: PythonObject,
        y: PythonObject,
        v: PythonObject,
        M: PythonObject,
        K: PythonObject,
    ) raises -> PythonObject:
        """Computes y[M, K] = sqrt(mean(v v))."""
        ops.norm_forward[DTYPE](
            py_self.downcast_value_ptr[Self]()[].gpu,
            _address(y),
            _address(v),
            Int(py=M),
            Int(py=K),
        )
        return PythonObject(None)

    @staticmethod
    def norm_backward(
        py_self: PythonObject,
        dv: PythonObject,
        dy: PythonObject,
        v: PythonObject,
        M: PythonObject,
        K: PythonObject,
        accumulate: PythonObject,
    ) raises -> PythonObject:
        """Computes dv[M, K] from dy[M, K] and v[M, K]."""
        ops.norm_backward[DTYPE](
            py_self.downcast_value_ptr[Self]()[].gpu,
            _address(dv),
            _address(dy),
            _address(v),
            Int(py=M),
            Int(py=K),
            Bool(py=accumulate),
        )
        return PythonObject(None)

    @staticmethod
    def div_forward(
        py_self: PythonObject,
        y: PythonObject,
        a: PythonObject,
        b: PythonObject,
        M: PythonObject,
        K: PythonObject,
    ) raises -> PythonObject:
        """Computes y[M, K] = a / b."""
        ops.div_forward[DTYPE](
            py_self.downcast_value_ptr[Self]()[].gpu,
            _address(y),
            _address(a),
            _address(b),
            Int(py=M),
            Int(py=K),
        )
        return PythonObject(None)

    @staticmethod
    def div_backward(
        py_self: PythonObject,
        da: PythonObject,
        db: PythonObject,
        dy: PythonObject,
        a: PythonObject,
        b: PythonObject,
        M: PythonObject,
        K: PythonObject,
        accumulate: PythonObject,
    ) raises -> PythonObject:
        """Computes da[M, K] and db[M, K] from dy[M, K], a[M, K] and b[M, K]."""
        ops.div_backward[DTYPE](
            py_self.downcast_value_ptr[Self]()[].gpu,
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
def PyInit_rows_gpu() abi("C") -> PythonObject:
    try:
        var builder = PythonModuleBuilder("rows_gpu")
        comptime L = Launcher[DTYPE]
        _ = (
            builder.add_type[L]("Launcher")
            .def_py_init[L.py_init]()
            .def_method[L.trainable_eps_forward]("trainable_eps_forward")
            .def_method[L.trainable_eps_backward]("trainable_eps_backward")
            .def_method[L.mean]("mean")
            .def_method[L.norm_forward]("norm_forward")
            .def_method[L.norm_backward]("norm_backward")
            .def_method[L.div_forward]("div_forward")
            .def_method[L.div_backward]("div_backward")
        )
        return builder.finalize()
    except e:
        abort(t"failed to create rows_gpu: {e}")
