"""Launch of dz = dy W and the pass over its rows as one kernel.

Its warps wait for rows that other blocks compute, so all blocks have to run at the
same time. The launch is cooperative: two such grids on two streams could otherwise
each keep the other's blocks from starting.
"""

from std.math import align_up, ceildiv
from std.utils import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    block_dim,
    block_idx,
    grid_dim,
    thread_idx,
)

from ...call import Call
from ...device import Gpu
from ...gemm.epilogues import Plain
from ...gemm.sm90.config import Config
from ...gemm.sm90.counters import SLICE_ROWS, Counter
from ...gemm.sm90.launch_matrix import launch_matrix, launch_parts
from ...gemm.sm90.parts import ONE_SUM, Matrices
from ...gemm.sm90.product import Product
from ...norms.norm import Norm
from ...pdl import pdl_attributes, pdl_trigger, pdl_wait
from ...rows.columns import Total, Totals
from ...rows.gpu_elements import GlobalPointer
from ...rows.launch_columns import launch_totals
from ...rows.types import code_of
from .parts import InputGradient, sizes_of
from .row_pass import RowPass
from .workspace import PART

comptime _CONFIG = Config.of(256, b_transposed=True)
comptime _SUM = Config.of(256, b_transposed=True, parts=ONE_SUM)
# Cluster tiles in a band of the walk: rows wait for those of the same band.
comptime _BAND = 4
# From this many outputs on, a product takes as long as the pass over its rows.
comptime _FEWEST_OUTPUTS = 2048
# Halves of a wave of rows: the pass over the last wave is not hidden.
comptime _FEWEST_HALVES = 9
comptime _PREPARE_THREADS = 256


@fieldwise_init
struct RowPassLayout(TrivialRegisterPassable):
    """What the kernel needs in addition to its tensors, in bytes from its start, where
    the counters are."""

    var slices: Int
    """Slices of tiles, which reach beyond the last row."""
    var counters: Int
    """Two for each slice, and the ticket."""
    var affine: Int
    """Gamma and beta in float32."""
    var factors: Int
    """Factors of rows."""
    var sums: Int
    """Sums over the rows of each slice."""
    var end: Int
    """Its size."""

    def __init__(out self, m: Int, k: Int):
        """Lays out the workspace.

        Args:
            m: Rows.
            k: Features.
        """
        self.slices = align_up(m, _CONFIG.cluster_rows()) // SLICE_ROWS
        self.counters = 2 * self.slices + 1
        self.affine = align_up(4 * self.counters, PART)
        self.factors = self.affine + align_up(8 * k, PART)
        self.sums = self.factors + align_up(16 * m, PART)
        self.end = self.sums + 8 * self.slices * k


def pays(processors: Int, m: Int, n: Int, k: Int) -> Bool:
    """Tells whether one kernel is faster than a product and a pass.

    Args:
        processors: SMs of the device.
        m: Rows.
        n: Outputs.
        k: Features.

    Returns:
        Whether most of the pass hides behind the product, and its tiles are
        those that are fastest.
    """
    return n >= _FEWEST_OUTPUTS and 2 * m >= _FEWEST_HALVES * _rows_of_wave(
        processors, k
    )


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
        Int32(_PREPARE_THREADS)
    )
)
@__name(t"fused_norm_prepare_{norm_dtype}")
def prepare_kernel[
    norm_dtype: DType
](
    counters: Counter,
    count: Int32,
    affine: Int64,
    gamma: Int64,
    beta: Int64,
    length: Int32,
    offset: Float32,
):
    """Sets counters to zero, and converts gamma and beta to float32.

    Grid: a thread for each counter and each feature. Block: _PREPARE_THREADS threads.

    Parameters:
        norm_dtype: Type of gamma and beta.

    Args:
        counters: The counters.
        count: How many there are.
        affine: Address of both in float32 [2, length], to write.
        gamma: Address of the norm's weight [length]; 0 stands for ones.
        beta: Address of the norm's bias [length]; 0 stands for zeros.
        length: K.
        offset: Added to gamma, if there is one.
    """
    pdl_wait()
    pdl_trigger()
    var first = Int(block_idx.x * block_dim.x + thread_idx.x)
    var step = Int(grid_dim.x * block_dim.x)
    for i in range(first, Int(count), step):
        counters.unsafe_offset(i).unsafe_store(0)
    for i in range(first, Int(length), step):
        var own = _read[norm_dtype](gamma, i, 1)
        _write(affine, i, own + offset if gamma != 0 else own)
        _write(affine, Int(length) + i, _read[norm_dtype](beta, i, 0))


