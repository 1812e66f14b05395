"""Runners of passes: a CPU's threads, or a GPU's stream."""

from ..call import Call
from ..rows.operands import Operands, Sums, accumulator
from ..rows.program import RowProgram
from .modulation import Modulation


trait Runner(Deinitable, Movable):
    """Runs row programs, so that a pass is written once for all devices."""

    @staticmethod
    def of(call: Call) -> Self:
        """Makes the runner of a call.

        Args:
            call: The call, whose `context` names the launcher or PyTorch's team.

        Returns:
            The runner.
        """
        ...

    def run[
        P: RowProgram, dtype: DType, ftype: DType
    ](self, operands: Operands[accumulator[dtype]()]) raises:
        """Takes rows through a program without columns.

        Parameters:
            P: The row program.
            dtype: The type of inputs and outputs.
            ftype: The type of the features.

        Args:
            operands: The tensors.

        Raises:
            If a launch fails.
        """
        ...

    def run_with_sums[
        P: RowProgram, without_columns: RowProgram, dtype: DType, ftype: DType
    ](mut self, operands: Operands[accumulator[dtype]()], sums: Sums) raises:
        """Takes rows through a program with columns; the sums are there after `finish`.

        Parameters:
            P: The row program.
            without_columns: The same program, without its columns.
            dtype: The type of inputs and outputs.
            ftype: The type of the features.

        Args:
            operands: The tensors; `column_sums` points to `sums_bytes` bytes, or is 0 if no sum is wanted.
            sums: The sums that are wanted.

        Raises:
            If a launch fails.
        """
        ...

    def sums_bytes[
        P: RowProgram, dtype: DType
    ](self, rows: Int, length: Int, groups: Int = 1) -> Int:
        """Returns the size of the workspace for a program's sums over rows.

        Parameters:
            P: The row program.
            dtype: The type of inputs and outputs.

        Args:
            rows: The number of rows M.
            length: The number of elements K of a row.
            groups: The number of groups.

        Returns:
            The number of bytes.
        """
        ...

    def modulate[accum: DType](self, modulation: Modulation[accum]) raises:
        """Runs a modulation at every element of its vectors.

        Parameters:
            accum: The type computed in.

        Args:
            modulation: The vectors.

        Raises:
            If a launch fails.
        """
        ...

    def finish(mut self) raises:
        """Adds up what `run_with_sums` has left.

        Raises:
            If a launch fails.
        """
        ...
