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

from op.call import CallPointer
from op.device import Launcher, new_launcher
from op.passes.door import from_c, from_python
from op.norm_linear.sm90.backward import backward, input_gradient
from op.norm_linear.sm90.backward_plan import plan_backward
from op.norm_linear.sm90.fold import fold
from op.norm_linear.sm90.forward import forward, linear_add
from op.norm_linear.sm90.forward_plan import plan_forward, plan_linear_add
from op.norms.layer_norm import LayerNorm
from op.norms.rms_norm import RmsNorm

comptime DTYPE = get_defined_dtype["dtype", DType.bfloat16]()
comptime IS_RMS_NORM = is_defined["rms_norm"]()


def _plan_forward(call: CallPointer) raises:
    plan_forward[DTYPE](Launcher.at(call[].context)[], call[])


def _forward(call: CallPointer) raises:
    comptime if IS_RMS_NORM:
        forward[DTYPE, RmsNorm](Launcher.at(call[].context)[], call[])
    else:
        forward[DTYPE, LayerNorm](Launcher.at(call[].context)[], call[])


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
        fold[DTYPE, RmsNorm](Launcher.at(call[].context)[], call[])
    else:
        fold[DTYPE, LayerNorm](Launcher.at(call[].context)[], call[])


def _plan_linear_add(call: CallPointer) raises:
    comptime if DTYPE != DType.float32:
        plan_linear_add[DTYPE](Launcher.at(call[].context)[], call[])


def _linear_add(call: CallPointer) raises:
    comptime if DTYPE == DType.float32:
        raise Error("float32 sums are PyTorch's")
    else:
        linear_add[DTYPE](Launcher.at(call[].context)[], call[])


def _input_gradient(call: CallPointer) raises:
    comptime if DTYPE == DType.float32:
        raise Error("float32 has no backward here")
    else:
        input_gradient[DTYPE](Launcher.at(call[].context)[], call[])


@export
def norm_linear_plan_linear_add(call: CallPointer) abi("C") -> Int:
    return from_c[_plan_linear_add](call)


@export
def norm_linear_linear_add(call: CallPointer) abi("C") -> Int:
    return from_c[_linear_add](call)


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
            from_python[_plan_linear_add],
            "plan_linear_add",
            docstring="plan_linear_add(call) -> 0; writes way",
        )
        builder.def_py_c_function(
            from_python[_linear_add],
            "linear_add",
            docstring="linear_add(call) -> 0; queues what was planned",
        )
        builder.def_py_c_function(
            from_python[_input_gradient],
            "input_gradient",
            docstring="input_gradient(call) -> 0; queues dx = dy weight",
        )
        return builder.finalize()
    except e:
        abort(t"failed to create norm_linear_sm90: {e}")
