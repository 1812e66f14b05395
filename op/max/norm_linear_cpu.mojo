"""Runs a call on a CPU for MAX: the kernels that PyTorch's front door runs, on Mojo's threads."""

from std.runtime import parallelism_level

from ..call import Call, CallPointer
from ..norm_linear.cpu import backward as backward_pass
from ..norm_linear.cpu import forward as forward_pass
from ..norm_linear.cpu.plan import plan_backward, plan_forward


def forward[dtype: DType](call: Call):
    """Computes y, mean and rstd.

    Parameters:
        dtype: The type of x.

    Args:
        call: The forward, without workspace or threads.
    """
    _run[plan_forward[dtype], forward_pass.forward[dtype]](call)


def backward[dtype: DType](call: Call):
    """Computes dx, dgamma, dbeta, dweight and dbias.

    Parameters:
        dtype: The type of x.

    Args:
        call: The backward, without workspace or threads.
    """
    _run[plan_backward[dtype], backward_pass.backward[dtype]](call)


def _run[
    plan: def(CallPointer) thin -> None, run: def(CallPointer) thin -> None
](call: Call):
    # On the heap: the compiler may keep a local in registers, where a plan that
    # knows its address alone would not reach it.
    var calls: List[Call] = [call]
    var place = CallPointer(unsafe_from_address=Int(calls.unsafe_ptr()))
    place[].threads = parallelism_level()
    plan(place)
    var workspace = List[UInt8](unsafe_uninit_length=place[].workspace_bytes)
    if place[].workspace_bytes > 0:
        place[].workspace = Int(workspace.unsafe_ptr())
    run(place)
    _ = workspace^
    _ = calls^
