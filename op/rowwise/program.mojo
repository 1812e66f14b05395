"""Describes a computation on rows as a list of stages {map_in, redo, map_out}.

Every element of a row carries a few values through the stages. A stage maps them to the terms that it
reduces over the row, and then maps the values again, with the totals at hand:

    totals = finish(row, redo over the row of map_in(row, values), totals)
    values = map_out(row, values, totals)

`finish` is for what needs to be done once a row, such as a division or a root.

Stages are pure, so a skeleton may run them again from the inputs in each pass over the row instead of
keeping what they return. That is what lets one program serve rows in registers and rows of any length.
"""

from std.utils import StaticTuple

comptime CAPACITY = 4
"""The most values that an element carries, and the most terms of one reduction."""

comptime MAX_STAGES = 6
"""The most stages of a program."""

comptime Terms[dtype: DType, width: Int] = StaticTuple[
    Values[dtype, width], MAX_STAGES
]
"""What every stage reduces, or its totals.

Parameters:
    dtype: The type computed in.
    width: The number of elements.
"""


struct Values[dtype: DType, width: Int](TrivialRegisterPassable):
    """Holds what neighbouring elements of a row carry: up to four SIMD vectors.

    Parameters:
        dtype: The type computed in.
        width: The number of elements.
    """

    comptime Lane = SIMD[Self.dtype, Self.width]
    """One value of every element."""

    var lanes: StaticTuple[Self.Lane, CAPACITY]
    """The values."""

    @always_inline
    def __init__(
        out self,
        a: Self.Lane = 0,
        b: Self.Lane = 0,
        c: Self.Lane = 0,
        d: Self.Lane = 0,
    ):
        """Holds the given values; those left out are zero.

        Args:
            a: The first value.
            b: The second value.
            c: The third value.
            d: The fourth value.
        """
        self.lanes = StaticTuple[Self.Lane, CAPACITY](a, b, c, d)

    @always_inline
    def __getitem__(self, index: Int) -> Self.Lane:
        """Returns one value of every element.

        Args:
            index: Which of the values.

        Returns:
            The value.
        """
        return self.lanes[index]

    @always_inline
    def __setitem__(mut self, index: Int, value: Self.Lane):
        """Replaces one value of every element.

        Args:
            index: Which of the values.
            value: The new value.
        """
        self.lanes[index] = value


@fieldwise_init
struct Row[dtype: DType](TrivialRegisterPassable):
    """What the stages may know of the row they are in.

    Parameters:
        dtype: The type computed in.
    """

    var n: Scalar[Self.dtype]
    """The number of elements."""
    var inverse_n: Scalar[Self.dtype]
    """One over the number of elements."""
    var first: Values[Self.dtype, 1]
    """The row's first element of each input: a shift that sums of large numbers can be taken about."""
    var saved: Values[Self.dtype, 1]
    """The row's saved numbers, such as its mean."""
    var number: Scalar[Self.dtype]
    """A number that all rows share, such as eps."""
    var parameter: Scalar[Self.dtype]
    """The value of a 1-element tensor, for programs that have one; 0 otherwise."""


struct Redo(Equatable, TrivialRegisterPassable):
    """Says how a stage reduces its terms."""

    var _code: Int

    comptime ADD = Self(0)
    """Adds the terms."""
    comptime MAX = Self(1)
    """Takes the largest term; NaN if one is NaN."""

    @always_inline
    def __init__(out self, code: Int):
        """Makes a reduction of its code.

        Args:
            code: The code.
        """
        self._code = code

    @always_inline
    def __eq__(self, other: Self) -> Bool:
        """Compares two reductions.

        Args:
            other: The other one.

        Returns:
            Whether they are the same.
        """
        return self._code == other._code

    @always_inline
    def identity[dtype: DType, width: Int](self) -> SIMD[dtype, width]:
        """Returns what changes no total.

        Parameters:
            dtype: The type computed in.
            width: The number of elements.

        Returns:
            The neutral value.
        """
        if self == Self.MAX:
            return SIMD[dtype, width](Scalar[dtype].MIN)
        return SIMD[dtype, width](0)

    @always_inline
    def combine[
        dtype: DType, width: Int
    ](self, a: SIMD[dtype, width], b: SIMD[dtype, width]) -> SIMD[dtype, width]:
        """Reduces two terms to one.

        Parameters:
            dtype: The type computed in.
            width: The number of elements.

        Args:
            a: One term.
            b: The other term.

        Returns:
            The reduced term.
        """
        if self == Self.MAX:
            # a comparison with NaN is false, `ne` included
            return (a.gt(b) | ~a.eq(a)).select(a, b)
        return a + b

    @always_inline
    def across[
        dtype: DType, width: Int, //
    ](self, terms: SIMD[dtype, width]) -> Scalar[dtype]:
        """Reduces neighbouring elements, pairwise.

        Parameters:
            dtype: The type computed in.
            width: The number of elements.

        Args:
            terms: The elements' terms.

        Returns:
            The reduced term.
        """
        comptime if width == 1:
            return terms[0]
        else:
            var halves = terms.split()
            return self.across(self.combine(halves[0], halves[1]))


trait Stage:
    """One {map_in, redo, map_out} of a row program."""

    comptime terms: Int = 1
    """How many terms are reduced together; 0 makes a stage that only maps, and does not broadcast."""
    comptime redo: Redo = Redo.ADD
    """How they are reduced."""
    comptime broadcast: Bool = True
    """Whether `map_out` gets the totals. If not (`redo'`), it gets zeros; the totals only leave as results,
    and no pass over the row ends here."""
    comptime results: Int = 0
    """How many of the totals are stored for each row."""

    @staticmethod
    @always_inline
    def map_in[
        dtype: DType, width: Int, //
    ](row: Row[dtype], v: Values[dtype, width]) -> Values[dtype, width]:
        """Returns the terms to reduce; the values themselves unless defined.

        Parameters:
            dtype: The type computed in.
            width: The number of elements.

        Args:
            row: The row.
            v: The elements' values.

        Returns:
            The terms.
        """
        return v

    @staticmethod
    @always_inline
    def map_out[
        dtype: DType, width: Int, //
    ](
        row: Row[dtype], v: Values[dtype, width], total: Values[dtype, 1]
    ) -> Values[dtype, width]:
        """Returns the values that the next stage sees; unchanged unless defined.

        Parameters:
            dtype: The type computed in.
            width: The number of elements.

        Args:
            row: The row.
            v: The elements' values.
            total: The totals.

        Returns:
            The new values.
        """
        return v

    @staticmethod
    @always_inline
    def finish[
        dtype: DType, //
    ](
        row: Row[dtype], total: Values[dtype, 1], before: Values[dtype, 1]
    ) -> Values[dtype, 1]:
        """Returns the totals that `map_out` sees and that are stored; the reduced terms unless defined.

        Parameters:
            dtype: The type computed in.

        Args:
            row: The row.
            total: The reduced terms.
            before: The totals of the stage before.

        Returns:
            The totals.
        """
        return total


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
