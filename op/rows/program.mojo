"""Describes a computation on rows as a list of stages {map_in, redo, map_out}.

Every element of a row carries a few values through the stages. A stage maps them to the terms that it
reduces over the row, and then maps the values again, with the totals at hand:

    totals = finish(row, redo over the row of map_in(row, values), totals)
    values = map_out(row, values, totals)

`finish` is for what is done once per row, such as a division or a root.

Stages are pure, so a skeleton may run them again from the inputs in each pass over the row instead of
keeping their results. So one program works for rows in registers and for rows of any length.
"""

from .stage import Stage
from .values import CAPACITY, MAX_STAGES, Row, Terms, Values


trait RowProgram:
    """A list of stages with its operands, as the skeletons see it.

    The values of an element start as its inputs followed by its features. After the last stage the first
    `outputs` values are stored and the next `columns` values are summed over the rows.
    """

    comptime Stages[index: Int]: Stage
    """The stages, in order.

    Parameters:
        index: Which stage.
    """
    comptime stages: Int
    """The number of stages."""
    comptime inputs: Int
    """How many tensors [M, K] are read."""
    comptime features: Int
    """How many vectors [K] are read."""
    comptime saved: Int
    """How many vectors [M] are read."""
    comptime outputs: Int
    """How many tensors [M, K] are written."""
    comptime columns: Int
    """How many vectors [K] are sums over the rows; their values must not depend on totals."""
    comptime parameter: Bool
    """Whether there is a `Row.parameter`."""
    comptime primed: Bool
    """Whether there is a primed form, which adds to the outputs."""
    comptime first_narrow: Int
    """From this output on, outputs may be narrower than float32 inputs, as `Operands.narrow` says."""
    comptime first_half_input: Int
    """From this input on, inputs are one half [M, K] of tensors [M, 2K]."""
    comptime first_half_output: Int
    """From this output on, outputs are."""
    comptime has_residual: Bool
    """Whether `Operands.residual` is added to the first input."""
    comptime has_addend: Bool
    """Whether `Operands.addend` is added to the first output."""
    comptime eight_bits: Int32
    """Type of the first output where it has 8 bits, E4M3 or E5M2 of types.mojo; 0 where it has not."""
    comptime block_scales: Bool
    """Whether each 128 elements of that output have a scale, by which they are divided; they are results, after those of
    the stages. Otherwise they are stored as they are."""
    comptime passes: Int = Self.pass_of(Self.stages)
    """The number of passes over a row before the one that stores."""

    @staticmethod
    def pass_of(stage: Int) -> Int:
        """Returns the pass in which a stage reduces.

        Args:
            stage: The stage's index.

        Returns:
            The number of broadcasting stages before it.
        """
        var count = 0
        comptime for i in range(Self.stages):
            if i < stage and Self.Stages[i].broadcast:
                count += 1
        return count

    @staticmethod
    def results_before(stage: Int) -> Int:
        """Returns how many results the stages before one have.

        Args:
            stage: The stage's index.

        Returns:
            Which of the operands' results is the stage's first.
        """
        var count = 0
        comptime for i in range(Self.stages):
            if i < stage:
                count += Self.Stages[i].results
        return count

    @staticmethod
    def share_of(pass_index: Int) -> Int:
        """Returns how much of a row a pass has to read: its first 1 / `share`.

        Args:
            pass_index: The pass.

        Returns:
            The share of its stages, 1 for the pass that stores.
        """
        var share = 0
        comptime for i in range(Self.stages):
            if Self.pass_of(i) == pass_index:
                comptime of_stage = Self.Stages[i].share
                share = of_stage if share == 0 else min(share, of_stage)
        return max(share, 1)

    @staticmethod
    def is_optional(pass_index: Int) -> Bool:
        """Returns whether a pass may not be needed, as `needs` says.

        Args:
            pass_index: The pass.

        Returns:
            Whether all of its stages are optional.
        """
        var found = pass_index < Self.passes
        comptime for i in range(Self.stages):
            if Self.pass_of(i) == pass_index and not Self.Stages[i].optional:
                found = False
        return found

    @staticmethod
    @always_inline
    def needs[dtype: DType, //, pass_index: Int](row: Row[dtype]) -> Bool:
        """Returns whether a pass has terms that are needed.

        Parameters:
            dtype: The type computed in.
            pass_index: The pass.

        Args:
            row: The row.

        Returns:
            Whether a stage needs them.
        """
        var found = False
        comptime for i in range(Self.stages):
            comptime if Self.pass_of(i) == pass_index:
                found |= Self.Stages[i].needs_terms(row)
        return found

    @staticmethod
    @always_inline
    def visit[
        dtype: DType, width: Int, //, pass_index: Int
    ](
        row: Row[dtype],
        v: Values[dtype, width],
        totals: Terms[dtype, 1],
        mut terms: Terms[dtype, width],
    ) -> Values[dtype, width]:
        """Takes elements through the stages up to a pass and returns their terms.

        Parameters:
            dtype: The type computed in.
            width: The number of elements.
            pass_index: The pass.

        Args:
            row: The row.
            v: The values of the elements: inputs, then features.
            totals: The totals of the stages of earlier passes.
            terms: Receives the terms of this pass's stages.

        Returns:
            The values after the last stage whose totals are known.
        """
        comptime assert Self.stages <= MAX_STAGES, "too many stages"
        comptime assert (
            Self.inputs + Self.features <= CAPACITY
            and Self.outputs + Self.columns <= CAPACITY
        ), "an element carries at most CAPACITY values"
        var values = v
        comptime for i in range(Self.stages):
            comptime S = Self.Stages[i]
            comptime if Self.pass_of(i) == pass_index:
                terms[i] = S.map_in(row, values)
            comptime if Self.pass_of(i + 1) <= pass_index:
                comptime if S.broadcast:
                    values = S.map_out(row, values, totals[i])
                else:
                    values = S.map_out(row, values, {})
        return values

    @staticmethod
    @always_inline
    def finish[
        dtype: DType, //, pass_index: Int
    ](row: Row[dtype], mut totals: Terms[dtype, 1]):
        """Turns the reduced terms of a pass into the totals of its stages.

        Parameters:
            dtype: The type computed in.
            pass_index: The pass.

        Args:
            row: The row.
            totals: The totals of earlier passes, and this one's reduced terms.
        """
        comptime for s in range(Self.stages):
            comptime if Self.pass_of(s) == pass_index:
                totals[s] = Self.Stages[s].finish(
                    row, totals[s], totals[max(s - 1, 0)]
                )

    @staticmethod
    @always_inline
    def identities[dtype: DType, width: Int]() -> Terms[dtype, width]:
        """Returns the terms of no elements.

        Parameters:
            dtype: The type computed in.
            width: The number of elements side by side.

        Returns:
            What changes no sum.
        """
        var sums = Terms[dtype, width](fill={})
        comptime for s in range(Self.stages):
            comptime redo = Self.Stages[s].redo
            var none = materialize[redo]().identity[dtype, width]()
            sums[s] = {fill = none}
        return sums

    @staticmethod
    @always_inline
    def combine[
        dtype: DType, width: Int, //, pass_index: Int
    ](a: Terms[dtype, width], b: Terms[dtype, width]) -> Terms[dtype, width]:
        """Reduces the terms of two groups of elements.

        Parameters:
            dtype: The type computed in.
            width: The number of elements side by side.
            pass_index: The pass, of whose stages the terms are.

        Args:
            a: The terms of one group.
            b: The terms of the other.

        Returns:
            The terms of both.
        """
        var sums = a
        comptime for s in range(Self.stages):
            comptime if Self.pass_of(s) == pass_index:
                comptime S = Self.Stages[s]
                var sum = a[s]
                comptime for t in range(S.terms):
                    comptime redo = S.redo
                    sum[t] = materialize[redo]().combine[dtype, width](
                        sum[t], b[s][t]
                    )
                sums[s] = sum
        return sums


struct Program[
    *StageTypes: Stage,
    inputs_: Int = 1,
    features_: Int = 0,
    saved_: Int = 0,
    outputs_: Int = 1,
    columns_: Int = 0,
    parameter_: Bool = False,
    primed_: Bool = False,
    first_narrow_: Int = CAPACITY,
    first_half_input_: Int = CAPACITY,
    first_half_output_: Int = CAPACITY,
    has_residual_: Bool = False,
    has_addend_: Bool = False,
    eight_bits_: Int32 = 0,
    block_scales_: Bool = False,
](RowProgram):
    """A row program of the given stages.

    Parameters:
        StageTypes: The stages, in order.
        inputs_: How many tensors [M, K] are read.
        features_: How many vectors [K] are read.
        saved_: How many vectors [M] are read.
        outputs_: How many tensors [M, K] are written.
        columns_: How many vectors [K] are sums over the rows.
        parameter_: Whether there is a `Row.parameter`.
        primed_: Whether there is a primed form.
        first_narrow_: From which output on outputs may be narrower.
        first_half_input_: From which input on inputs are halves of longer rows.
        first_half_output_: From which output on outputs are.
        has_residual_: Whether something is added to the first input.
        has_addend_: Whether something is added to the first output.
        eight_bits_: Type of the first output where it has 8 bits; 0 where it has not. Only Hopper stores those.
        block_scales_: Whether each 128 elements of it have a scale.

    Constraints:
        Inputs and features together, and outputs and columns together, are at most CAPACITY.
    """

    comptime Stages[index: Int]: Stage = Self.StageTypes[index]
    """The stages, in order.

    Parameters:
        index: Which stage.
    """
    comptime stages = Self.StageTypes.length
    """The number of stages."""
    comptime inputs = Self.inputs_
    """How many tensors [M, K] are read."""
    comptime features = Self.features_
    """How many vectors [K] are read."""
    comptime saved = Self.saved_
    """How many vectors [M] are read."""
    comptime outputs = Self.outputs_
    """How many tensors [M, K] are written."""
    comptime columns = Self.columns_
    """How many vectors [K] are sums over the rows."""
    comptime parameter = Self.parameter_
    """Whether there is a `Row.parameter`."""
    comptime primed = Self.primed_
    """Whether there is a primed form."""
    comptime first_narrow = Self.first_narrow_
    """From which output on outputs may be narrower."""
    comptime first_half_input = Self.first_half_input_
    """From which input on inputs are halves of longer rows."""
    comptime first_half_output = Self.first_half_output_
    """From which output on outputs are."""
    comptime has_residual = Self.has_residual_
    """Whether something is added to the first input."""
    comptime has_addend = Self.has_addend_
    """Whether something is added to the first output."""
    comptime eight_bits = Self.eight_bits_
    """Type of the first output where it has 8 bits."""
    comptime block_scales = Self.block_scales_
    """Whether each 128 elements of it have a scale."""
