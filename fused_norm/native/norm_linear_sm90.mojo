"""A CPython extension that launches the sm_90a kernels on PyTorch's stream.

Built once per dtype, and for bfloat16, which folds, once per norm: mojo build -I . -D dtype=bfloat16
[-D rms_norm=1] --emit shared-lib --target-accelerator=nvidia:sm_90a. Each pass takes the address of its `Call`,
once to plan it and once to run it. All tensors are dense; those that a pass
writes, and its workspace, start at multiples of 16 bytes.
"""

from std.os import abort
from std.python import PythonObject
from std.python.bindings import PythonModuleBuilder
from std.sys import get_defined_dtype, is_defined

from op.call import Call, CallPointer
from op.device import Launcher, new_launcher, use_costs
from op.entry import add_pass, from_c
from op.norm_linear.sm90.backward import backward
from op.norm_linear.sm90.backward_plan import plan_backward
from op.norm_linear.sm90.choice import RMS_NORM
from op.norm_linear.sm90.fold import fold
from op.norm_linear.sm90.forward import forward
from op.norm_linear.sm90.forward_plan import plan_forward
from op.norm_linear.sm90.linear import linear, plan_linear
from op.norm_linear.sm90.linear_backward import (
    input_gradient,
    plan_input_gradient,
    plan_weight_gradient,
    weight_gradient,
)
from op.norm_linear.sm90.grouped import (
    fold_parts,
    forward_folded,
    plan_folded,
    plan_products,
    products,
)
from op.norm_linear.sm90.grouped_backward import (
    input_gradients,
    passed_rows,
    plan_input_gradients,
    plan_passed_rows,
)
from op.norm_linear.sm90.terms import term
from op.norms.layer_norm import LayerNorm
from op.norms.norm import Norm
from op.norms.rms_norm import RmsNorm

comptime DTYPE = get_defined_dtype["dtype", DType.bfloat16]()
# Of a build for bfloat16. In float16 only the row pass knows the norm, in float32 nothing does.
comptime NORM: Norm = RmsNorm if is_defined["rms_norm"]() else LayerNorm
comptime ANY_NORM = DTYPE != DType.bfloat16


def _plan[
    plans: def(Launcher, mut Call) thin -> None
](call: CallPointer) raises:
    """Plans a pass."""
    plans(Launcher.at(call[].context)[], call[])


def _run[
    runs: def(Launcher, Call) raises thin -> None
](call: CallPointer) raises:
    """Queues a pass of 16 bits; PyTorch computes what there is of it in float32."""
    comptime if DTYPE == DType.float32:
        raise Error("only forwards of norms are in float32")
    else:
        runs(Launcher.at(call[].context)[], call[])


def _backward(launcher: Launcher, call: Call) raises:
    comptime if ANY_NORM:
        if call.normalization == RMS_NORM:
            backward[DTYPE, RmsNorm](launcher, call)
        else:
            backward[DTYPE, LayerNorm](launcher, call)
    else:
        backward[DTYPE, NORM](launcher, call)


def _passed_rows(launcher: Launcher, call: Call) raises:
    comptime if ANY_NORM:
        if call.normalization == RMS_NORM:
            passed_rows[DTYPE, RmsNorm](launcher, call)
        else:
            passed_rows[DTYPE, LayerNorm](launcher, call)
    else:
        passed_rows[DTYPE, NORM](launcher, call)


def _plan_forward(call: CallPointer) raises:
    if call[].part_count == 0:
        _plan[plan_forward[DTYPE]](call)
    else:
        _plan[plan_folded[DTYPE]](call)


def _forward(call: CallPointer) raises:
    ref launcher = Launcher.at(call[].context)[]
    if call[].part_count == 0:
        forward[DTYPE, NORM](launcher, call[])
        return
    comptime if DTYPE == DType.bfloat16:
        forward_folded[DTYPE, NORM](launcher.gpu, call[])
    else:
        raise Error("only bfloat16 is folded")


def _fold(call: CallPointer) raises:
    ref launcher = Launcher.at(call[].context)[]
    comptime if DTYPE != DType.bfloat16:
        raise Error("only bfloat16 is folded")
    else:
        if call[].part_count == 0:
            fold[DTYPE, NORM](launcher, call[])
        else:
            fold_parts[DTYPE, NORM](
                launcher.gpu,
                call[],
                call[].fold_weight,
                call[].fold_sums,
                call[].fold_constants,
            )


@export
def norm_linear_plan_forward(call: CallPointer) abi("C") -> Int:
    return from_c[_plan_forward](call)


@export
def norm_linear_forward(call: CallPointer) abi("C") -> Int:
    return from_c[_forward](call)


@export
def norm_linear_plan_backward(call: CallPointer) abi("C") -> Int:
    return from_c[_plan[plan_backward[DTYPE]]](call)


@export
def norm_linear_backward(call: CallPointer) abi("C") -> Int:
    return from_c[_run[_backward]](call)


