"""Chooses between our product and PyTorch's on a CPU, from what was measured at the nearest sizes."""

from std.sys import CompilationTarget

from ...call import Call
from ...gemm.activation import GATED
from ..plan import FUSED
from .measured import AVX2, AVX512, MEASURED, TILES

comptime LEVEL = _level()
"""The set of instructions that the build is for, -1 for one that was not measured."""


def fastest[dtype: DType](call: Call, follows: Bool) -> Int:
    """Finds the faster way at the nearest sizes that were measured, with an activation like the call's where any was.

    Parameters:
        dtype: Element type of the tensors.

    Args:
        call: The sizes, and the activation.
        follows: Whether a backward follows, whose time counts as well.

    Returns:
        FUSED, or DECLINED for PyTorch's own product.
    """
    var way = FUSED
    var nearest = Float64.MAX
    comptime for i in range(len(MEASURED)):
        comptime at = MEASURED[i]
        comptime if at.level == LEVEL and at.dtype == dtype:
            var is_alike = _is_alike(call.activation, at.activation)
            if is_alike or at.activation == 0:
                # Distances are those of logarithms. That of the weight's
                # sizes comes first: rows are measured at all of them. The
                # product alone stands in for what was not measured.
                var far = (
                    _ratio(call.K, at.K) * _ratio(call.N, at.N)
                ) * 1e9 + _ratio(call.M, at.M)
                if not is_alike:
                    far *= 1e18
                if far < nearest:
                    nearest = far
                    way = at.training if follows else at.forward
    return way


def _level() -> Int:
    """Finds the best set that the target has."""
    if CompilationTarget._has_feature["amx-tile"]():
        return TILES
    if CompilationTarget.has_avx512f():
        return AVX512
    return AVX2 if CompilationTarget.has_avx2() else -1


def _is_alike(activation: Int, measured: Int) -> Bool:
    """Says whether two activations cost about the same: all of a gate do, and all others do."""
    return (activation == 0) == (measured == 0) and (activation >= GATED) == (
        measured >= GATED
    )


def _ratio(a: Int, b: Int) -> Float64:
    """Divides the larger by the smaller."""
    return Float64(max(a, b)) / Float64(max(min(a, b), 1))
