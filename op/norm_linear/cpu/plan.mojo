"""Whether our product takes a call on a CPU, and its workspace.

A plan depends on a call's sizes and on which results are wanted. It is computed
twice: for the size of the workspace, and when the call runs.
"""

from ...call import CallPointer
from ..plan import DECLINED, FUSED
from .activation import before_activation, is_served
from .backward_plan import BackwardPlan
from .forward_plan import ForwardPlan
from .norms import NORMS

comptime STACK_BYTES = 65536
"""A workspace of up to this size lives on the stack."""


def plan_forward[dtype: DType](call: CallPointer):
    """Chooses the strategy of a forward and the size of its workspace.

    Parameters:
        dtype: Element type of the tensors.

    Args:
        call: The forward; `strategy` and `workspace_bytes` are set.
    """
    ref its = call[]
    var serves = (
        its.has_statistics == 0
        and (its.residual == 0 or its.sum != 0)
        and (its.groups == 0 or its.M % its.groups == 0)
        and is_served(its.activation)
    )
    _set(call, serves, ForwardPlan[dtype](its).bytes)


def plan_backward[dtype: DType](call: CallPointer):
    """Chooses the strategy of a backward and the size of its workspace.

    Parameters:
        dtype: Element type of the tensors.

    Args:
        call: The backward; `strategy` and `workspace_bytes` are set.
    """
    ref its = call[]
    var serves = its.groups == 0 and is_served(its.activation)
    var linear = before_activation(call[])
    _set(call, serves, BackwardPlan[dtype](linear).bytes)


def _set(call: CallPointer, serves: Bool, bytes: Int):
    ref its = call[]
    var is_taken = (
        serves
        and its.narrow == 0
        and its.accumulate == 0
        and its.normalization < NORMS
    )
    call[].strategy = FUSED if is_taken else DECLINED
    call[].workspace_bytes = bytes if is_taken and bytes > STACK_BYTES else 0
