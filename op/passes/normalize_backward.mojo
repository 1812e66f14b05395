"""The passes of a backward of norm + Linear, around its products.

    dz = dy W;  dx, dgamma, dbeta, dscale, dshift from dz and x;  z again;  dbias = sum over rows dy;  dW = dy^T z

There is one pass over dz and x and one over dy. Sums over rows add partial sums in a fixed order.
"""

from std.math import align_up

from ..call import Call
from ..rows.operands import Addresses, Operands, Sums, accumulator
from ..rows.programs.column_sum import ColumnSum, Nothing
from ..rows.programs.norm import NormBackward, NormGiven
from ..rows.types import code_of
from .modulation import Modulation, folded_bytes, is_folded
from .normalize import affine_operands, fold_modulation, set_saved
from .runner import Runner


@fieldwise_init
struct Workspace(TrivialRegisterPassable):
    """Where the parts of the workspace begin, after G and T at its start."""

    var over_rows: Bool
    """Whether there are sums over rows."""
    var unfolds: Bool
    """Whether dG and dT are needed for several gradients."""
    var partial: Int
    """Partial sums of the norm's gradients."""
    var gradients: Int
    """DG and dT."""
    var over_groups: Int
    """Partial sums of dgamma and dbeta over the groups."""
    var dbias: Int
    """Partial sums of dbias."""
    var bytes: Int
    """The whole size."""


def workspace[
    dtype: DType, product_dtype: DType, R: Runner
](runner: R, call: Call) -> Workspace:
    """Lays out the workspace by what there is and what is wanted.

    Parameters:
        dtype: The type of x.
        product_dtype: The type of dy.
        R: What runs it.

    Args:
        runner: Where to run.
        call: Sizes, and which tensors there are and are wanted.

    Returns:
        The layout.
    """
    comptime accum = accumulator[dtype]()
    var over_rows = (call.dgamma | call.dbeta | call.dscale | call.dshift) != 0
    var over_groups = (call.dgamma | call.dbeta) != 0
    var unfolds = is_folded(call) and over_rows
    var partial = folded_bytes[accum](call)
    var gradients = partial
    if over_rows:
        gradients += align_up(
            runner.sums_bytes[NormBackward[], dtype](
                call.M, call.K, max(call.groups, 1)
            ),
            16,
        )
    var sums = gradients
    var dbias = gradients
    if unfolds:
        sums += folded_bytes[accum](call)
        dbias = sums
        if over_groups:
            dbias += 2 * _over_groups_bytes[accum](runner, call)
    var bytes = dbias
    if call.dbias != 0:
        bytes += runner.sums_bytes[ColumnSum, product_dtype](call.M, call.N)
    return {over_rows, unfolds, partial, gradients, sums, dbias, bytes}


def _over_groups_bytes[accum: DType, R: Runner](runner: R, call: Call) -> Int:
    return align_up(
        runner.sums_bytes[ColumnSum, accum](call.groups, call.K), 16
    )


def run_normalize_backward[
    dtype: DType, ftype: DType, R: Runner
](mut runner: R, call: Call, space: Workspace) raises:
    """Writes which of dx, z, dgamma, dbeta, dscale and dshift are wanted.

    Parameters:
        dtype: The type of x.
        ftype: The type of the features, as for `run_normalize`.
        R: What runs it.

    Args:
        runner: Where to run.
        call: The tensors; dz is not needed for z alone.
        space: The layout of the workspace.

    Raises:
        If a launch fails.
    """
    comptime accum = accumulator[dtype]()
    if (call.dx | call.z) == 0 and not space.over_rows:
        return
    fold_modulation[dtype](runner, call)
    var rows = affine_operands[dtype](call)
    set_saved(rows, call)
    if call.dx == 0 and not space.over_rows:
        rows.inputs[0] = Int64(call.x)
        rows.outputs[0] = Int64(call.z)
        return runner.run[NormGiven[], dtype, ftype](rows)
    rows.inputs[0] = Int64(call.dz)
    rows.inputs[1] = Int64(call.x)
    rows.outputs[0] = Int64(call.dx)
    rows.outputs[1] = Int64(call.z)
    rows.addend = Int64(call.dsum)
    var gradients = Modulation[accum](
        call, code_of[dtype](), call.workspace + space.gradients, True
    )
    var sums = Sums(Addresses(fill=0), gradients.norm_type)
    if space.over_rows:
        rows.column_sums = Int64(call.workspace + space.partial)
        if space.unfolds:
            sums.type = code_of[accum]()
            sums.outputs[0] = gradients.G
            sums.outputs[1] = gradients.T
        elif call.groups != 0:
            sums.type = code_of[dtype]()
            sums.outputs[0] = Int64(call.dscale)
            sums.outputs[1] = Int64(call.dshift)
        else:
            sums.outputs[0] = Int64(call.dgamma)
            sums.outputs[1] = Int64(call.dbeta)
    comptime for has_addend in [False, True]:
        if (call.dsum != 0) == has_addend:
            runner.run_with_sums[
                NormBackward[2, has_addend],
                NormBackward[0, has_addend],
                dtype,
                ftype,
            ](rows, sums)
    if space.unfolds:
        runner.finish()
        runner.modulate(gradients)
        var size = _over_groups_bytes[accum](runner, call)
        var partial = call.workspace + space.over_groups
        _sum_rows[accum](
            runner,
            call.groups,
            call.K,
            gradients.G,
            partial,
            call.dgamma,
            gradients.norm_type,
        )
        _sum_rows[accum](
            runner,
            call.groups,
            call.K,
            gradients.T,
            partial + size,
            call.dbeta,
            gradients.norm_type,
        )


def _sum_rows[
    dtype: DType, R: Runner
](
    mut runner: R,
    count: Int,
    length: Int,
    input: Int64,
    partial: Int,
    output: Int,
    type: Int32,
) raises:
    """Sums the rows of a matrix, if that is wanted."""
    if output == 0:
        return
    var rows = Operands[accumulator[dtype]()](count, length)
    rows.inputs[0] = input
    rows.column_sums = Int64(partial)
    var sums = Sums(Addresses(fill=0), type)
    sums.outputs[0] = Int64(output)
    runner.run_with_sums[ColumnSum, Nothing, dtype, dtype](rows, sums)


def run_dbias[
    product_dtype: DType, R: Runner
](mut runner: R, call: Call, space: Workspace) raises:
    """Writes dbias, if it is wanted.

    Parameters:
        product_dtype: The type of dy.
        R: What runs it.

    Args:
        runner: Where to run.
        call: The tensors.
        space: The layout of the workspace.

    Raises:
        If a launch fails.
    """
    _sum_rows[product_dtype](
        runner,
        call.M,
        call.N,
        Int64(call.dy),
        call.workspace + space.dbias,
        call.dbias,
        code_of[product_dtype](),
    )
