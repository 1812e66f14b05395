"""A CPython extension that launches the sm_90a kernels on PyTorch's stream.

Built once per dtype: mojo build -I . -D dtype=bfloat16 --emit shared-lib
--target-accelerator=nvidia:sm_90a. Each pass takes the address of its `Call`,
once to plan it and once to run it. All tensors are dense; those that a pass
writes, and its workspace, start at multiples of 16 bytes.
"""

from std.os import abort
from std.python import PythonObject
from std.python._cpython import Py_ssize_t, PyObjectPtr
from std.python.bindings import PythonModuleBuilder
from std.sys import get_defined_dtype

from op.call import Call, CallPointer
from op.device import Launcher, new_launcher
from op.norm_linear.sm90.backward import launch_backward
from op.norm_linear.sm90.fold import launch_fold
from op.norm_linear.sm90.forward import launch_forward
from op.norm_linear.sm90.layer_norm import LayerNorm
from op.norm_linear.sm90.plan import plan_backward, plan_forward
from op.python import Arguments, Values, failure, integer

comptime DTYPE = get_defined_dtype["dtype", DType.bfloat16]()


def _plan_forward(mut call: Call) raises:
    plan_forward[DTYPE](call)


def _forward(mut call: Call) raises:
    launch_forward[DTYPE, LayerNorm](Launcher.at(call.context)[].gpu, call)


def _plan_backward(mut call: Call) raises:
    plan_backward[DTYPE](call)


def _backward(mut call: Call) raises:
    comptime if DTYPE == DType.float32:
        raise Error("float32 has no backward here")
    else:
        launch_backward[DTYPE, LayerNorm](Launcher.at(call.context)[].gpu, call)


def _fold(mut call: Call) raises:
    """Folds the parameters into the memory that the call names for it."""
    comptime if DTYPE == DType.bfloat16:
        launch_fold[DTYPE, LayerNorm](
            Launcher.at(call.context)[].gpu,
            call,
            call.fold_weight,
            call.fold_sums,
            call.fold_constants,
        )
    else:
        raise Error("only bfloat16 is folded")


def _from_python[
    run: def(mut Call) thin raises -> None
](module: PyObjectPtr, values: Values, count: Py_ssize_t) abi(
    "C"
) -> PyObjectPtr:
    var arguments = Arguments(values)
    try:
        run(CallPointer(unsafe_from_address=arguments.integer())[])
        return integer(0)
    except error:
        return failure(error)


def _from_c[run: def(mut Call) thin raises -> None](call: CallPointer) -> Int:
    try:
        run(call[])
        return 0
    except:
        return 1


@export
def norm_linear_plan_forward(call: CallPointer) abi("C") -> Int:
    """Plans a forward."""
    return _from_c[_plan_forward](call)


@export
def norm_linear_forward(call: CallPointer) abi("C") -> Int:
    """Queues a forward."""
    return _from_c[_forward](call)


@export
def norm_linear_plan_backward(call: CallPointer) abi("C") -> Int:
    """Plans a backward."""
    return _from_c[_plan_backward](call)


@export
def norm_linear_backward(call: CallPointer) abi("C") -> Int:
    """Queues a backward."""
    return _from_c[_backward](call)


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
            _from_python[_plan_forward],
            "plan_forward",
            docstring="plan_forward(call) -> 0; writes way, workspace_bytes",
        )
        builder.def_py_c_function(
            _from_python[_forward],
            "forward",
            docstring="forward(call) -> 0; queues what was planned",
        )
        builder.def_py_c_function(
            _from_python[_plan_backward],
            "plan_backward",
            docstring="plan_backward(call) -> 0; writes way, workspace_bytes",
        )
        builder.def_py_c_function(
            _from_python[_backward],
            "backward",
            docstring="backward(call) -> 0; queues what was planned",
        )
        builder.def_py_c_function(
            _from_python[_fold],
            "fold",
            docstring=(
                "fold(call) -> 0; queues the fold of the parameters into"
                " fold_weight, fold_sums and fold_constants"
            ),
        )
        return builder.finalize()
    except e:
        abort(t"failed to create norm_linear_sm90: {e}")
