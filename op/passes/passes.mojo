"""The passes, each with a plan, for the entry points in passes_cpu and passes_gpu.

A build serves one type of x. The norm's parameters are of that type or float32, products of that type or narrower.
A plan writes the size of the workspace, and nothing else: any runner can run any call.
"""

from ..call import Call
from ..rows.operands import accumulator
from .activate import (
    activate_backward_bytes,
    run_activate,
    run_activate_backward,
)
from .modulation import has_wide_features
from .normalize import normalize_bytes, run_normalize
from .normalize_backward import run_dbias, run_normalize_backward, workspace
from .runner import Runner


def _product_types[dtype: DType]() -> Int:
    """Returns how many of `Call.narrow` there are: only float32 has narrower products."""
    return 3 if dtype == DType.float32 else 1


def _product[dtype: DType](narrow: Int) -> DType:
    """Returns the type of products."""
    if narrow == 0:
        return dtype
    return DType.bfloat16 if narrow == 1 else DType.float16


def plan_normalize[dtype: DType](mut call: Call):
    """Writes the size of the workspace.

    Parameters:
        dtype: The type of x.

    Args:
        call: The forward.
    """
    call.workspace_bytes = normalize_bytes[dtype](call)


def normalize[dtype: DType, R: Runner](mut runner: R, call: Call) raises:
    """Writes which of sum, z, mean and rstd are wanted from x.

    Parameters:
        dtype: The type of x.
        R: What runs it.

    Args:
        runner: Where to run.
        call: The forward.

    Raises:
        If a launch fails.
    """
    comptime accum = accumulator[dtype]()
    comptime if dtype != accum:
        if has_wide_features(call):
            return run_normalize[dtype, accum](runner, call)
    run_normalize[dtype, dtype](runner, call)


def plan_normalize_backward[dtype: DType, R: Runner](runner: R, mut call: Call):
    """Writes the size of the workspace.

    Parameters:
        dtype: The type of x.
        R: What runs it.

    Args:
        runner: Where to run.
        call: The backward; addresses that are not 0 say what there is and what is wanted.
    """
    comptime for i in range(_product_types[dtype]()):
        if call.narrow == i:
            call.workspace_bytes = workspace[dtype, _product[dtype](i)](
                runner, call
            ).bytes


def normalize_backward[
    dtype: DType, R: Runner
](mut runner: R, call: Call) raises:
    """Writes which of dx, z, dgamma, dbeta, dscale, dshift and dbias are wanted from dz, x and dy.

    Parameters:
        dtype: The type of x.
        R: What runs it.

    Args:
        runner: Where to run.
        call: The backward.

    Raises:
        If a launch fails.
    """
    comptime accum = accumulator[dtype]()
    comptime for i in range(_product_types[dtype]()):
        if call.narrow == i:
            comptime product = _product[dtype](i)
            comptime if dtype != accum:
                if has_wide_features(call):
                    return normalize_backward_of[dtype, accum, product](
                        runner, call
                    )
            normalize_backward_of[dtype, dtype, product](runner, call)


def normalize_backward_of[
    dtype: DType, ftype: DType, product_dtype: DType, R: Runner
](mut runner: R, call: Call) raises:
    """Does the same where all types are known.

    Parameters:
        dtype: The type of x.
        ftype: The type of the features, as for `run_normalize`.
        product_dtype: The type of dy.
        R: What runs it.

    Args:
        runner: Where to run.
        call: The backward.

    Raises:
        If a launch fails.
    """
    var space = workspace[dtype, product_dtype](runner, call)
    run_normalize_backward[dtype, ftype](runner, call, space)
    run_dbias[product_dtype](runner, call, space)
    runner.finish()


def activate[dtype: DType, R: Runner](mut runner: R, call: Call) raises:
    """Writes a from h.

    Parameters:
        dtype: The type of x.
        R: What runs it.

    Args:
        runner: Where to run.
        call: The forward.

    Raises:
        If a launch fails.
    """
    comptime for i in range(_product_types[dtype]()):
        if call.narrow == i:
            run_activate[_product[dtype](i)](runner, call)


def plan_activate_backward[dtype: DType, R: Runner](runner: R, mut call: Call):
    """Writes the size of the workspace.

    Parameters:
        dtype: The type of x.
        R: What runs it.

    Args:
        runner: Where to run.
        call: The backward; the address of dbias says whether it is wanted.
    """
    comptime for i in range(_product_types[dtype]()):
        if call.narrow == i:
            call.workspace_bytes = activate_backward_bytes[_product[dtype](i)](
                runner, call
            )


def activate_backward[
    dtype: DType, R: Runner
](mut runner: R, call: Call) raises:
    """Writes which of dh, a and dbias are wanted from da and h.

    Parameters:
        dtype: The type of x.
        R: What runs it.

    Args:
        runner: Where to run.
        call: The backward.

    Raises:
        If a launch fails.
    """
    comptime for i in range(_product_types[dtype]()):
        if call.narrow == i:
            run_activate_backward[_product[dtype](i)](runner, call)
