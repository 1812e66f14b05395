"""The backward of grouped Linear layers.

    input       dz = sum over i of dy_i weight_i: its sums continue through all of the weights
    rows        the same, and the pass over its rows in the same kernel, where it takes long enough
"""

from ...call import Call
from ...device import Launcher
from ...gemm.epilogues import Plain
from ...gemm.row_hook import NoHook
from ...gemm.sm90.config import Config
from ...gemm.sm90.launch_matrix import BAND, launch_parts
from ...gemm.sm90.parts import Matrices
from ...gemm.sm90.parts import ONE_SUM
from ...gemm.sm90.product import Product
from ...gemm.sm90.tiling import Tiling
from ...norms.norm import Norm
from ..plan import DECLINED, FUSED
from .launch_row_pass import RowPassLayout, launch_row_pass, pays
from .parts import InputGradient, sizes_of
from .grouped import COLUMNS, can, fills

comptime _SUM = Config.of(
    COLUMNS, b_transposed=True, ping_pong=True, parts=ONE_SUM
)


# What a tile as narrow as COLUMNS takes, in percent of cuBLAS's, and the columns of all dy that cuBLAS multiplies in
# the time in which another launch reads and writes dz (benchmarks/results/h100-backward-products.json).
comptime _NARROW_PERCENT = 110
comptime _COLUMNS_OF_PASS = 496


def can_add_up[dtype: DType](call: Call, processors: Int) -> Bool:
    """Tells whether one launch that adds up dy weight of all pairs keeps the device busy.

    Parameters:
        dtype: Type of all.

    Args:
        call: The call.
        processors: SMs of the device.

    Returns:
        Whether its tiles do.
    """
    return can[dtype](call) and fills(_tiling(call, processors))


def input_gradients_pay[dtype: DType](call: Call, processors: Int) -> Bool:
    """Tells whether one launch adds up dy weight of all pairs sooner than one for each.

    Parameters:
        dtype: Type of all.

    Args:
        call: The call.
        processors: SMs of the device.

    Returns:
        Whether it does. Over long sums, cuBLAS's wider tiles gain more than its passes over dz cost.
    """
    if not can_add_up[dtype](call, processors):
        return False
    var ours = _NARROW_PERCENT * call.N // _tiling(call, processors).percent
    return ours <= call.N + _COLUMNS_OF_PASS * (call.part_count - 1)


def _tiling(call: Call, processors: Int) -> Tiling:
    return Tiling.best(call.M, call.K, call.N, processors, common=True)


def plan_input_gradients[dtype: DType](launcher: Launcher, mut call: Call):
    """Chooses the strategy of dz = sum over i of dy_i weight_i.

    Parameters:
        dtype: Type of all.

    Args:
        launcher: Where to run.
        call: The call; its strategy is written, FUSED or DECLINED. It needs no workspace.
    """
    call.workspace_bytes = 0
    call.strategy = DECLINED
    if input_gradients_pay[dtype](call, launcher.gpu.processors):
        call.strategy = FUSED


def input_gradients[dtype: DType](launcher: Launcher, call: Call) raises:
    """Queues dz = sum over i of dy_i weight_i.

    Parameters:
        dtype: Type of all: bfloat16 or float16.

    Args:
        launcher: Where to run.
        call: A call that `plan_input_gradients` did not decline.

    Raises:
        If the driver refuses.
    """
    var product = Product(call.M, call.K, call.N, Plain(), NoHook())
    product.band = BAND
    product.sizes = sizes_of(call)
    var of = InputGradient(call)
    launch_parts[dtype, _SUM](
        launcher.gpu, Matrices(call.dz), of.gradients, of.weights, product
    )


def plan_passed_rows[dtype: DType](launcher: Launcher, mut call: Call):
    """Chooses whether one kernel makes dz and passes over its rows.

    Parameters:
        dtype: Type of the matrices.

    Args:
        launcher: Where to run.
        call: The call; its strategy is written, FUSED or DECLINED, and the bytes of its workspace.
    """
    ref gpu = launcher.gpu
    call.strategy = DECLINED
    call.workspace_bytes = 0
    # Its grid waits until all of its blocks run, so it would wait for a collective, too.
    if (
        launcher.alone
        and call.dx != 0
        and can_add_up[dtype](call, gpu.processors)
        and pays(gpu.processors, call.M, call.N, call.K)
    ):
        call.strategy = FUSED
        call.workspace_bytes = RowPassLayout(call.M, call.K).end


def passed_rows[dtype: DType, N: Norm](launcher: Launcher, call: Call) raises:
    """Queues dx, dgamma and dbeta of all Linear layers, and the normalized rows in the place of dz.

    Parameters:
        dtype: Type of the matrices: bfloat16 or float16.
        N: The norm.

    Args:
        launcher: Where to run.
        call: A call that `plan_passed_rows` did not decline.

    Raises:
        If the driver refuses.
    """
    comptime for is_float32 in [False, True]:
        if (call.norm_is_float32 != 0) == is_float32:
            launch_row_pass[dtype, DType.float32 if is_float32 else dtype, N](
                launcher.gpu, call, call.dz, call.workspace
            )