@export
def norm_linear_fold(call: CallPointer) abi("C") -> Int:
    return from_c[_fold](call)


@export
def norm_linear_plan_linear(call: CallPointer) abi("C") -> Int:
    return from_c[_plan[plan_linear[DTYPE]]](call)


@export
def norm_linear_linear(call: CallPointer) abi("C") -> Int:
    return from_c[_run[linear[DTYPE]]](call)


@export
def norm_linear_plan_input_gradient(call: CallPointer) abi("C") -> Int:
    return from_c[_plan[plan_input_gradient[DTYPE]]](call)


@export
def norm_linear_input_gradient(call: CallPointer) abi("C") -> Int:
    return from_c[_run[input_gradient[DTYPE]]](call)


@export
def norm_linear_plan_weight_gradient(call: CallPointer) abi("C") -> Int:
    return from_c[_plan[plan_weight_gradient[DTYPE]]](call)


@export
def norm_linear_weight_gradient(call: CallPointer) abi("C") -> Int:
    return from_c[_run[weight_gradient[DTYPE]]](call)


@export
def norm_linear_plan_products(call: CallPointer) abi("C") -> Int:
    return from_c[_plan[plan_products[DTYPE]]](call)


@export
def norm_linear_products(call: CallPointer) abi("C") -> Int:
    return from_c[_run[products[DTYPE]]](call)


@export
def norm_linear_plan_input_gradients(call: CallPointer) abi("C") -> Int:
    return from_c[_plan[plan_input_gradients[DTYPE]]](call)


@export
def norm_linear_input_gradients(call: CallPointer) abi("C") -> Int:
    return from_c[_run[input_gradients[DTYPE]]](call)


@export
def norm_linear_plan_passed_rows(call: CallPointer) abi("C") -> Int:
    return from_c[_plan[plan_passed_rows[DTYPE]]](call)


@export
def norm_linear_passed_rows(call: CallPointer) abi("C") -> Int:
    return from_c[_run[_passed_rows]](call)


@export
def PyInit_norm_linear_sm90() abi("C") -> PythonObject:
    """Makes the module.

    Returns:
        The module.
    """
    try:
        var builder = PythonModuleBuilder("norm_linear_sm90")
        builder.def_py_c_function(
            new_launcher,
            "new_launcher",
            docstring="new_launcher(device, stream, alone) -> address",
        )
        builder.def_py_c_function(
            use_costs,
            "use_costs",
            docstring="use_costs(launcher, address of costs) -> 0",
        )
        builder.def_py_c_function(
            term,
            "term",
            docstring=(
                "term(M, K, N, SMs, whose, place) -> the model's: 0 for ours, 1"
                " for PyTorch's"
            ),
        )
        add_pass[
            _plan_forward, "plan_forward", "writes strategy, workspace_bytes"
        ](builder)
        add_pass[_forward, "forward", "queues what was planned"](builder)
        add_pass[
            _plan[plan_backward[DTYPE]],
            "plan_backward",
            "writes strategy, workspace_bytes",
        ](builder)
        add_pass[_run[_backward], "backward", "queues what was planned"](
            builder
        )
        add_pass[
            _fold,
            "fold",
            "queues the fold of the parameters into fold_weight, fold_sums and fold_constants",
        ](builder)
        add_pass[_plan[plan_linear[DTYPE]], "plan_linear", "writes strategy"](
            builder
        )
        add_pass[_run[linear[DTYPE]], "linear", "queues what was planned"](
            builder
        )
        add_pass[
            _plan[plan_input_gradient[DTYPE]],
            "plan_input_gradient",
            "writes strategy",
        ](builder)
        add_pass[
            _run[input_gradient[DTYPE]],
            "input_gradient",
            "queues dx = dy weight",
        ](builder)
        add_pass[
            _plan[plan_weight_gradient[DTYPE]],
            "plan_weight_gradient",
            "writes strategy, workspace_bytes",
        ](builder)
        add_pass[
            _run[weight_gradient[DTYPE]],
            "weight_gradient",
            "queues dweight, dbias",
        ](builder)
        add_pass[
            _plan[plan_products[DTYPE]], "plan_products", "writes strategy"
        ](builder)
        add_pass[
            _run[products[DTYPE]],
            "products",
            "queues y = z weight^T + bias of each part",
        ](builder)
        add_pass[
            _plan[plan_input_gradients[DTYPE]],
            "plan_input_gradients",
            "writes strategy",
        ](builder)
        add_pass[
            _run[input_gradients[DTYPE]],
            "input_gradients",
            "queues dz, the sum of dy weight of each part",
        ](builder)
        add_pass[
            _plan[plan_passed_rows[DTYPE]],
            "plan_passed_rows",
            "writes strategy, workspace_bytes",
        ](builder)
        add_pass[
            _run[_passed_rows],
            "passed_rows",
            "queues dx, dgamma, dbeta and z in place of dz",
        ](builder)
        return builder.finalize()
    except e:
        abort(t"failed to create norm_linear_sm90: {e}")
