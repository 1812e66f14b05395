"""A CPython extension that launches the sm_90a kernels on PyTorch's stream.

Built once per dtype and norm: mojo build -I . -D dtype=bfloat16 [-D rms_norm=1]
--emit shared-lib --target-accelerator=nvidia:sm_90a. Each pass takes the address of its `Call`,
once to plan it and once to run it. All tensors are dense; those that a pass
writes, and its workspace, start at multiples of 16 bytes.
"""

from std.os import abort
from std.python import PythonObject
from std.python.bindings import PythonModuleBuilder
from std.sys import get_defined_dtype, is_defined

from op.call import Call, CallPointer
from op.device import Launcher, new_launcher, use_costs
from op.passes.entry import from_c, from_python
from op.norm_linear.sm90.backward import backward
from op.norm_linear.sm90.backward_plan import plan_backward
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
from op.norm_linear.sm90.several import (
    fold_parts,
    forward_folded,
    plan_folded,
    plan_products,
    products,
)
from op.norm_linear.sm90.several_backward import (
    input_gradients,
    passed_rows,
    plan_input_gradients,
    plan_passed_rows,
)
from op.norm_linear.sm90.costs import cycles
from op.norms.layer_norm import LayerNorm
from op.norms.norm import Norm
from op.norms.rms_norm import RmsNorm

comptime DTYPE = get_defined_dtype["dtype", DType.bfloat16]()
comptime IS_RMS_NORM = is_defined["rms_norm"]()


def _plan_forward(call: CallPointer) raises:
    if call[].part_count == 0:
        plan_forward[DTYPE](Launcher.at(call[].context)[], call[])
    else:
        plan_folded[DTYPE](Launcher.at(call[].context)[], call[])


def _forward(call: CallPointer) raises:
    ref launcher = Launcher.at(call[].context)[]
    if call[].part_count == 0:
        comptime if IS_RMS_NORM:
            forward[DTYPE, RmsNorm](launcher, call[])
        else:
            forward[DTYPE, LayerNorm](launcher, call[])
        return
    comptime if DTYPE != DType.bfloat16:
        raise Error("only bfloat16 is folded")
    elif IS_RMS_NORM:
        forward_folded[DTYPE, RmsNorm](launcher.gpu, call[])
    else:
        forward_folded[DTYPE, LayerNorm](launcher.gpu, call[])


def _plan_backward(call: CallPointer) raises:
    plan_backward[DTYPE](Launcher.at(call[].context)[], call[])


def _backward(call: CallPointer) raises:
    comptime if DTYPE == DType.float32:
        raise Error("float32 has no backward here")
    elif IS_RMS_NORM:
        backward[DTYPE, RmsNorm](Launcher.at(call[].context)[], call[])
    else:
        backward[DTYPE, LayerNorm](Launcher.at(call[].context)[], call[])


def _fold(call: CallPointer) raises:
    comptime if DTYPE != DType.bfloat16:
        raise Error("only bfloat16 is folded")
    elif IS_RMS_NORM:
        _fold_all[RmsNorm](call[])
    else:
        _fold_all[LayerNorm](call[])


def _fold_all[N: Norm](call: Call) raises:
    ref launcher = Launcher.at(call.context)[]
    if call.part_count == 0:
        fold[DTYPE, N](launcher, call)
    else:
        fold_parts[DTYPE, N](
            launcher.gpu,
            call,
            call.fold_weight,
            call.fold_sums,
            call.fold_constants,
        )


def _plan_products(call: CallPointer) raises:
    plan_products[DTYPE](Launcher.at(call[].context)[], call[])


def _products(call: CallPointer) raises:
    comptime if DTYPE == DType.float32:
        raise Error("several products in float32 are PyTorch's")
    else:
        products[DTYPE](Launcher.at(call[].context)[], call[])


def _plan_input_gradients(call: CallPointer) raises:
    plan_input_gradients[DTYPE](Launcher.at(call[].context)[], call[])


def _input_gradients(call: CallPointer) raises:
    comptime if DTYPE == DType.float32:
        raise Error("float32 has no backward here")
    else:
        input_gradients[DTYPE](Launcher.at(call[].context)[], call[])


def _plan_passed_rows(call: CallPointer) raises:
    plan_passed_rows[DTYPE](Launcher.at(call[].context)[], call[])


def _passed_rows(call: CallPointer) raises:
    comptime if DTYPE == DType.float32:
        raise Error("float32 has no backward here")
    elif IS_RMS_NORM:
        passed_rows[DTYPE, RmsNorm](Launcher.at(call[].context)[], call[])
    else:
        passed_rows[DTYPE, LayerNorm](Launcher.at(call[].context)[], call[])


def _plan_weight_gradient(call: CallPointer) raises:
    plan_weight_gradient[DTYPE](Launcher.at(call[].context)[], call[])


def _weight_gradient(call: CallPointer) raises:
    comptime if DTYPE == DType.float32:
        raise Error("float32 has no backward here")
    else:
        weight_gradient[DTYPE](Launcher.at(call[].context)[], call[])


def _plan_linear(call: CallPointer) raises:
    plan_linear[DTYPE](Launcher.at(call[].context)[], call[])


def _linear(call: CallPointer) raises:
    comptime if DTYPE == DType.float32:
        raise Error("float32 without a norm is PyTorch's")
    else:
        linear[DTYPE](Launcher.at(call[].context)[], call[])


def _plan_input_gradient(call: CallPointer) raises:
    plan_input_gradient[DTYPE](Launcher.at(call[].context)[], call[])


