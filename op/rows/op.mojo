"""The ops that are row programs, by name.

An entry here is all that a CPU and a GPU need (fused_norm/native/rows_cpu.mojo, rows_gpu.mojo). The chain runs them
(fused_norm/chain/rows.h); PyTorch's schemas and gradients are in fused_norm/ops/rows.py, the typed signatures of MAX
graphs in op/max/rows.mojo.
"""

from std.utils import StaticTuple

from .operands import Operands, accumulator
from .program import RowProgram
from .programs.composed import Div, DivBackward, Mean, Norm, NormBackward
from .programs.trainable_eps import (
    TrainableEpsLayerNorm,
    TrainableEpsLayerNormBackward,
)


trait RowOp:
    """An op that takes tensors [M, K] row by row through a program."""

    comptime name: StaticString
    """Its name."""
    comptime Rows: RowProgram
    """The program; its inputs and outputs are those of the op, in order."""
    comptime has_parameter_gradient: Bool
    """Whether the program's result is each row's share of the gradient of its parameter."""


struct Entry[
    name_: StaticString,
    Rows_: RowProgram,
    has_parameter_gradient_: Bool = False,
](RowOp):
    """An op.

    Parameters:
        name_: Its name.
        Rows_: The program.
        has_parameter_gradient_: Whether the program's result is a share of the parameter's gradient.
    """

    comptime name = Self.name_
    """Its name."""
    comptime Rows = Self.Rows_
    """The program."""
    comptime has_parameter_gradient = Self.has_parameter_gradient_
    """Whether the program's result is a share of the parameter's gradient."""


comptime OPS = TypeList.of[
    Trait=RowOp,
    Entry["trainable_eps_layer_norm", TrainableEpsLayerNorm],
    Entry[
        "trainable_eps_layer_norm_backward", TrainableEpsLayerNormBackward, True
    ],
    Entry["composed_mean", Mean],  # its own backward
    Entry["composed_norm", Norm],
    Entry["composed_norm_backward", NormBackward],
    Entry["composed_div", Div],
    Entry["composed_div_backward", DivBackward],
]()
"""All of the ops."""


struct RowCall(TrivialRegisterPassable):
    """A call of a row op, as entry points get it by address; fused_norm/chain/call.h has the same fields.

    Every field takes eight bytes. Tensors are dense and given by address, 0 for one that is not there or not
    wanted.
    """

    var M: Int
    """Rows."""
    var K: Int
    """Elements of a row."""
    var context: Int
    """What runs it: a `Launcher` on a GPU, `GOMP_parallel` (or 0) on a CPU."""
    var threads: Int
    """How many threads a CPU may use."""
    var accumulate: Int
    """Whether to add to the outputs and to the parameter's gradient."""
    var parameter: Int
    """A tensor of one element."""
    var parameter_is_float32: Int
    """Whether it, and its gradient, are float32 whatever the type of the rows."""
    var parameter_gradient: Int
    """Its gradient, to write."""
    var workspace: Int
    """M numbers of the type of sums, needed for that gradient."""
    var outputs: StaticTuple[Int, 2]
    """Tensors [M, K] to write."""
    var inputs: StaticTuple[Int, 3]
    """Tensors [M, K] to read; an incoming gradient comes first."""

    def __init__(out self, M: Int, K: Int):
        """Names no tensors yet.

        Args:
            M: Rows.
            K: Elements of a row.
        """
        self.M = M
        self.K = K
        self.context = 0
        self.threads = 0
        self.accumulate = 0
        self.parameter = 0
        self.parameter_is_float32 = 0
        self.parameter_gradient = 0
        self.workspace = 0
        self.outputs = {fill = 0}
        self.inputs = {fill = 0}

    @staticmethod
    def at(address: Int) -> Self:
        """Reads a record.

        Args:
            address: Where it is.

        Returns:
            A copy, which does not change.
        """
        return Pointer[Self, MutUntrackedOrigin](unsafe_from_address=address)[]

    def operands[
        Op: RowOp, dtype: DType
    ](self) -> Operands[accumulator[dtype]()]:
        """Names the tensors as the skeletons know them.

        Parameters:
            Op: The op.
            dtype: The type of the tensors.

        Returns:
            The operands of the op's program.
        """
        var operands = Operands[accumulator[dtype]()](self.M, self.K)
        comptime for i in range(Op.Rows.inputs):
            operands.inputs[i] = Int64(self.inputs[i])
        comptime for i in range(Op.Rows.outputs):
            operands.outputs[i] = Int64(self.outputs[i])
        operands.accumulate = self.accumulate != 0
        operands.parameter = Int64(self.parameter)
        operands.parameter_is_float32 = self.parameter_is_float32 != 0
        comptime if Op.has_parameter_gradient:
            if self.parameter_gradient != 0:
                operands.results[0] = Int64(self.workspace)
        return operands

    def shares(self) -> Int:
        """Returns how many shares of the parameter's gradient there are to add up.

        Returns:
            One for each row that has elements.
        """
        return self.M if self.K > 0 else 0
