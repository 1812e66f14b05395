"""Normalizes and rotates heads of dense tensors on a GPU, forward and backward: a few lanes a head, which stays in registers."""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx
from std.math import ceildiv
from std.sys import size_of
from std.utils import StaticTuple

from ..argument import KernelArgument
from ..pdl import pdl_trigger, pdl_wait
from ..rows.operands import accumulator
from .call import RotaryCall
from .divisor import Divisor
from .dense_factors import Angles, angles_at, gamma_at
from .lanes import THREADS, store_sums, width_of
from .math import backward_of, forward_of, rstds_of
from .pair import Pair
from .shares import Share, Spot, Tensor
from .way import Slice, Way, shares_of_row

# Blocks that an SM has room for: enough loads in flight for the memory's speed. Wide elements take more registers, and
# so does a norm.
comptime _BLOCKS[dtype: DType, way: Way] = 2 if size_of[dtype]() > 2 else (
    3 if way.is_normalized else 4
)


struct Grid[way: Way](KernelArgument, TrivialRegisterPassable):
    """Which blocks of a launch have which shares: those of x, then those of the second tensor.

    Parameters:
        way: What is done with them.
    """

    var log_lanes: Int32
    """The binary logarithm of the lanes of a head."""
    var blocks: Int32
    """How many blocks have heads of x."""
    var size: Int32
    """Shares of a block."""
    var row: Divisor
    """Divides by the shares of a row of x."""
    var second_row: Divisor
    """Divides by those of a row of the second tensor."""
    var positions: Divisor
    """Divides by the rows of cosines."""

    def __init__(out self, call: RotaryCall, log_lanes: Int):
        """Divides the heads: one share for each group of lanes, or what the parts of a gradient of gamma are.

        Args:
            call: The heads.
            log_lanes: The binary logarithm of the lanes of a head.
        """
        var of_row = Int(shares_of_row[Self.way](UInt32(call.heads)))
        var of_second = Int(shares_of_row[Self.way](UInt32(call.second_heads)))
        var size = THREADS >> log_lanes
        var blocks = ceildiv(call.M * of_row, size)
        if call.dgamma != 0:
            blocks = call.parts
            size = ceildiv(call.M * of_row, blocks)
        self.log_lanes = Int32(log_lanes)
        self.blocks = Int32(blocks)
        self.size = Int32(size)
        self.row = Divisor(of_row)
        self.second_row = Divisor(max(1, of_second))
        self.positions = Divisor(max(1, call.positions))

    def all_blocks(self, call: RotaryCall) -> Int:
        """Counts the blocks of a launch.

        Args:
            call: The heads.

        Returns:
            How many.
        """
        var of_second = shares_of_row[Self.way](UInt32(call.second_heads))
        return Int(self.blocks) + ceildiv(
            call.M * Int(of_second), Int(self.size)
        )


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)),
    `nvvm.minctasm`=SIMDLength(_BLOCKS[dtype, way]),
)
def dense_kernel[dtype: DType, way: Way](call: RotaryCall, grid: Grid[way]):
    """Normalizes and rotates heads, or computes the gradient of that.

    Grid: what `grid` counts. Block: THREADS threads, a power of two for some heads of one row.

    Parameters:
        dtype: The type of x, y and their gradients.
        way: What is done.

    Args:
        call: The heads.
        grid: Which blocks have which of them.
    """
    comptime accum = accumulator[dtype]()
    comptime width = width_of[dtype]()
    comptime if way.is_backward:
        pdl_wait()
        pdl_trigger()
    var block = Int32(block_idx.x)
    var is_second = False
    comptime if not way.is_backward:
        is_second = block >= grid.blocks
    if is_second:
        block -= grid.blocks
    var gamma = call.second_gamma if is_second else call.gamma
    var output = call.dx
    comptime if not way.is_backward:
        output = call.second_y if is_second else call.y
    var slice = Slice[dtype, way](call, grid.log_lanes)
    var tensor = Tensor[way](
        call, is_second, slice.D, grid.second_row if is_second else grid.row
    )
    var begin = UInt32(block) * UInt32(grid.size)
    var end = min(UInt32(block + 1) * UInt32(grid.size), tensor.shares)
    var groups = UInt32(slice.lane.groups)
    var group = UInt32(slice.lane.group)
    # A forward locates what it loads while the kernel before ends.
    var spot = Spot(tensor, begin + group, end, call, grid.positions)
    comptime if not way.is_backward:
        pdl_wait()
        pdl_trigger()
    var share = Share(tensor, spot, call, slice)
    var g = Pair[accum, width](1, 1)
    comptime if way.is_normalized:
        g = gamma_at[dtype, accum, width](call, gamma, tensor.x, slice.places)
    var sums = Pair[accum, width](0, 0)
    comptime if way.sums():
        # A part may have no heads.
        while begin < end:
            _run(call, share, slice, g, output, sums)
            begin += groups
            if begin < end:
                spot = Spot(tensor, begin + group, end, call, grid.positions)
                share = Share(tensor, spot, call, slice)
        if call.dgamma != 0:
            store_sums[accum, width](
                sums,
                slice.D,
                slice.places,
                slice.has_pair,
                slice.lane,
                call.dgamma,
            )
    else:
        _run(call, share, slice, g, output, sums)


@always_inline
def _run[
    dtype: DType, way: Way, accum: DType, width: Int, //
](
    call: RotaryCall,
    share: Share[dtype, way],
    slice: Slice[dtype, way],
    g: Pair[accum, width],
    output: Int,
    mut sums: Pair[accum, width],
):
    """Computes and stores the results of a share."""
    var angles = Angles[accum, width]()
    if slice.places.is_rotated:
        angles = angles_at[accum, width](call, share.angles, slice)
    var rstds = rstds_of[accum](share, slice, call.eps)
    comptime if way.is_backward:
        var gradients = backward_of(share, slice, angles, g, rstds, sums)
        share.store(gradients, output, slice)
    else:
        var results = forward_of(share, slice, angles, g, rstds)
        share.store(results, output, slice)
