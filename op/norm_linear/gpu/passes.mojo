"""The two passes around PyTorch's products, each planned and then run: what the doors of norm_linear_gpu lead to.

PyTorch multiplies after the forward, z by the weight, and before the backward, dy by the weight, and after it,
dy by z. Nothing here needs a choice but of types: a build serves one type of x, whose norm's parameters are of
that type or float32, and whose products are of that type or narrower.
"""

from ...call import Call
from ...device import Gpu
from ...rows.values import SAME
from ..plan import AROUND_PRODUCTS
from .between_products import between_products_bytes, launch_between_products
from .normalize import launch_normalize

comptime _NARROW = [SAME, DType.bfloat16, DType.float16]


def _narrow_types[dtype: DType]() -> Int:
    """Returns how many of `Call.narrow` there are: only float32 has narrower products."""
    return 3 if dtype == DType.float32 else 1


def _is_low[dtype: DType]() -> Bool:
    """Returns whether parameters may be float32 beside narrower rows."""
    return dtype == DType.bfloat16 or dtype == DType.float16


def plan_forward(mut call: Call):
    """Writes the way and the size of the workspace.

    Args:
        call: The forward.
    """
    call.way = AROUND_PRODUCTS
    call.workspace_bytes = 0


def forward[dtype: DType](gpu: Gpu, call: Call) raises:
    """Writes z, mean and rstd from x.

    Parameters:
        dtype: The type of x.

    Args:
        gpu: Where to run.
        call: The forward.

    Raises:
        If a launch fails.
    """
    comptime if _is_low[dtype]():
        if call.norm_is_float32 != 0:
            return launch_normalize[dtype, DType.float32](gpu, call)
    comptime for i in range(_narrow_types[dtype]()):
        if call.narrow == i:
            launch_normalize[dtype, dtype, _NARROW[i]](gpu, call)


def plan_backward[dtype: DType](gpu: Gpu, mut call: Call):
    """Writes the way and the size of the workspace.

    Parameters:
        dtype: The type of x.

    Args:
        gpu: Where to run.
        call: The backward; addresses that are not 0 say what is wanted.
    """
    call.way = AROUND_PRODUCTS
    comptime for i in range(_narrow_types[dtype]()):
        if call.narrow == i:
            call.workspace_bytes = between_products_bytes[dtype, _NARROW[i]](
                gpu, call
            )


def backward[dtype: DType](gpu: Gpu, call: Call) raises:
    """Writes which of dx, z, dgamma, dbeta and dbias are wanted from dz, x and dy.

    Parameters:
        dtype: The type of x.

    Args:
        gpu: Where to run.
        call: The backward.

    Raises:
        If a launch fails.
    """
    comptime if _is_low[dtype]():
        if call.norm_is_float32 != 0:
            return launch_between_products[dtype, DType.float32](gpu, call)
    comptime for i in range(_narrow_types[dtype]()):
        if call.narrow == i:
            launch_between_products[dtype, dtype, _NARROW[i]](gpu, call)
