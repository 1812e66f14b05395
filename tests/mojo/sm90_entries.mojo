"""An extension with entry points for parts on Hopper that have none in the library: products and statistics.

Built like norm_linear_sm90, but independent of it.
"""

from std.os import abort
from std.python import PythonObject
from std.python._cpython import Py_ssize_t, PyObjectPtr
from std.python.bindings import PythonModuleBuilder
from std.sys import get_defined_dtype

from op.device import Launcher, new_launcher
from op.gemm.epilogues import Plain
from op.gemm.sm90.launch import launch_product
from op.gemm.sm90.split_k import SplitK, launch_split_k
from op.gemm.sm90.tiling import Tiling
from op.norm_linear.sm90.statistics import launch_statistics
from op.norms.layer_norm import LayerNorm
from op.python import Arguments, Values, failure, integer

comptime DTYPE = get_defined_dtype["dtype", DType.bfloat16]()
comptime IS_TF32 = DTYPE == DType.float32


def product(
    module: PyObjectPtr, values: Values, count: Py_ssize_t
) abi("C") -> PyObjectPtr:
    """Queues c = a @ b^T, or a @ b."""
    var arguments = Arguments(values)
    ref gpu = Launcher.at(arguments.integer())[].gpu
    var c = arguments.integer()
    var a = arguments.integer()
    var b = arguments.integer()
    var m = arguments.integer()
    var n = arguments.integer()
    var k = arguments.integer()
    var is_transposed = arguments.integer() != 0
    var tiling = Tiling.best(m, n, k, gpu.processors, common=IS_TF32)
    try:
        comptime for transposed in [False, True]:
            # tf32 has no transposed operands.
            comptime if not (transposed and IS_TF32):
                if is_transposed == transposed:
                    launch_product[DTYPE, transposed](
                        gpu, tiling, c, a, b, m, n, k, Plain()
                    )
        return integer(0)
    except error:
        return failure(error)


def split_k(
    module: PyObjectPtr, values: Values, count: Py_ssize_t
) abi("C") -> PyObjectPtr:
    """Queues c = a^T @ b and the column sums of a; without a workspace, counts its bytes."""
    var arguments = Arguments(values)
    ref gpu = Launcher.at(arguments.integer())[].gpu
    var c = arguments.integer()
    var sums = arguments.integer()
    var a = arguments.integer()
    var b = arguments.integer()
    var workspace = arguments.integer()
    var m = arguments.integer()
    var n = arguments.integer()
    var k = arguments.integer()
    var is_float32 = arguments.integer() != 0
    var accumulate = arguments.integer() != 0
    var how = SplitK.best(m, n, k, gpu.processors, sums_rows=True)
    if workspace == 0:
        return integer(how.workspace_bytes)
    try:
        comptime for wanted in [False, True]:
            if is_float32 == wanted:
                launch_split_k[DTYPE, DType.float32 if wanted else DTYPE](
                    gpu, how, c, sums, a, b, workspace, m, n, k, accumulate
                )
        return integer(0)
    except error:
        return failure(error)


def statistics(
    module: PyObjectPtr, values: Values, count: Py_ssize_t
) abi("C") -> PyObjectPtr:
    """Queues the row statistics of x."""
    var arguments = Arguments(values)
    ref gpu = Launcher.at(arguments.integer())[].gpu
    var mean = arguments.integer()
    var rstd = arguments.integer()
    var x = arguments.integer()
    var m = arguments.integer()
    var k = arguments.integer()
    var eps = Float32(arguments.number())
    try:
        launch_statistics[DTYPE, LayerNorm](gpu, mean, rstd, x, m, k, eps)
        return integer(0)
    except error:
        return failure(error)


@export
def PyInit_sm90_entries() abi("C") -> PythonObject:
    """Makes the module."""
    try:
        var builder = PythonModuleBuilder("sm90_entries")
        builder.def_py_c_function(
            new_launcher,
            "new_launcher",
            docstring="new_launcher(device, stream, alone) -> address",
        )
        builder.def_py_c_function(
            product,
            "product",
            docstring="product(launcher, c, a, b, m, n, k, transposed) -> 0",
        )
        comptime if not IS_TF32:
            builder.def_py_c_function(
                split_k,
                "split_k",
                docstring=(
                    "split_k(launcher, c, sums, a, b, workspace, m, n, k,"
                    " float32, accumulate) -> 0"
                ),
            )
            builder.def_py_c_function(
                statistics,
                "statistics",
                docstring="statistics(launcher, mean, rstd, x, m, k, eps) -> 0",
            )
        return builder.finalize()
    except e:
        abort(t"failed to create sm90_entries: {e}")
