"""The activation after a product, forward and backward.

    a = act(h);  dh from da and h;  dbias = sum over rows dh

Before a gate, h [M, 2N] is the gate and what it gates: a = act(gate) up.
"""

from std.sys import size_of

from ..call import Call
from ..gemm.activation import GATED, NOTHING, Backward, activate
from ..rows.operands import Addresses, Operands, Sums, accumulator
from ..rows.program import Program
from ..rows.programs.column_sum import ColumnSum, Nothing
from ..rows.stage import Stage
from ..rows.types import code_of
from ..rows.values import CAPACITY, Row, Values
from .runner import Runner


struct _Activate[gated: Bool, narrow: Bool](Stage):
    """h -> act(h), or (gate, up) -> act(gate) up."""

    comptime terms = 0
    comptime broadcast = False

    @staticmethod
    @always_inline
    def map_out[
        dtype: DType, width: Int, //
    ](
        row: Row[dtype], v: Values[dtype, width], total: Values[dtype, 1]
    ) -> Values[dtype, width]:
        var a = activate[Self.narrow](row.kind, v[0])
        comptime if Self.gated:
            a *= v[1]
        return {a}


struct _Differentiate[gated: Bool, narrow: Bool](Stage):
    """(da, h) -> (a, dh, dh), or (da, gate, up) -> (a, dgate, dup, dgate, dup)."""

    comptime terms = 0
    comptime broadcast = False

    @staticmethod
    @always_inline
    def map_out[
        dtype: DType, width: Int, //
    ](
        row: Row[dtype], v: Values[dtype, width], total: Values[dtype, 1]
    ) -> Values[dtype, width]:
        comptime if Self.gated:
            var gate = Backward[dtype, width, Self.narrow](
                row.kind, v[1], v[0] * v[2]
            )
            var dup = v[0] * gate.a
            return {gate.a * v[2], gate.dh, dup, gate.dh, dup}
        else:
            var both = Backward[dtype, width, Self.narrow](row.kind, v[1], v[0])
            return {both.a, both.dh, both.dh}


comptime Activate[gated: Bool, narrow: Bool] = Program[
    _Activate[gated, narrow],
    inputs_=2 if gated else 1,
    first_half_input_=0 if gated else CAPACITY,
]
"""From h to a.

Parameters:
    gated: Whether h is two halves, the gate first.
    narrow: Whether a has 16 bits.
"""

comptime ActivateBackward[
    gated: Bool, narrow: Bool, sums: Bool = True
] = Program[
    _Differentiate[gated, narrow],
    inputs_=3 if gated else 2,
    outputs_=3 if gated else 2,
    columns_=0 if not sums else 2 if gated else 1,
    first_half_input_=1 if gated else CAPACITY,
    first_half_output_=1 if gated else CAPACITY,
]
"""From da and h to a and dh, and the partial sums of dbias.

Parameters:
    gated: Whether h is two halves, the gate first.
    narrow: Whether a and dh have 16 bits.
    sums: Whether there are partial sums.
"""


def run_activate[dtype: DType, R: Runner](runner: R, call: Call) raises:
    """Writes a from h.

    Parameters:
        dtype: The type of h.
        R: What runs it.

    Args:
        runner: Where to run.
        call: The tensors.

    Raises:
        If a launch fails.
    """
    comptime narrow = size_of[dtype]() == 2
    var rows = Operands[accumulator[dtype]()](call.M, call.N)
    rows.kind = Int32(call.activation % GATED)
    rows.inputs[0] = Int64(call.h)
    rows.outputs[0] = Int64(call.a)
    if call.activation >= GATED:
        rows.inputs[1] = _second_half[dtype](call, call.h)
        runner.run[Activate[True, narrow], dtype, dtype](rows)
    else:
        runner.run[Activate[False, narrow], dtype, dtype](rows)


def activate_backward_bytes[
    dtype: DType, R: Runner
](runner: R, call: Call) -> Int:
    """Returns the size of the workspace of `run_activate_backward`.

    Parameters:
        dtype: The type of h.
        R: What runs it.

    Args:
        runner: Where to run.
        call: Sizes, and whether dbias is wanted.

    Returns:
        The number of bytes.
    """
    comptime narrow = size_of[dtype]() == 2
    if call.dbias == 0:
        return 0
    if call.activation == Int(NOTHING):
        return runner.sums_bytes[ColumnSum, dtype](call.M, call.N)
    if call.activation >= GATED:
        return runner.sums_bytes[ActivateBackward[True, narrow], dtype](
            call.M, call.N
        )
    return runner.sums_bytes[ActivateBackward[False, narrow], dtype](
        call.M, call.N
    )


def run_activate_backward[
    dtype: DType, R: Runner
](mut runner: R, call: Call) raises:
    """Writes which of dh, a and dbias are wanted from da and h.

    Parameters:
        dtype: The type of h.
        R: What runs it.

    Args:
        runner: Where to run.
        call: The tensors; without an activation da is dh, and h is not needed.

    Raises:
        If a launch fails.
    """
    comptime narrow = size_of[dtype]() == 2
    var rows = Operands[accumulator[dtype]()](call.M, call.N)
    rows.kind = Int32(call.activation % GATED)
    rows.inputs[0] = Int64(call.da)
    var sums = Sums(Addresses(fill=0), code_of[dtype]())
    sums.outputs[0] = Int64(call.dbias)
    if call.dbias != 0:
        rows.column_sums = Int64(call.workspace)
    if call.activation == Int(NOTHING):
        runner.run_with_sums[ColumnSum, Nothing, dtype, dtype](rows, sums)
        return runner.finish()
    rows.inputs[1] = Int64(call.h)
    rows.outputs[0] = Int64(call.a)
    rows.outputs[1] = Int64(call.dh)
    if call.activation >= GATED:
        rows.inputs[2] = _second_half[dtype](call, call.h)
        rows.outputs[2] = _second_half[dtype](call, call.dh)
        sums.outputs[1] = _second_half[dtype](call, call.dbias)
        runner.run_with_sums[
            ActivateBackward[True, narrow],
            ActivateBackward[True, narrow, False],
            dtype,
            dtype,
        ](rows, sums)
    else:
        runner.run_with_sums[
            ActivateBackward[False, narrow],
            ActivateBackward[False, narrow, False],
            dtype,
            dtype,
        ](rows, sums)
    runner.finish()


def _second_half[dtype: DType](call: Call, address: Int) -> Int64:
    """Finds the second half of the first row of a tensor [.., 2N], if there is one."""
    return Int64(address + call.N * size_of[dtype]()) if address != 0 else 0
