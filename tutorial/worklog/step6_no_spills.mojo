"""Step 6: the library's kernel, whose sums never leave the registers that tensor cores add to.

A k block is one assembly statement with its sums as tied operands
(op/gemm/sm90/wgmma.mojo), and tiles are stored by TMA (op/gemm/sm90/store.mojo).
Tile, cluster, ring and walk are those of step 5.
"""

from std.python import PythonObject

from op.device import Gpu
from op.gemm.epilogues import Plain
from op.gemm.row_hook import NoHook
from op.gemm.sm90.config import Config
from op.gemm.sm90.launch_matrix import BAND, launch_matrix
from op.gemm.sm90.product import Product

from entry import Task, new_module
from tile import COLUMNS


def launch(gpu: Gpu, task: Task) raises:
    """Queues the library's kernel in the shape of step 5.

    Args:
        gpu: Where to run.
        task: What to multiply.

    Raises:
        If the driver refuses.
    """
    var product = Product(task.m, task.n, task.k, Plain(), NoHook())
    product.band = BAND
    launch_matrix[DType.bfloat16, Config.of(COLUMNS)](
        gpu, task.c, task.a, task.b, product
    )


@export
def PyInit_step6_no_spills() abi("C") -> PythonObject:
    """Makes the module.

    Returns:
        The module.
    """
    return new_module["step6_no_spills", launch]()