def _input_gradient(call: CallPointer) raises:
    comptime if DTYPE == DType.float32:
        raise Error("float32 has no backward here")
    else:
        input_gradient[DTYPE](Launcher.at(call[].context)[], call[])


@export
def norm_linear_plan_linear(call: CallPointer) abi("C") -> Int:
    return from_c[_plan_linear](call)


@export
def norm_linear_linear(call: CallPointer) abi("C") -> Int:
    return from_c[_linear](call)


@export
def norm_linear_plan_input_gradient(call: CallPointer) abi("C") -> Int:
    return from_c[_plan_input_gradient](call)


@export
def norm_linear_input_gradient(call: CallPointer) abi("C") -> Int:
    return from_c[_input_gradient](call)


@export
def norm_linear_fold(call: CallPointer) abi("C") -> Int:
    return from_c[_fold](call)


@export
def norm_linear_plan_products(call: CallPointer) abi("C") -> Int:
    return from_c[_plan_products](call)


@export
def norm_linear_products(call: CallPointer) abi("C") -> Int:
    return from_c[_products](call)


@export
def norm_linear_plan_input_gradients(call: CallPointer) abi("C") -> Int:
    return from_c[_plan_input_gradients](call)


@export
def norm_linear_input_gradients(call: CallPointer) abi("C") -> Int:
    return from_c[_input_gradients](call)


@export
def norm_linear_plan_passed_rows(call: CallPointer) abi("C") -> Int:
    return from_c[_plan_passed_rows](call)


@export
def norm_linear_passed_rows(call: CallPointer) abi("C") -> Int:
    return from_c[_passed_rows](call)


@export
def norm_linear_plan_weight_gradient(call: CallPointer) abi("C") -> Int:
    return from_c[_plan_weight_gradient](call)


@export
def norm_linear_weight_gradient(call: CallPointer) abi("C") -> Int:
    return from_c[_weight_gradient](call)


@export
def norm_linear_plan_forward(call: CallPointer) abi("C") -> Int:
    return from_c[_plan_forward](call)


@export
def norm_linear_forward(call: CallPointer) abi("C") -> Int:
    return from_c[_forward](call)


@export
def norm_linear_plan_backward(call: CallPointer) abi("C") -> Int:
    return from_c[_plan_backward](call)


@export
def norm_linear_backward(call: CallPointer) abi("C") -> Int:
    return from_c[_backward](call)


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
            cycles,
            "cycles",
            docstring="cycles(M, K, N, SMs, whose) -> the model's: 0 for ours, 1 for PyTorch's",
        )
        builder.def_py_c_function(
            from_python[_plan_forward],
            "plan_forward",
            docstring="plan_forward(call) -> 0; writes way, workspace_bytes",
        )
        builder.def_py_c_function(
            from_python[_forward],
            "forward",
            docstring="forward(call) -> 0; queues what was planned",
        )
        builder.def_py_c_function(
            from_python[_plan_backward],
            "plan_backward",
            docstring="plan_backward(call) -> 0; writes way, workspace_bytes",
        )
        builder.def_py_c_function(
            from_python[_backward],
            "backward",
            docstring="backward(call) -> 0; queues what was planned",
        )
        builder.def_py_c_function(
            from_python[_fold],
            "fold",
            docstring=(
                "fold(call) -> 0; queues the fold of the parameters into"
                " fold_weight, fold_sums and fold_constants"
            ),
        )
        builder.def_py_c_function(
            from_python[_plan_linear],
            "plan_linear",
            docstring="plan_linear(call) -> 0; writes way",
        )
        builder.def_py_c_function(
            from_python[_linear],
            "linear",
            docstring="linear(call) -> 0; queues what was planned",
        )
        builder.def_py_c_function(
            from_python[_plan_input_gradient],
            "plan_input_gradient",
            docstring="plan_input_gradient(call) -> 0; writes way",
        )
        builder.def_py_c_function(
            from_python[_input_gradient],
            "input_gradient",
            docstring="input_gradient(call) -> 0; queues dx = dy weight",
        )
        builder.def_py_c_function(
            from_python[_plan_products],
            "plan_products",
            docstring="plan_products(call) -> 0; writes way",
        )
        builder.def_py_c_function(
            from_python[_products],
            "products",
            docstring="products(call) -> 0; queues y = z weight^T + bias of each part",
        )
        builder.def_py_c_function(
            from_python[_plan_input_gradients],
            "plan_input_gradients",
            docstring="plan_input_gradients(call) -> 0; writes way",
        )
        builder.def_py_c_function(
            from_python[_input_gradients],
            "input_gradients",
            docstring="input_gradients(call) -> 0; queues dz, the sum of dy weight of each part",
        )
        builder.def_py_c_function(
            from_python[_plan_passed_rows],
            "plan_passed_rows",
            docstring="plan_passed_rows(call) -> 0; writes way, workspace_bytes",
        )
        builder.def_py_c_function(
            from_python[_passed_rows],
            "passed_rows",
            docstring="passed_rows(call) -> 0; queues dx, dgamma, dbeta and z in place of dz",
        )
        builder.def_py_c_function(
            from_python[_plan_weight_gradient],
            "plan_weight_gradient",
            docstring="plan_weight_gradient(call) -> 0; writes way, workspace_bytes",
        )
        builder.def_py_c_function(
            from_python[_weight_gradient],
            "weight_gradient",
            docstring="weight_gradient(call) -> 0; queues dweight, dbias",
        )
        return builder.finalize()
    except e:
        abort(t"failed to create norm_linear_sm90: {e}")
