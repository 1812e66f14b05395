"""The norm before a product, forward: sum, z, mean and rstd from x and a residual."""

from ..call import Call
from ..rows.operands import Operands, accumulator
from ..rows.programs.norm import RMS_NORM, NormForward, NormGiven
from ..rows.types import code_of
from .modulation import Modulation, folded_bytes, is_folded, read_in_place
from .runner import Runner


def normalize_bytes[dtype: DType](call: Call) -> Int:
    """Returns the size of the workspace of `run_normalize`.

    Parameters:
        dtype: The type of x.

    Args:
        call: Sizes.

    Returns:
        The number of bytes.
    """
    return folded_bytes[accumulator[dtype]()](call)


def run_normalize[
    dtype: DType, ftype: DType, R: Runner
](runner: R, call: Call) raises:
    """Writes which of sum, z, mean and rstd are wanted.

    Parameters:
        dtype: The type of x.
        ftype: The type of the features: that of gamma and beta, or of scale and shift, or that of sums where
            `has_wide_features`.
        R: What runs it.

    Args:
        runner: Where to run.
        call: The tensors.

    Raises:
        If a launch fails.
    """
    fold_modulation[dtype](runner, call)
    var rows = affine_operands[dtype](call)
    rows.inputs[0] = Int64(call.x)
    rows.residual = Int64(call.residual)
    rows.sum = Int64(call.sum)
    rows.outputs[0] = Int64(call.z)
    if call.has_statistics != 0:
        set_saved(rows, call)
    else:
        if rows.kind != RMS_NORM:
            rows.results[0] = Int64(call.mean)
        rows.results[1] = Int64(call.rstd)
        rows.number = call.eps.cast[accumulator[dtype]()]()
    comptime for has_residual in [False, True]:
        if (call.residual != 0) == has_residual:
            if call.has_statistics != 0:
                runner.run[NormGiven[has_residual], dtype, ftype](rows)
            else:
                runner.run[NormForward[has_residual], dtype, ftype](rows)


def fold_modulation[dtype: DType, R: Runner](runner: R, call: Call) raises:
    """Folds scale and shift with gamma and beta, where there are both, to the start of the workspace.

    Parameters:
        dtype: The type of x.
        R: What runs it.

    Args:
        runner: Where to run.
        call: The tensors.

    Raises:
        If a launch fails.
    """
    if is_folded(call):
        runner.modulate(_folded[dtype](call))


def _folded[dtype: DType](call: Call) -> Modulation[accumulator[dtype]()]:
    return {call, code_of[dtype](), call.workspace, False}


def affine_operands[dtype: DType](call: Call) -> Operands[accumulator[dtype]()]:
    """Names what xhat is multiplied by and what is added.

    Parameters:
        dtype: The type of x.

    Args:
        call: The tensors.

    Returns:
        Operands with features, but no inputs and outputs.
    """
    comptime accum = accumulator[dtype]()
    var rows = Operands[accum](call.M, call.K, max(call.groups, 1))
    rows.kind = Int32(call.normalization)
    rows.narrow = Int32(call.narrow)
    rows.absent[0] = 1
    if is_folded(call):
        var folded = _folded[dtype](call)
        rows.features[0] = folded.G
        rows.features[1] = folded.T
    elif call.groups != 0:
        read_in_place(rows, call)
    else:
        rows.features[0] = Int64(call.gamma)
        rows.features[1] = Int64(call.beta)
        if call.gamma != 0:
            rows.offset = call.weight_offset.cast[accum]()
    return rows


def set_saved(mut rows: Operands, call: Call):
    """Names the statistics of rows, where they are known.

    Args:
        rows: The operands.
        call: The tensors.
    """
    # a row program reads every vector it has; one that a norm does not use may be any
    rows.saved[0] = Int64(call.rstd if rows.kind == RMS_NORM else call.mean)
    rows.saved[1] = Int64(call.rstd)
