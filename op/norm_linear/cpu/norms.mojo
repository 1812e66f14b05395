"""The norms of CPU kernels, by the number in the record."""

from ...call import CallPointer
from ...norms.layer_norm import LayerNorm
from ...norms.no_norm import NoNorm
from ...norms.norm import Norm
from ...norms.rms_norm import RmsNorm

comptime NORMS = 3
"""How many there are; `Call.normalization` is below."""


@always_inline
def with_norm[
    dtype: DType,
    run: def[dtype: DType, ThisNorm: Norm](CallPointer) thin -> None,
](call: CallPointer):
    """Runs a pass with the call's norm.

    Parameters:
        dtype: Element type of the tensors.
        run: The pass.

    Args:
        call: The call; its plan has checked that the norm is one of these.
    """
    if call[].normalization == 1:
        run[dtype, RmsNorm](call)
    elif call[].normalization == 2:
        run[dtype, NoNorm](call)
    else:
        run[dtype, LayerNorm](call)
