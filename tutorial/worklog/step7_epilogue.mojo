"""Step 7: the product's epilogue finishes the norm, and a kernel before it computes the rows' statistics.

    y = rstd (x Wc^T - mean s) + c    with Wc, s and c folded from the parameters before

The product is that of step 6.
"""

from std.python import PythonObject

from op.device import Gpu
from op.gemm.row_hook import NoHook
from op.gemm.sm90.config import Config
from op.gemm.sm90.launch_matrix import BAND, launch_matrix
from op.gemm.sm90.product import Product
from op.norm_linear.sm90.statistics import launch_statistics
from op.norms.layer_norm import LayerNorm

from normalized import Forward, new_module
from tile import COLUMNS

comptime DTYPE = DType.bfloat16


def launch(gpu: Gpu, task: Forward) raises:
    """Queues the statistics and the product.

    Args:
        gpu: Where to run.
        task: What to compute.

    Raises:
        If the driver refuses.
    """
    launch_statistics[DTYPE, LayerNorm](
        gpu, task.mean, task.rstd, task.x, task.m, task.k, task.eps
    )
    var product = Product(task.m, task.n, task.k, task.epilogue(), NoHook())
    product.band = BAND
    launch_matrix[DTYPE, Config.of(COLUMNS)](
        gpu, task.y, task.x, task.weight, product
    )


@export
def PyInit_step7_epilogue() abi("C") -> PythonObject:
    """Makes the module.

    Returns:
        The module.
    """
    return new_module["step7_epilogue", launch]()
