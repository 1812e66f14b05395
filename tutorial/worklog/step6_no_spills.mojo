"""Step 6: the library's kernel, whose sums never leave the registers that tensor cores add to.

A k block is one assembly statement with its sums as tied operands
(op/gemm/sm90/wgmma.mojo), and tiles are stored by TMA (op/gemm/sm90/store.mojo).
"""

from std.python import PythonObject

from op.device import Gpu
from op.gemm.epilogue import Plain
from op.gemm.sm90.launch import launch_product
from op.gemm.sm90.tiling import Tiling

from entry import Task, new_module


def launch(gpu: Gpu, task: Task) raises:
    """Queues the kernel that the library takes for the sizes.

    Args:
        gpu: Where to run.
        task: What to multiply.

    Raises:
        If the driver refuses.
    """
    var tiling = Tiling.best(task.m, task.n, task.k, gpu.processors)
    launch_product[DType.bfloat16](
        gpu,
        tiling,
        task.c,
        task.a,
        task.b,
        task.m,
        task.n,
        task.k,
        Plain(),
    )


@export
def PyInit_step6_no_spills() abi("C") -> PythonObject:
    """Makes the module.

    Returns:
        The module.
    """
    return new_module["step6_no_spills", launch]()
