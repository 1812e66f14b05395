"""What steps 7 and 8 share: a forward on a folded weight, as a function for Python."""

from std.os import abort
from std.python import PythonObject
from std.python._cpython import Py_ssize_t, PyObjectPtr
from std.python.bindings import PythonModuleBuilder

from op.device import Gpu, Launcher, new_launcher
from op.gemm.epilogues import ScaleAndCorrect
from op.python import Arguments, Values, failure, integer


@fieldwise_init
struct Forward(TrivialRegisterPassable):
    """A LayerNorm and a Linear layer; addresses of dense row-major tensors.

    Addresses are multiples of 16, sizes are at least 1, N and K are multiples of 8.
    """

    var y: Int
    """Address of y [M, N] in bfloat16."""
    var x: Int
    """Address of x [M, K] in bfloat16."""
    var weight: Int
    """Address of the folded weight [N, K] in bfloat16."""
    var sums: Int
    """Address of the sums of the weight's rows [N] in float32."""
    var constants: Int
    """Address of what is added to each column [N] in float32."""
    var mean: Int
    """Address of the means [M] in float32, written."""
    var rstd: Int
    """Address of the reciprocal deviations [M] in float32, written."""
    var m: Int
    """Rows of x and y."""
    var n: Int
    """Columns of y."""
    var k: Int
    """Columns of x."""
    var eps: Float32
    """Added to the variances."""

    def epilogue(self) -> ScaleAndCorrect[True]:
        """Describes what finishes the sums.

        Returns:
            The epilogue: rstd (sum - mean s) + c.
        """
        return ScaleAndCorrect[True](
            {unsafe_from_address = self.rstd},
            {unsafe_from_address = self.mean},
            {unsafe_from_address = self.constants},
            {unsafe_from_address = self.sums},
        )


comptime Launch = def(Gpu, Forward) raises thin -> None
"""Queues the kernels of a step."""


def forward[
    launch: Launch
](module: PyObjectPtr, values: Values, count: Py_ssize_t) abi(
    "C"
) -> PyObjectPtr:
    """Is `forward(launcher, y, x, weight, sums, constants, mean, rstd, m, n, k, eps)` for Python.

    Parameters:
        launch: Queues the kernels.

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
        launch(
            gpu,
            Forward(y, x, weight, sums, constants, mean, rstd, m, n, k, eps),
        )
    except error:
        return failure(error)
    return integer(0)


def new_module[name: StaticString, launch: Launch]() -> PythonObject:
    """Makes the extension of a step that normalizes.

    Parameters:
        name: Of the file.
        launch: Queues its kernels.

    Returns:
        The module.
    """
    try:
        var builder = PythonModuleBuilder(name)
        builder.def_py_c_function(new_launcher, "new_launcher")
        builder.def_py_c_function(forward[launch], "forward")
        return builder.finalize()
    except e:
        abort(t"failed to create {name}: {e}")
