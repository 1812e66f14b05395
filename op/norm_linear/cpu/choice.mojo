"""Chooses between our product and PyTorch's on a CPU, from what was measured at the nearest sizes."""

from std.sys import CompilationTarget

from ...call import Call
from ..plan import FUSED
from .measured import MEASURED

comptime WAS_MEASURED = CompilationTarget._has_feature["amx-tile"]()
"""Whether the build is for CPUs like the one that was measured, whose tiles PyTorch's products use."""


def fastest[dtype: DType](call: Call, follows: Bool) -> Int:
    """Finds the faster way at the nearest sizes that were measured.

    Parameters:
        dtype: Element type of the tensors.

    Args:
        call: The sizes.
        follows: Whether a backward follows, whose time counts as well.

    Returns:
        FUSED, or DECLINED for PyTorch's own ops.
    """
    var way = FUSED
    comptime if WAS_MEASURED:
        var nearest = Float64.MAX
        comptime for i in range(len(MEASURED)):
            comptime at = MEASURED[i]
            comptime if at.dtype == dtype:
                # Distances are those of logarithms. That of the weight's sizes
                # comes first: rows are measured at all of them.
                var far = (
                    _ratio(call.K, at.K) * _ratio(call.N, at.N)
                ) * 1e9 + _ratio(call.M, at.M)
                if far < nearest:
                    nearest = far
                    way = at.training if follows else at.forward
    return way


def _ratio(a: Int, b: Int) -> Float64:
    """Divides the larger by the smaller."""
    return Float64(max(a, b)) / Float64(max(min(a, b), 1))
