"""Chooses the strategy of a forward on Hopper from its sizes, its conditions, and which tensors there are.

Only bfloat16 is folded: in float16, sums far from zero lose more in the tensor cores than y in its rounding, and
rounding x itself to tf32 would lose a row whose mean is far from zero.
"""

from std.sys import size_of

from ...call import Call
from ...gemm.activation import GATED
from ...gemm.sm90.tiling import MOST_FEW_ROWS
from ..plan import AROUND_PRODUCTS, DECLINED, FUSED, KEPT_FOLD, NEW_FOLD
from .alignment import ALIGNMENT, are_aligned, behind_pass
from .costs import Costs
from .fold import products

comptime RMS_NORM = 1
"""The number of its kind in `Call.normalization`."""

# Columns of a box.
comptime _BOX = 64

# From this many outputs on, any number of them works.
comptime _FEWEST_OUTPUTS = 8


def has_kernels[dtype: DType](call: Call, any_outputs: Bool = False) -> Bool:
    """Tells whether there are kernels for a call's sizes and the alignment of its tensors.

    Parameters:
        dtype: Type of the matrices.

    Args:
        call: The sizes and the addresses.
        any_outputs: Whether threads may store y, where TMA cannot.

    Returns:
        Whether no matrix is empty, and every tensor and every row starts where TMA can read it.
    """
    var rows = call.K
    # Whoever folds takes some rows of the weight together.
    if not any_outputs or call.N < _FEWEST_OUTPUTS:
        rows |= call.N
    return (
        call.M > 0
        and call.K > 0
        and call.N > 0
        and rows * size_of[dtype]() % ALIGNMENT == 0
        and are_aligned(call)
    )


def _fold_pays(call: Call) -> Bool:
    """Tells whether a fold made anew costs less than passes over x, before PyTorch's product, and h, after it.

    An element of each takes 5, 5 and 2 units of time (docs/hopper-log.md, "The weight fold" and "Activations").
    """
    var n = products(call)
    return 5 * n * call.K < (5 * call.K + 2 * n) * call.M


def is_fold(call: Call) -> Bool:
    """Tells whether a call's weight is its own fold: nothing is taken off rows, nothing multiplies their features.

    Args:
        call: The parameters.

    Returns:
        Whether the norm is an RMSNorm without parameters; a gate's two weights have to alternate, though.
    """
    return (
        call.normalization == RMS_NORM
        and (call.gamma | call.beta) == 0
        and call.activation < GATED
    )


def fits_gate(call: Call) -> Bool:
    """Tells whether h can be stored in addition to a gate's result: boxes of h end where its halves do.

    Args:
        call: Sizes, the activation, and whether h is wanted.

    Returns:
        Whether it can; or no gate, or no h, is wanted.
    """
    return call.activation < GATED or call.h == 0 or call.N % _BOX == 0


def choose_forward[
    dtype: DType
](call: Call, costs: Costs, activates: Bool = False) -> Int:
    """Chooses the strategy of a forward.

    Parameters:
        dtype: Type of x, the weight and y.

    Args:
        call: Sizes, conditions, and the addresses of x and the parameters. Its strategy is 0, or the one to take.
        costs: What the strategies cost on the device.
        activates: Whether the product of normalized rows is ours to make, and activates them as asked.

    Returns:
        FUSED, KEPT_FOLD, NEW_FOLD or DECLINED.
    """
    # A fold reads all tensors itself.
    if (
        not has_kernels[dtype](
            behind_pass(call), any_outputs=call.activation == 0
        )
        or call.strategy == AROUND_PRODUCTS
    ):
        return DECLINED
    if not fits_gate(call):
        return DECLINED
    var strategy: Int
    comptime if dtype == DType.float32:
        strategy = call.strategy
        if strategy == 0:
            strategy = costs.fastest(
                call.M, call.K, call.N, call.in_graph != 0, False
            )
        if strategy in (NEW_FOLD, KEPT_FOLD):
            strategy = FUSED
        # No epilogue activates sums of tf32.
        if call.activation != 0:
            strategy = DECLINED
    else:
        var folds = dtype == DType.bfloat16 and are_aligned(call)
        strategy = call.strategy
        # For few rows, computing the constants takes as long as normalizing the rows.
        var needs_no_fold = is_fold(call) and call.M > MOST_FEW_ROWS
        if strategy == 0:
            strategy = costs.fastest(
                call.M,
                call.K,
                products(call),
                call.in_graph != 0,
                folds and (call.may_keep != 0 or needs_no_fold),
            )
            # PyTorch's product takes six times as long where y's rows are not aligned.
            if (
                strategy == DECLINED
                and call.N * size_of[dtype]() % ALIGNMENT != 0
            ):
                strategy = FUSED
            # Nobody has to keep what the caller has.
            if strategy == KEPT_FOLD and needs_no_fold:
                strategy = NEW_FOLD
        if strategy in (NEW_FOLD, KEPT_FOLD) and not folds:
            strategy = FUSED
        # Costs are those of plain products: tiles in which folds activate are narrower, and cost more than a pass.
        if call.strategy == 0 and call.activation != 0 and activates:
            if strategy == KEPT_FOLD:
                strategy = FUSED
        if call.activation != 0 and strategy not in (NEW_FOLD, KEPT_FOLD):
            # Otherwise only an epilogue of a fold activates.
            var pays = (
                call.strategy == 0
                and folds
                and (is_fold(call) or _fold_pays(call))
            )
            strategy = FUSED if activates else NEW_FOLD if pays else DECLINED
    return strategy
