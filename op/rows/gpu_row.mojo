"""A thread's share of a row on a GPU: loads it, runs a pass on it and stores the results."""

from std.sys import size_of
from std.utils import StaticTuple

from .gpu_blocks import divided_by_scale
from .gpu_elements import (
    GlobalPointer,
    load_row,
    rounded_sum,
    store_output,
    widen,
)
from .operands import Operands, accumulator
from .program import RowProgram
from .shape import Shape
from .values import Row, Terms, Values

comptime ColumnSums[P: RowProgram, accum: DType, shape: Shape] = StaticTuple[
    SIMD[accum, shape.width], max(1, P.columns * shape.tile)
]
"""A thread's terms of sums over rows: those of the first sum's loads, then of the next.

Parameters:
    P: The row program.
    accum: The type computed in.
    shape: What a thread holds.
"""


struct RowReader[
    P: RowProgram,
    dtype: DType,
    ftype: DType,
    shape: Shape,
    in_stream: Bool = False,
](TrivialRegisterPassable):
    """What a thread holds of a row: packed inputs and features.

    Parameters:
        P: The row program.
        dtype: The type of the inputs.
        ftype: The type of the features.
        shape: What a thread holds.
        in_stream: Whether it is one of many rows: features are held as they are computed with, in more registers, and all
            loads but the last are inside of rows.
    """

    comptime width = Self.shape.width
    """Elements of one load."""
    comptime tile = Self.shape.tile
    """Loads per input."""
    comptime accum = accumulator[Self.dtype]()
    """The type computed in."""
    comptime held = Self.accum if Self.in_stream else Self.ftype
    """The type that features are held in."""
    comptime has_early_addend = Self.P.has_addend and Self.tile == 1
    """Whether registers suffice to load what is added to the first output ahead of the sums over the row."""

    var inputs: StaticTuple[
        SIMD[Self.dtype, Self.width], max(1, Self.P.inputs * Self.tile)
    ]
    """Loads of the first input, then of the next."""
    var features: StaticTuple[
        SIMD[Self.held, Self.width], max(1, Self.P.features * Self.tile)
    ]
    """Loads of the first feature, then of the next."""
    var addend: SIMD[Self.dtype, Self.width]
    """What is added to the first output, if it is loaded early."""
    var row: Row[Self.accum]
    """What the stages may know of the row."""

    @always_inline
    def __init__(out self):
        """Holds zeros."""
        self.inputs = {fill = 0}
        self.features = {fill = 0}
        self.addend = 0
        self.row = Row[Self.accum](0, 0, {}, {}, 0, 0, 0)

    @always_inline
    def load_inputs(
        mut self,
        operands: Operands[Self.accum],
        row: Int,
        start: Int32,
        step: Int32,
    ):
        """Loads the facts of a row and its elements start, start + step, ...; beyond its end, the last ones.

        Args:
            operands: The tensors.
            row: The row's index.
            start: The first element's index.
            step: The distance of two loads.
        """
        self.row = load_row[Self.P, Self.dtype](operands, row)
        comptime for k in range(Self.P.inputs):
            comptime stride = 2 if k >= Self.P.first_half_input else 1
            comptime for i in range(Self.tile):
                self.inputs[k * Self.tile + i] = Self._load(
                    operands,
                    operands.inputs[k],
                    row * stride,
                    start + Int32(i) * step,
                )
        comptime if Self.P.has_residual:
            comptime for i in range(Self.tile):
                self.inputs[i] = rounded_sum(
                    self.inputs[i],
                    Self._load(
                        operands,
                        operands.residual,
                        row,
                        start + Int32(i) * step,
                    ),
                )

    @always_inline
    def load_addend(
        mut self,
        operands: Operands[Self.accum],
        row: Int,
        start: Int32,
        step: Int32,
    ):
        """Loads what is added to the first output of the same elements, if registers suffice.

        Args:
            operands: The tensors.
            row: The row's index.
            start: The first element's index.
            step: The distance of two loads.
        """
        comptime if Self.has_early_addend:
            self.addend = Self._load(operands, operands.addend, row, start)

    @always_inline
    @staticmethod
    def _load(
        operands: Operands[Self.accum], tensor: Int64, row: Int, column: Int32
    ) -> SIMD[Self.dtype, Self.width]:
        """Loads some elements of a row; beyond its end, the last ones."""
        var last = operands.length - Int32(Self.width)
        return (
            GlobalPointer[Self.dtype](unsafe_from_address=Int(tensor))
            .unsafe_offset(row * Int(operands.length))
            .unsafe_offset(Int(min(column, last)))
            .unsafe_load[
                width=Self.width, alignment=Self.width * size_of[Self.dtype]()
            ]()
        )

    @always_inline
    def load_features(
        mut self,
        operands: Operands[Self.accum],
        group: Int,
        start: Int32,
        step: Int32,
    ):
        """Loads the features of the same elements.

        Args:
            operands: The tensors.
            group: The row's group.
            start: The first element's index.
            step: The distance of two loads.
        """
        comptime for k in range(Self.P.features):
            if operands.features[k] != 0:
                var address = GlobalPointer[Self.ftype](
                    unsafe_from_address=Int(operands.features[k])
                )
                address = address.unsafe_offset(
                    group * Int(operands.feature_pitch)
                )
                comptime for i in range(Self.tile):
                    var column = min(
                        start + Int32(i) * step,
                        operands.length - Int32(Self.width),
                    )
                    self.features[k * Self.tile + i] = Self._held[k](
                        operands,
                        address.unsafe_offset(Int(column)).unsafe_load[
                            width=Self.width,
                            alignment=min(
                                16, Self.width * size_of[Self.ftype]()
                            ),
                            invariant=True,
                        ](),
                    )
            else:
                comptime for i in range(Self.tile):
                    self.features[k * Self.tile + i] = Self._held[k](
                        operands, operands.absent[k].cast[Self.ftype]()
                    )

    @always_inline
    @staticmethod
    def _held[
        k: Int
    ](
        operands: Operands[Self.accum], feature: SIMD[Self.ftype, Self.width]
    ) -> SIMD[Self.held, Self.width]:
        """Returns elements of a feature as they are held."""
        comptime if not Self.in_stream:
            return rebind[SIMD[Self.held, Self.width]](feature)
        var wide = widen[Self.accum](feature)
        comptime if k == 0:
            wide += operands.offset
        return rebind[SIMD[Self.held, Self.width]](wide)

    @always_inline
    def values(
        self, operands: Operands[Self.accum], i: Int
    ) -> Values[Self.accum, Self.width]:
        """Returns the values of the i-th load's elements.

        Args:
            operands: The tensors.
            i: Which load.

        Returns:
            Inputs, then features.
        """
        var v = Values[Self.accum, Self.width]()
        comptime for k in range(Self.P.inputs):
            v[k] = widen[Self.accum](self.inputs[k * Self.tile + i])
        comptime for k in range(Self.P.features):
            v[Self.P.inputs + k] = widen[Self.accum](
                self.features[k * Self.tile + i]
            )
            comptime if k == 0 and not Self.in_stream:
                v[Self.P.inputs] += operands.offset
        return v

    @always_inline
    def take[
        pass_index: Int
    ](
        self,
        operands: Operands[Self.accum],
        index: Int,
        start: Int32,
        step: Int32,
        totals: Terms[Self.accum, 1],
        mut sums: Terms[Self.accum, 1],
        mut columns: ColumnSums[Self.P, Self.accum, Self.shape],
    ):
        """Takes the elements through a pass: adds their terms or, in the last pass, stores their outputs.

        The terms of one load are reduced before the test for the row's end: that takes one selection instead
        of one for each element, and no branch keeps the compiler from sharing work between passes.

        Parameters:
            pass_index: The pass.

        Args:
            operands: The tensors.
            index: The row's index.
            start: The first element's index.
            step: The distance of two loads.
            totals: The totals of earlier passes.
            sums: Receives the terms.
            columns: Receives the terms of sums over rows.
        """
        comptime for i in range(Self.tile):
            var column = start + Int32(i) * step
            var valid = True
            comptime if not Self.in_stream or i == Self.tile - 1:
                valid = column < operands.length
            var terms = Terms[Self.accum, Self.width](
                fill=Values[Self.accum, Self.width]()
            )
            var v = Self.P.visit[pass_index](
                self.row, self.values(operands, i), totals, terms
            )
            comptime for s in range(Self.P.stages):
                comptime if Self.P.pass_of(s) == pass_index:
                    comptime redo = Self.P.Stages[s].redo
                    var sum = sums[s]
                    comptime for t in range(Self.P.Stages[s].terms):
                        var with_load = materialize[redo]().combine[
                            Self.accum, 1
                        ](sum[t], materialize[redo]().across(terms[s][t]))
                        sum[t] = with_load if valid else sum[t]
                    sums[s] = sum
            comptime if pass_index == Self.P.passes:
                comptime if Self.P.block_scales:
                    v[0] = divided_by_scale[Self.P](
                        operands, self.row.kind, index, column, v[0], valid
                    )
                comptime for c in range(Self.P.columns):
                    columns[c * Self.tile + i] += v[Self.P.outputs + c]
                if valid:
                    self.store(operands, index, i, column, v)

    @always_inline
    def store_sum(
        self, operands: Operands[Self.accum], index: Int, i: Int, column: Int32
    ):
        """Stores the sums of inputs and residuals, if there are residuals and the sums are wanted.

        Args:
            operands: The tensors.
            index: The row's index.
            i: Which load they are of.
            column: The first element's index.
        """
        comptime if Self.P.has_residual:
            if operands.sum != 0:
                GlobalPointer[Self.dtype](
                    unsafe_from_address=Int(operands.sum)
                ).unsafe_offset(
                    index * Int(operands.length) + Int(column)
                ).unsafe_store[
                    alignment=Self.width * size_of[Self.dtype]()
                ](
                    self.inputs[i]
                )

    @always_inline
    def store(
        self,
        operands: Operands[Self.accum],
        index: Int,
        i: Int,
        column: Int32,
        v: Values[Self.accum, Self.width],
    ):
        """Stores the outputs of some elements.

        Args:
            operands: The tensors.
            index: The row's index.
            i: Which load they were.
            column: The first element's index.
            v: What the program made of them.
        """
        comptime if not Self.in_stream:
            self.store_sum(operands, index, i, column)
        comptime for k in range(Self.P.outputs):
            if operands.outputs[k] != 0:
                var output = v[k]
                comptime if Self.P.has_addend and k == 0:
                    var addend = self.addend
                    comptime if not Self.has_early_addend:
                        addend = Self._load(
                            operands, operands.addend, index, column
                        )
                    output += widen[Self.accum](addend)
                store_output[Self.P, Self.dtype, k, Self.width](
                    operands, index, column, output
                )
