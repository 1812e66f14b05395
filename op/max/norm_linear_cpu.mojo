"""Runs a call on a CPU for MAX: the same plan and kernels as for PyTorch, on Mojo's threads."""

from std.runtime import parallelism_level

from ..call import Call, CallPointer
from ..gemm.cpu.blocking import Blocking
from ..gemm.cpu.tiles import permits_tiles
from ..norm_linear.cpu.backward import backward_of
from ..norm_linear.cpu.forward import forward_of
from ..norm_linear.cpu.plan import plan_backward, plan_forward
from ..norm_linear.plan import FUSED
from ..norms.norm import Norm


def forward[dtype: DType, ThisNorm: Norm](call: Call) raises:
    """Computes y, and the sum, mean, rstd and the product where they are wanted.

    Parameters:
        dtype: The type of x.
        ThisNorm: The norm, which the call may leave open.

    Args:
        call: The forward, without workspace or threads.

    Raises:
        If no kernel takes it.
    """
    _run[dtype, plan_forward[dtype], forward_of[dtype, ThisNorm]](call)


def backward[dtype: DType, ThisNorm: Norm](call: Call) raises:
    """Computes which of dx, dgamma, dbeta, dweight and dbias are wanted.

    Parameters:
        dtype: The type of x.
        ThisNorm: The norm, which the call may leave open.

    Args:
        call: The backward, without an activation, workspace or threads.

    Raises:
        If no kernel takes it.
    """
    _run[dtype, plan_backward[dtype], backward_of[dtype, ThisNorm]](call)


def _run[
    dtype: DType,
    plan: def(CallPointer) thin -> None,
    run: def(CallPointer) thin -> None,
](call: Call) raises:
    comptime if Blocking[dtype].has_tiles:
        if not permits_tiles():
            raise Error("Linux does not grant the tile registers")
    # On the heap: the compiler may keep a local in registers, where a plan that
    # knows its address alone would not reach it.
    var calls: List[Call] = [call]
    var place = CallPointer(unsafe_from_address=Int(calls.unsafe_ptr()))
    place[].threads = parallelism_level()
    # PyTorch's product may be faster, but a MAX graph does not have it.
    place[].strategy = FUSED
    plan(place)
    if place[].strategy != FUSED:
        raise Error("no CPU kernel takes this call")
    var workspace = List[UInt8](unsafe_uninit_length=place[].workspace_bytes)
    if place[].workspace_bytes > 0:
        place[].workspace = Int(workspace.unsafe_ptr())
    run(place)
    _ = workspace^
    _ = calls^
