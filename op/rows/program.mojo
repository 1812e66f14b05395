"""Describes a computation on rows as a list of stages {map_in, redo, map_out}.

Every element of a row carries a few values through the stages. A stage maps them to the terms that it
reduces over the row, and then maps the values again, with the totals at hand:

    totals = finish(row, redo over the row of map_in(row, values), totals)
    values = map_out(row, values, totals)

`finish` is for what needs to be done once a row, such as a division or a root.

Stages are pure, so a skeleton may run them again from the inputs in each pass over the row instead of
keeping what they return. That is what lets one program serve rows in registers and rows of any length.
"""

from .stage import Stage
from .values import CAPACITY, MAX_STAGES, SAME, Redo, Row, Terms, Values


trait RowProgram:
    """A list of stages with its operands, as the skeletons see it."""

    comptime stages: Int
    """The number of stages."""
    comptime passes: Int
    """The number of passes over a row before the one that stores."""
    comptime inputs: Int
    """How many tensors [M, K] are read."""
    comptime features: Int
    """How many vectors [K] are read."""
    comptime saved: Int
    """How many vectors [M] are read."""
    comptime outputs: Int
    """How many tensors [M, K] are written."""
    comptime columns: Int
    """How many vectors [K] are sums over the rows."""
    comptime results: Int
    """How many vectors [M] the stages write."""
    comptime parameter: Bool
    """Whether there is a `Row.parameter`."""
    comptime primed: Bool
    """Whether there is a primed form, which adds to the outputs."""
    comptime narrow: DType
    """The type of the last outputs, if they are not of the inputs' type; else `SAME`."""
    comptime first_narrow: Int
    """The first output of that type."""

    @staticmethod
    def pass_of(stage: Int) -> Int:
        """Returns the pass in which a stage reduces.

        Args:
            stage: The stage's index.

        Returns:
            The number of broadcasting stages before it.
        """
        ...

    @staticmethod
    def results_before(stage: Int) -> Int:
        """Returns how many results the stages before one have.

        Args:
            stage: The stage's index.

        Returns:
            Which of the operands' results is the stage's first.
        """
        ...

    @staticmethod
    def terms_of[stage: Int]() -> Int:
        """Returns how many terms a stage reduces.

        Parameters:
            stage: The stage's index.

        Returns:
            The number of terms.
        """
        ...

    @staticmethod
    def redo_of[stage: Int]() -> Redo:
        """Returns how a stage reduces.

        Parameters:
            stage: The stage's index.

        Returns:
            The reduction.
        """
        ...

    @staticmethod
    def results_of[stage: Int]() -> Int:
        """Returns how many results a stage has.

        Parameters:
            stage: The stage's index.

        Returns:
            The number of results.
        """
        ...

    @staticmethod
    def finish[
        dtype: DType, //, stage: Int
    ](
        row: Row[dtype], total: Values[dtype, 1], before: Values[dtype, 1]
    ) -> Values[dtype, 1]:
        """Runs a stage's `finish`.

        Parameters:
            dtype: The type computed in.
            stage: The stage's index.

        Args:
            row: The row.
            total: The reduced terms.
            before: The totals of the stage before.

        Returns:
            The totals.
        """
        ...

    @staticmethod
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
        ...


struct Program[
    *Stages: Stage,
    inputs_: Int = 1,
    features_: Int = 0,
    saved_: Int = 0,
    outputs_: Int = 1,
    columns_: Int = 0,
    parameter_: Bool = False,
    primed_: Bool = False,
    narrow_: DType = SAME,
    first_narrow_: Int = 0,
](RowProgram):
    """A row program of the given stages.

    The values of an element start as its inputs followed by its features. After the last stage the first
    `outputs_` values are stored and the next `columns_` values are summed over the rows.

    Parameters:
        Stages: The stages, in order.
        inputs_: How many tensors [M, K] are read.
        features_: How many vectors [K] are read.
        saved_: How many vectors [M] are read.
        outputs_: How many tensors [M, K] are written.
        columns_: How many vectors [K] are sums over the rows; their values must not depend on totals.
        parameter_: Whether there is a `Row.parameter`.
        primed_: Whether there is a primed form, which adds to the outputs.
        narrow_: The type of the last outputs, on a GPU, if they are not of the inputs' type; no wider than it.
        first_narrow_: The first output of that type.

    Constraints:
        Inputs and features together, and outputs and columns together, are at most CAPACITY.
    """

    comptime stages = Self.Stages.length
    """The number of stages."""
    comptime passes = Self.pass_of(Self.stages)
    """The number of passes over a row before the one that stores."""
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
    comptime results = Self.results_before(Self.stages)
    """How many vectors [M] the stages write."""
    comptime parameter = Self.parameter_
    """Whether there is a `Row.parameter`."""
    comptime primed = Self.primed_
    """Whether there is a primed form, which adds to the outputs."""
    comptime narrow = Self.narrow_
    """The type of the last outputs, if they are not of the inputs' type; else `SAME`."""
    comptime first_narrow = Self.first_narrow_
    """The first output of that type."""

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
    def terms_of[stage: Int]() -> Int:
        """Returns how many terms a stage reduces.

        Parameters:
            stage: The stage's index.

        Returns:
            The number of terms.
        """
        return Self.Stages[stage].terms

    @staticmethod
    def redo_of[stage: Int]() -> Redo:
        """Returns how a stage reduces.

        Parameters:
            stage: The stage's index.

        Returns:
            The reduction.
        """
        return Self.Stages[stage].redo

    @staticmethod
    def results_of[stage: Int]() -> Int:
        """Returns how many results a stage has.

        Parameters:
            stage: The stage's index.

        Returns:
            The number of results.
        """
        return Self.Stages[stage].results

    @staticmethod
    @always_inline
    def finish[
        dtype: DType, //, stage: Int
    ](
        row: Row[dtype], total: Values[dtype, 1], before: Values[dtype, 1]
    ) -> Values[dtype, 1]:
        """Runs a stage's `finish`.

        Parameters:
            dtype: The type computed in.
            stage: The stage's index.

        Args:
            row: The row.
            total: The reduced terms.
            before: The totals of the stage before.

        Returns:
            The totals.
        """
        return Self.Stages[stage].finish(row, total, before)

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
