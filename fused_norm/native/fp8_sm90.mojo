"""A CPython extension that launches Hopper's kernels for 8 bits on PyTorch's stream.

Built once: mojo build -I . --emit shared-lib --target-accelerator=nvidia:sm_90a. All else is bfloat16.
Each function takes the address of a `Call`, as a function of Python and as one of C. All tensors are dense and start at multiples of 16 bytes.
"""

from std.os import abort
from std.python import PythonObject
from std.python.bindings import PythonModuleBuilder

from op.call import SQUARES, VECTORS, CallPointer
from op.device import Launcher, new_launcher
from op.entry import add_pass, from_c
from op.norm_linear.sm90.block_scaled_linear import block_scaled_linear
from op.norm_linear.sm90.scaled_linear import scaled_linear, scaled_linears
from op.passes.maxima import run_maxima
from op.passes.modulation import has_wide_features
from op.passes.norm_maxima import run_norm_maxima
from op.passes.quantize import run_normalize_quantized, run_quantize
from op.passes.quantize_blocks import (
    run_quantize_squares,
    run_quantize_vectors,
)
from op.passes.quantize_by_maxima import run_quantize_by_maxima


def _linear(call: CallPointer) raises:
    if call[].block_scales != 0:
        block_scaled_linear(Launcher.at(call[].context)[].gpu, call[])
        return
    scaled_linear(Launcher.at(call[].context)[].gpu, call[])


def _linears(call: CallPointer) raises:
    scaled_linears(Launcher.at(call[].context)[].gpu, call[])


def _normalize(call: CallPointer) raises:
    ref gpu = Launcher.at(call[].context)[].gpu
    if has_wide_features(call[]):
        run_normalize_quantized[DType.bfloat16, DType.float32](gpu, call[])
    else:
        run_normalize_quantized[DType.bfloat16, DType.bfloat16](gpu, call[])


def _quantize(call: CallPointer) raises:
    ref gpu = Launcher.at(call[].context)[].gpu
    if call[].block_scales == VECTORS:
        run_quantize_vectors(gpu, call[])
    elif call[].block_scales == SQUARES:
        run_quantize_squares(gpu, call[])
    else:
        run_quantize[DType.bfloat16](gpu, call[])


def _maxima(call: CallPointer) raises:
    ref gpu = Launcher.at(call[].context)[].gpu
    if call[].rstd != 0:
        run_norm_maxima(gpu, call[])
    else:
        run_maxima(gpu, call[])


def _quantize_by_maxima(call: CallPointer) raises:
    run_quantize_by_maxima(Launcher.at(call[].context)[].gpu, call[])


@export
def fp8_linear(call: CallPointer) abi("C") -> Int:
    return from_c[_linear](call)


@export
def fp8_linears(call: CallPointer) abi("C") -> Int:
    return from_c[_linears](call)


@export
def fp8_normalize(call: CallPointer) abi("C") -> Int:
    return from_c[_normalize](call)


@export
def fp8_quantize(call: CallPointer) abi("C") -> Int:
    return from_c[_quantize](call)


@export
def fp8_maxima(call: CallPointer) abi("C") -> Int:
    return from_c[_maxima](call)


@export
def fp8_quantize_by_maxima(call: CallPointer) abi("C") -> Int:
    return from_c[_quantize_by_maxima](call)


@export
def PyInit_fp8_sm90() abi("C") -> PythonObject:
    """Makes the module.

    Returns:
        The module.
    """
    try:
        var builder = PythonModuleBuilder("fp8_sm90")
        builder.def_py_c_function(
            new_launcher,
            "new_launcher",
            docstring="new_launcher(device, stream, alone) -> address",
        )
        add_pass[_linear, "linear", "queues y from z and the weight in 8 bits"](
            builder
        )
        add_pass[
            _linears,
            "linears",
            "queues y of each part from z and its weight in 8 bits",
        ](builder)
        add_pass[
            _normalize,
            "normalize",
            "queues z in 8 bits, its scales, sum, mean, rstd",
        ](builder)
        add_pass[
            _quantize, "quantize", "queues x in 8 bits as z, and its scales"
        ](builder)
        add_pass[
            _maxima,
            "maxima",
            "queues the maxima of each x, and x if it is dh of da and h; or the maxima of a norm of x, mean, rstd",
        ](builder)
        add_pass[
            _quantize_by_maxima,
            "quantize_by_maxima",
            "queues each x or a norm of x in 8 bits as z and zt by its maxima, and scales",
        ](builder)
        return builder.finalize()
    except e:
        abort(t"failed to create fp8_sm90: {e}")
