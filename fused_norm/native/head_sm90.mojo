"""A CPython extension that launches the head's sm_90a kernels on PyTorch's stream.

Built for bfloat16: mojo build -I . -D dtype=bfloat16 --emit shared-lib --target-accelerator=nvidia:sm_90a. Each
function takes the address of a `HeadCall`. Tensors start at multiples of 16 bytes.
"""

from std.os import abort
from std.python import PythonObject
from std.python.bindings import PythonModuleBuilder

from op.device import Launcher, new_launcher
from op.entry import add_pass
from op.head.call import HeadPointer
from op.head.exponentials import launch_exponentials
from op.head.input_gradient import launch_input_gradient
from op.head.offsets import launch_offsets
from op.head.repair import launch_repair
from op.head.rows import launch_rows, launch_sums
from op.head.scale import launch_scale


def _exponentials(call: HeadPointer) raises:
    ref gpu = Launcher.at(call[].context)[].gpu
    launch_offsets(gpu, call[])
    launch_exponentials(gpu, call[])
    launch_sums(gpu, call[])
    launch_repair(gpu, call[])


def _rows(call: HeadPointer) raises:
    launch_rows(Launcher.at(call[].context)[].gpu, call[])


def _input_gradient(call: HeadPointer) raises:
    launch_input_gradient(Launcher.at(call[].context)[].gpu, call[])


def _scale(call: HeadPointer) raises:
    launch_scale(Launcher.at(call[].context)[].gpu, call[])


@export
def PyInit_head_sm90() abi("C") -> PythonObject:
    """Makes the module.

    Returns:
        The module.
    """
    try:
        var builder = PythonModuleBuilder("head_sm90")
        builder.def_py_c_function(
            new_launcher,
            "new_launcher",
            docstring="new_launcher(device, stream, alone) -> address",
        )
        add_pass[
            _exponentials,
            "exponentials",
            "queues offsets, exponentials and their sums of a chunk's rows",
        ](builder)
        add_pass[
            _rows,
            "rows",
            "queues losses, factors and scaled rows of a chunk",
        ](builder)
        add_pass[
            _input_gradient,
            "input_gradient",
            "queues the gradient of a chunk's rows",
        ](builder)
        add_pass[_scale, "scale", "queues tensor *= scale"](builder)
        return builder.finalize()
    except e:
        abort(t"failed to create head_sm90: {e}")
