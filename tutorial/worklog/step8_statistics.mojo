"""Step 8: consumers gather the rows' statistics from the tiles of x that they multiply.

No kernel runs before the product. A cluster takes tiles of the same rows one
after another, and gathers in the first of them (op/norm_linear/sm90/gather.mojo).
The product is otherwise that of step 7.
"""

from std.python import PythonObject

from op.device import Gpu
from op.gemm.sm90.config import Config
from op.gemm.sm90.launch_matrix import launch_matrix
from op.gemm.sm90.product import Product
from op.norm_linear.sm90.gather import Statistics
from op.norms.layer_norm import LayerNorm

from normalized import Forward, new_module
from tile import COLUMNS


def launch(gpu: Gpu, task: Forward) raises:
    """Queues the product, which gathers.

    Args:
        gpu: Where to run.
        task: What to compute; K is a multiple of 64.

    Raises:
        If the driver refuses.
    """
    var statistics = Statistics[LayerNorm](
        task.eps,
        {unsafe_from_address = task.mean},
        {unsafe_from_address = task.rstd},
    )
    launch_matrix[DType.bfloat16, Config.of(COLUMNS)](
        gpu,
        task.y,
        task.x,
        task.weight,
        Product(task.m, task.n, task.k, task.epilogue(), statistics),
    )


@export
def PyInit_step8_statistics() abi("C") -> PythonObject:
    """Makes the module.

    Returns:
        The module.
    """
    return new_module["step8_statistics", launch]()