@always_inline
def _read[dtype: DType](address: Int64, index: Int, absent: Float32) -> Float32:
    if address == 0:
        return absent
    return (
        GlobalPointer[dtype](unsafe_from_address=Int(address))
        .unsafe_offset(index)
        .unsafe_load()
        .cast[DType.float32]()
    )


@always_inline
def _write(address: Int64, index: Int, value: Float32):
    GlobalPointer[DType.float32](
        unsafe_from_address=Int(address)
    ).unsafe_offset(index).unsafe_store(value)


def launch_row_pass[
    dtype: DType, norm_dtype: DType, N: Norm
](gpu: Gpu, call: Call, dz: Int, workspace: Int) raises:
    """Queues dz = dy W, or the sum of that over several Linear layers, then dx, z, dgamma and dbeta from its rows.

    Parameters:
        dtype: Type of the matrices: bfloat16 or float16.
        norm_dtype: Type of gamma, beta and their gradients.
        N: The norm.

    Args:
        gpu: Where to run.
        call: The tensors, all matrices from multiples of 16 bytes on.
        dz: Address of dz [M, K], and of z in its place.
        workspace: Address of the memory that `RowPassLayout` lays out.

    Raises:
        If the driver refuses.
    """
    comptime for adds in [False, True]:
        if (call.dsum != 0) == adds:
            _launch[dtype, norm_dtype, N, adds](gpu, call, dz, workspace)


def _launch[
    dtype: DType, norm_dtype: DType, N: Norm, adds: Bool
](gpu: Gpu, call: Call, dz: Int, workspace: Int) raises:
    var m = call.M
    var k = call.K
    var own = RowPassLayout(m, k)
    var stored = Counter(unsafe_from_address=workspace)
    var summed = stored.unsafe_offset(own.slices)
    var early = max(m - _rows_of_wave(gpu.processors, k), 0)
    var rows = RowPass[N, adds](
        rows=Int32(m),
        length=Int32(k),
        early=Int32(early // SLICE_ROWS * SLICE_ROWS),
        tile_columns=Int32(ceildiv(k, _CONFIG.columns)),
        z=Int64(dz),
        x=Int64(call.x),
        affine=Int64(workspace + own.affine),
        mean=Int64(call.mean),
        rstd=Int64(call.rstd),
        dx=Int64(call.dx),
        dsum=Int64(call.dsum),
        stored=stored,
        summed=summed,
        ticket=summed.unsafe_offset(own.slices),
        factors=Int64(workspace + own.factors),
        sums=Int64(workspace + own.sums),
    )
    var prepare = gpu.context.compile_function[prepare_kernel[norm_dtype]]()
    gpu.stream.enqueue_function(
        prepare,
        stored,
        Int32(own.counters),
        rows.affine,
        Int64(call.gamma),
        Int64(call.beta),
        rows.length,
        call.weight_offset.cast[DType.float32](),
        grid_dim=ceildiv(max(own.counters, k), _PREPARE_THREADS),
        block_dim=_PREPARE_THREADS,
        attributes=pdl_attributes(),
    )
    var product = Product(m, k, call.N, Plain(), rows)
    product.band = _BAND
    if call.part_count == 0:
        launch_matrix[dtype, _CONFIG](gpu, dz, call.dy, call.weight, product)
    else:
        product.sizes = sizes_of(call)
        var of = InputGradient(call)
        launch_parts[dtype, _SUM](
            gpu, Matrices(dz), of.gradients, of.weights, product
        )
    var totals = Totals()
    var parts = ceildiv(m, SLICE_ROWS)
    var partial = rows.sums
    for sum in [call.dgamma, call.dbeta]:
        totals.add(
            Total(
                Int64(sum),
                partial,
                Int32(parts),
                Int32(k),
                1,
                code_of[norm_dtype](),
            )
        )
        partial += Int64(4 * parts * k)
    launch_totals[DType.float32](gpu, totals)


def _rows_of_wave(processors: Int, k: Int) -> Int:
    """Counts the rows of the tiles that are computed at the same time."""
    var together = ceildiv(
        processors // _CONFIG.cluster, ceildiv(k, _CONFIG.columns)
    )
    return max(together, _BAND) * _CONFIG.cluster_rows()
