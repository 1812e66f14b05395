"""Runs the parts of a pass on a GPU's stream."""

from max.gpu import block_dim, block_idx, thread_idx
from max.gpu.memory import AddressSpace
from std.math import ceildiv

from ..call import Call
from ..device import Gpu, Launcher
from ..pdl import pdl_attributes, pdl_trigger, pdl_wait
from ..rows.columns import Totals
from ..rows.launch import launch_rows
from ..rows.launch_columns import (
    column_sums_bytes,
    launch_columns,
    launch_rows_and_columns,
    launch_totals,
)
from ..rows.operands import Addresses, Operands, Sums, accumulator
from ..rows.program import RowProgram
from .modulation import Modulation
from .runner import Runner

comptime _THREADS = 256


struct GpuRunner[sum_type: DType](Runner):
    """Queues a pass; partial sums that it leaves are added up together.

    Parameters:
        sum_type: The type of sums.
    """

    var gpu: Gpu
    """The device and the stream."""
    var totals: Totals
    """What is left to add up."""

    def __init__(out self, gpu: Gpu):
        """Has nothing to add up yet.

        Args:
            gpu: The device and the stream.
        """
        self.gpu = gpu.copy()
        self.totals = Totals()

    @doc_hidden
    @staticmethod
    def of(call: Call) -> Self:
        return Self(Launcher.at(call.context)[].gpu)

    @doc_hidden
    def run[
        P: RowProgram, dtype: DType, ftype: DType
    ](self, operands: Operands[accumulator[dtype]()]) raises:
        comptime if P.passes == 0:
            var none = Totals()
            launch_columns[P, dtype, ftype](
                self.gpu, operands, Sums(Addresses(fill=0), 0), none
            )
        else:
            launch_rows[P, dtype, ftype](self.gpu, operands)

    @doc_hidden
    def run_with_sums[
        P: RowProgram, without_columns: RowProgram, dtype: DType, ftype: DType
    ](mut self, operands: Operands[accumulator[dtype]()], sums: Sums) raises:
        comptime if P.passes > 0:
            launch_rows_and_columns[P, without_columns, dtype, ftype](
                self.gpu, operands, sums, self.totals
            )
        else:
            if sums.any():
                launch_columns[P, dtype, ftype](
                    self.gpu, operands, sums, self.totals
                )
            else:
                comptime if without_columns.outputs > 0:
                    self.run[without_columns, dtype, ftype](operands)

    @doc_hidden
    def sums_bytes[
        P: RowProgram, dtype: DType
    ](self, rows: Int, length: Int, groups: Int = 1) -> Int:
        return column_sums_bytes[P, dtype](self.gpu, rows, length, groups)

    @doc_hidden
    def modulate[accum: DType](self, modulation: Modulation[accum]) raises:
        comptime kernel = modulation_kernel[accum]
        var compiled = self.gpu.context.compile_function[kernel]()
        self.gpu.stream.enqueue_function(
            compiled,
            modulation,
            grid_dim=(
                ceildiv(Int(modulation.length), _THREADS),
                Int(modulation.groups),
            ),
            block_dim=_THREADS,
            attributes=pdl_attributes(),
        )

    @doc_hidden
    def finish(mut self) raises:
        launch_totals[Self.sum_type](self.gpu, self.totals)
        self.totals = Totals()


def modulation_kernel[accum: DType](modulation: Modulation[accum]):
    """Runs a modulation at every element of its vectors.

    Grid: (K / _THREADS, groups). Block: _THREADS threads, one for each column.

    Parameters:
        accum: The type computed in.

    Args:
        modulation: The vectors.
    """
    pdl_wait()
    pdl_trigger()
    var column = block_idx.x * block_dim.x + thread_idx.x
    if column < Int(modulation.length):
        modulation.at[AddressSpace.GLOBAL](block_idx.y, column)
