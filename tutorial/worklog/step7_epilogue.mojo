"""Step 7: the product's epilogue finishes the norm, and a kernel before it computes the rows' statistics.

    y = rstd (x Wc^T - mean s) + c    with Wc, s and c folded from the parameters before
"""

from std.os import abort
from std.python import PythonObject
from std.python._cpython import Py_ssize_t, PyObjectPtr
from std.python.bindings import PythonModuleBuilder

from op.device import Launcher, new_launcher
from op.gemm.epilogues import ScaleAndCorrect
from op.gemm.sm90.launch import launch_product
from op.gemm.sm90.tiling import Tiling
from op.norm_linear.sm90.statistics import launch_statistics
from op.norms.layer_norm import LayerNorm
from op.python import Arguments, Values, failure, integer

comptime DTYPE = DType.bfloat16


def forward(
    module: PyObjectPtr, values: Values, count: Py_ssize_t
) abi("C") -> PyObjectPtr:
    """Is `forward(launcher, y, x, weight, sums, constants, mean, rstd, m, n, k, eps)` for Python.

    Args:
        module: The extension.
        values: A launcher, seven addresses, three sizes and a float.
        count: 12.

    Returns:
        The integer 0.
    """
    var arguments = Arguments(values)
    ref gpu = Launcher.at(arguments.integer())[].gpu
    var y = arguments.integer()
    var x = arguments.integer()
    var weight = arguments.integer()
    var sums = arguments.integer()
    var constants = arguments.integer()
    var mean = arguments.integer()
    var rstd = arguments.integer()
    var m = arguments.integer()
    var n = arguments.integer()
    var k = arguments.integer()
    var eps = Float32(arguments.number())
    try:
        launch_statistics[DTYPE, LayerNorm](gpu, mean, rstd, x, m, k, eps)
        launch_product[DTYPE](
            gpu,
            Tiling.best(m, n, k, gpu.processors),
            y,
            x,
            weight,
            m,
            n,
            k,
            ScaleAndCorrect[True](
                {unsafe_from_address = rstd},
                {unsafe_from_address = mean},
                {unsafe_from_address = constants},
                {unsafe_from_address = sums},
            ),
        )
    except error:
        return failure(error)
    return integer(0)


@export
def PyInit_step7_epilogue() abi("C") -> PythonObject:
    """Makes the module.

    Returns:
        The module.
    """
    try:
        var builder = PythonModuleBuilder("step7_epilogue")
        builder.def_py_c_function(new_launcher, "new_launcher")
        builder.def_py_c_function(forward, "forward")
        return builder.finalize()
    except e:
        abort(t"failed to create step7_epilogue: {e}")
