"""Computes the gradients of a norm followed by a Linear layer on the CPU.

Two matrix products make all five gradients: one of dy with the normalized rows,
one of dy with the weight.

Every sum runs in an order that only the shape decides, so the bits depend
neither on the number of threads nor on which of them does what; those of a row
of dx depend on no other row, nor on their number.
"""

from std.math import align_up
from std.memory import stack_allocation
from std.sys import size_of

from ...call import Call, CallPointer
from ...gemm.cpu.memory import CACHE_LINE
from ...norms.norm import Norm
from ...pages import prefer_large_pages
from ...team import Team
from .activation import before_activation
from .backward_few_rows import run_few_rows
from .backward_many_rows import run_many_rows
from .backward_plan import BackwardPlan
from .job import Job
from .norms import with_norm
from .plan import STACK_BYTES
from .shifts import find_shifts


def backward[dtype: DType](call: CallPointer):
    """Computes the gradients whose address is given, from dy, or from dh before an activation.

    Parameters:
        dtype: Element type of the tensors.

    Args:
        call: The tensors, and a workspace as `plan_backward` asked for it.
    """
    # On the heap: the compiler might keep a local in registers, where those who
    # know its address alone would not see it.
    var calls: List[Call] = [before_activation(call[])]
    with_norm[dtype, backward_of](
        CallPointer(unsafe_from_address=Int(calls.unsafe_ptr()))
    )
    _ = calls^


def backward_of[dtype: DType, ThisNorm: Norm](call: CallPointer):
    """Does the same where the norm is known, without an activation.

    Parameters:
        dtype: Element type of the tensors.
        ThisNorm: The norm.

    Args:
        call: The tensors, and a workspace as `plan_backward` asked for it.
    """
    var room = stack_allocation[STACK_BYTES, DType.uint8]()
    var plan = BackwardPlan[dtype](call[])
    var workspace = align_up(
        call[].workspace if call[].workspace != 0 else Int(room), CACHE_LINE
    )
    if call[].dx != 0:
        prefer_large_pages(call[].dx, call[].M * call[].K * size_of[dtype]())
    if call[].dweight != 0:
        prefer_large_pages(
            call[].dweight, call[].N * call[].K * size_of[dtype]()
        )
    prefer_large_pages(workspace, plan.bytes)
    var team = Team(call[].context, plan.workers)
    var job = Job[dtype, BackwardPlan[dtype]](
        call, plan.copy(), workspace, plan.gamma, plan.beta
    )
    comptime if size_of[dtype]() == size_of[
        Job[dtype, BackwardPlan[dtype]].accum
    ]():
        find_shifts[dtype, ThisNorm](job, team)
    if plan.few_rows:
        run_few_rows[dtype, ThisNorm](job, team)
    else:
        run_many_rows[dtype, ThisNorm](job, team)
