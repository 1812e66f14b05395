"""An extension with products of Hopper's matrix kernel in each of its shapes, with each epilogue."""

from std.os import abort
from std.python import PythonObject
from std.python._cpython import Py_ssize_t, PyObjectPtr
from std.python.bindings import PythonModuleBuilder
from std.sys import get_defined_dtype

from op.device import Gpu, Launcher, new_launcher
from op.gemm.added import Added
from op.gemm.epilogue import Epilogue
from op.gemm.epilogues import Activated, Bias, Plain, ScaleAndCorrect
from op.gemm.row_hook import RowHook
from op.gemm.sm90.config import Config
from op.gemm.sm90.launch import launch_product
from op.gemm.sm90.launch_matrix import launch_matrix
from op.gemm.sm90.product import Product
from op.gemm.sm90.tiling import SHARED_COLUMNS, Tiling
from op.norm_linear.sm90.gather import Statistics
from op.norms.layer_norm import LayerNorm
from op.python import Arguments, Values, failure, integer

comptime DTYPE = get_defined_dtype["dtype", DType.bfloat16]()


def _launch[
    E: Epilogue, //, b_transposed: Bool = False
](
    gpu: Gpu,
    tiling: Tiling,
    c: Int,
    a: Int,
    b: Int,
    m: Int,
    n: Int,
    k: Int,
    epilogue: E,
) raises:
    launch_product[DTYPE, b_transposed](gpu, tiling, c, a, b, m, n, k, epilogue)


def _launch_gathering[
    E: Epilogue, H: RowHook, //
](
    gpu: Gpu,
    c: Int,
    a: Int,
    b: Int,
    m: Int,
    n: Int,
    k: Int,
    epilogue: E,
    hook: H,
) raises:
    """Queues a product that gathers statistics."""
    var product = Product(m, n, k, epilogue, hook)
    launch_matrix[DTYPE, Config.of(SHARED_COLUMNS)](gpu, c, a, b, product)


def product(
    module: PyObjectPtr, values: Values, count: Py_ssize_t
) abi("C") -> PyObjectPtr:
    """Queues c = epilogue(a @ b^T)."""
    var arguments = Arguments(values)
    ref gpu = Launcher.at(arguments.integer())[].gpu
    var columns = arguments.integer()
    var ping_pong = arguments.integer() != 0
    var split = arguments.integer()
    var kind = arguments.integer()
    var c = arguments.integer()
    var a = arguments.integer()
    var b = arguments.integer()
    var m = arguments.integer()
    var n = arguments.integer()
    var k = arguments.integer()
    # The bias, or constants; what is added; corrections; means; rstd; h.
    var bias = arguments.integer()
    var added = arguments.integer()
    var corrections = arguments.integer()
    var mean = arguments.integer()
    var rstd = arguments.integer()
    var h = arguments.integer()
    var activation = Int32(arguments.integer())
    var tiling = Tiling(columns, ping_pong, 100, split)
    var plus = Bias[DTYPE](Int64(bias))
    var scale = ScaleAndCorrect(
        {unsafe_from_address = rstd},
        {unsafe_from_address = mean},
        {unsafe_from_address = bias},
        {unsafe_from_address = corrections},
    )
    var finds = Statistics[LayerNorm](
        1e-5, {unsafe_from_address = mean}, {unsafe_from_address = rstd}
    )
    try:
        if kind == 0:
            _launch[True](gpu, tiling, c, a, b, m, n, k, Plain())
        elif kind == 1:
            _launch(gpu, tiling, c, a, b, m, n, k, plus)
        elif kind == 2:
            var e = Activated[Bias[DTYPE], False](plus, Int64(h), activation)
            _launch(gpu, tiling, c, a, b, m, n, k, e)
        elif kind == 3:
            var e = Activated[Bias[DTYPE], True](plus, Int64(h), activation)
            _launch(gpu, tiling, c, a, b, m, n, k, e)
        elif kind == 4:
            var e = Added[Bias[DTYPE]](plus, Int64(added))
            _launch(gpu, tiling, c, a, b, m, n, k, e)
        elif kind == 5:
            _launch(gpu, tiling, c, a, b, m, n, k, scale)
        elif kind == 6:
            _launch_gathering(gpu, c, a, b, m, n, k, scale, finds)
        return integer(0)
    except error:
        return failure(error)


@export
def PyInit_sm90_shapes() abi("C") -> PythonObject:
    """Makes the module."""
    try:
        var builder = PythonModuleBuilder("sm90_shapes")
        builder.def_py_c_function(
            new_launcher,
            "new_launcher",
            docstring="new_launcher(device, stream, alone) -> address",
        )
        builder.def_py_c_function(
            product,
            "product",
            docstring=(
                "product(launcher, columns, turns, split, kind, c, a, b, m, n, k,"
                " bias, added, corrections, mean, rstd, h, activation) -> 0"
            ),
        )
        return builder.finalize()
    except e:
        abort(t"failed to create sm90_shapes: {e}")
