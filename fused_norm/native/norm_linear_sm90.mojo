"""A CPython extension that launches the sm_90a kernels on PyTorch's stream.

Built once per dtype: mojo build -I . -D dtype=bfloat16 --emit shared-lib
--target-accelerator=nvidia:sm_90a. Addresses are data pointers; all matrices
are contiguous, start at multiples of 16 bytes, and have rows of a multiple of
16 bytes. Nothing here checks that.

float32 is multiplied as tf32, of which tensor cores take no transposed
operands, and whose rounding of x would show where its mean is large: there is
no fold, and no backward.
"""

from std.os import abort
from std.python import PythonObject
from std.python._cpython import Py_ssize_t, PyObjectPtr
from std.python.bindings import PythonModuleBuilder
from std.sys import get_defined_dtype, size_of

from op.call import Call
from op.layernorm_linear.sm90.launch_backward import (
    backward_workspace as count_backward_workspace,
)
from op.layernorm_linear.sm90.launch_backward import is_fast
from op.layernorm_linear.sm90.launch_fold import launch_fold
from op.layernorm_linear.sm90.launch_forward import (
    launch_forward,
    launch_statistics,
)
from op.layernorm_linear.sm90.launch_product import launch_product
from op.layernorm_linear.sm90.launch_weight_gradient import (
    launch_weight_gradient,
)
from op.layernorm_linear.sm90.launcher import Launcher, launcher_at
from op.layernorm_linear.sm90.queue_call import queue_backward, queue_composed
from op.python import Arguments, Values, failure, integer

comptime DTYPE = get_defined_dtype["dtype", DType.bfloat16]()
comptime IS_TF32 = DTYPE == DType.float32

comptime ALIGNMENT = 16
"""A box of the copy engine starts at a multiple of so many bytes."""


comptime Own = Launcher[DTYPE]


def gemm(
    module: PyObjectPtr, values: Values, count: Py_ssize_t
) abi("C") -> PyObjectPtr:
    """Queues y = x @ w^T, or x @ w."""
    var arguments = Arguments(values)
    ref launcher = launcher_at[DTYPE](arguments.integer())[]
    var y = arguments.integer()
    var x = arguments.integer()
    var w = arguments.integer()
    var m = arguments.integer()
    var n = arguments.integer()
    var k = arguments.integer()
    var transposed = arguments.integer() != 0
    try:
        comptime for w_transposed in [False, True]:
            # tf32 has no transposed operands.
            comptime if not (w_transposed and IS_TF32):
                if transposed == w_transposed:
                    launch_product[DTYPE, w_transposed](
                        launcher.gpu, y, x, w, m, n, k
                    )
        return integer(0)
    except error:
        return failure(error)


def weight_gradient(
    module: PyObjectPtr, values: Values, count: Py_ssize_t
) abi("C") -> PyObjectPtr:
    """Queues dw = dy^T @ z and db = the column sums of dy."""
    var arguments = Arguments(values)
    ref launcher = launcher_at[DTYPE](arguments.integer())[]
    var dw = arguments.integer()
    var db = arguments.integer()
    var dy = arguments.integer()
    var z = arguments.integer()
    var workspace = arguments.integer()
    var m = arguments.integer()
    var n = arguments.integer()
    var k = arguments.integer()
    var float32 = arguments.integer() != 0
    var accumulate = arguments.integer() != 0
    try:
        comptime for wide in [False, True]:
            if float32 == wide:
                launch_weight_gradient[DTYPE, DType.float32 if wide else DTYPE](
                    launcher.gpu,
                    dw,
                    db,
                    dy,
                    z,
                    workspace,
                    m,
                    n,
                    k,
                    accumulate,
                )
        return integer(0)
    except error:
        return failure(error)


def forward(
    module: PyObjectPtr, values: Values, count: Py_ssize_t
) abi("C") -> PyObjectPtr:
    """Queues y = LayerNorm(x) W^T + b from a folded weight."""
    var arguments = Arguments(values)
    ref launcher = launcher_at[DTYPE](arguments.integer())[]
    var y = arguments.integer()
    var mean = arguments.integer()
    var rstd = arguments.integer()
    var x = arguments.integer()
    var wc = arguments.integer()
    var s = arguments.integer()
    var c = arguments.integer()
    var m = arguments.integer()
    var n = arguments.integer()
    var k = arguments.integer()
    var eps = Float32(arguments.number())
    try:
        launch_forward[DTYPE](
            launcher.gpu,
            y,
            mean,
            rstd,
            x,
            wc,
            s,
            c,
            m,
            n,
            k,
            eps,
        )
        return integer(0)
    except error:
        return failure(error)


def backward(
    module: PyObjectPtr, values: Values, count: Py_ssize_t
) abi("C") -> PyObjectPtr:
    """Queues the gradients of LayerNorm and Linear."""
    var arguments = Arguments(values)
    var call = Call()
    call.context = arguments.integer()
    call.dx = arguments.integer()
    call.dln_weight = arguments.integer()
    call.dln_bias = arguments.integer()
    call.dweight = arguments.integer()
    call.dbias = arguments.integer()
    call.dy = arguments.integer()
    call.x = arguments.integer()
    call.ln_weight = arguments.integer()
    call.ln_bias = arguments.integer()
    call.weight = arguments.integer()
    call.mean = arguments.integer()
    call.rstd = arguments.integer()
    call.workspace = arguments.integer()
    call.M = arguments.integer()
    call.N = arguments.integer()
    call.K = arguments.integer()
    call.eps = arguments.number()
    call.ln_is_float32 = arguments.integer()
    var accumulates = arguments.integer() != 0
    try:
        queue_backward[DTYPE](call, accumulates)
        return integer(0)
    except error:
        return failure(error)


@export
def layernorm_linear_backward_workspace(
    call: Pointer[Call, MutUntrackedOrigin]
) abi("C") -> Int:
    """Counts the bytes that a backward outside of graphs needs.

    It is -1 where others are faster, and where a matrix is not aligned as the
    copy engine needs it.
    """
    ref launcher = launcher_at[DTYPE](call[].context)[]
    var aligned = (call[].dy | call[].x | call[].weight) % ALIGNMENT == 0
    var fast = is_fast(launcher.gpu, call[].M, call[].N, call[].K, False)
    if not aligned or not fast:
        return -1
    return count_backward_workspace[DTYPE](
        launcher.gpu,
        call[].M,
        call[].N,
        call[].K,
        call[].dln_weight != 0 or call[].dln_bias != 0,
        call[].dweight != 0,
    )


@export
def layernorm_linear_backward(
    call: Pointer[Call, MutUntrackedOrigin]
) abi("C") -> Int:
    """Queues the gradients, and returns 0 if nothing failed."""
    try:
        queue_backward[DTYPE](call[], False)
        return 0
    except:
        return 1


def composed_forward(
    module: PyObjectPtr, values: Values, count: Py_ssize_t
) abi("C") -> PyObjectPtr:
    """Queues z = LayerNorm(x), and y = z W^T + b."""
    var arguments = Arguments(values)
    var call = Call()
    call.context = arguments.integer()
    call.y = arguments.integer()
    call.workspace = arguments.integer()
    call.mean = arguments.integer()
    call.rstd = arguments.integer()
    call.x = arguments.integer()
    call.ln_weight = arguments.integer()
    call.ln_bias = arguments.integer()
    call.weight = arguments.integer()
    call.bias = arguments.integer()
    call.M = arguments.integer()
    call.N = arguments.integer()
    call.K = arguments.integer()
    call.eps = arguments.number()
    call.ln_is_float32 = arguments.integer()
    try:
        queue_composed[DTYPE](call)
        return integer(0)
    except error:
        return failure(error)


@export
def layernorm_linear_forward_workspace(
    call: Pointer[Call, MutUntrackedOrigin]
) abi("C") -> Int:
    """Counts the bytes of z, -1 where the copy engine cannot read a matrix."""
    var rows = (call[].K | call[].N) * size_of[DTYPE]()
    if (call[].weight | call[].bias | rows) % ALIGNMENT != 0:
        return -1
    return call[].M * call[].K * size_of[DTYPE]()


@export
def layernorm_linear_forward(
    call: Pointer[Call, MutUntrackedOrigin]
) abi("C") -> Int:
    """Queues y, mean and rstd, z in between, and returns 0 if nothing failed."""
    try:
        queue_composed[DTYPE](call[])
        return 0
    except:
        return 1


def backward_workspace(
    module: PyObjectPtr, values: Values, count: Py_ssize_t
) abi("C") -> PyObjectPtr:
    """Counts the bytes that a backward needs, -1 where others are faster."""
    var arguments = Arguments(values)
    ref launcher = launcher_at[DTYPE](arguments.integer())[]
    var m = arguments.integer()
    var n = arguments.integer()
    var k = arguments.integer()
    var wants_sums = arguments.integer() != 0
    var wants_weight = arguments.integer() != 0
    var in_graph = arguments.integer() != 0
    if not is_fast(launcher.gpu, m, n, k, in_graph):
        return integer(-1)
    return integer(
        count_backward_workspace[DTYPE](
            launcher.gpu, m, n, k, wants_sums, wants_weight
        )
    )


def stats(
    module: PyObjectPtr, values: Values, count: Py_ssize_t
) abi("C") -> PyObjectPtr:
    """Queues the row statistics of x."""
    var arguments = Arguments(values)
    ref launcher = launcher_at[DTYPE](arguments.integer())[]
    var mean = arguments.integer()
    var rstd = arguments.integer()
    var x = arguments.integer()
    var m = arguments.integer()
    var k = arguments.integer()
    var eps = Float32(arguments.number())
    try:
        launch_statistics[DTYPE](
            launcher.gpu,
            mean,
            rstd,
            x,
            m,
            k,
            eps,
        )
        return integer(0)
    except error:
        return failure(error)


def fold(
    module: PyObjectPtr, values: Values, count: Py_ssize_t
) abi("C") -> PyObjectPtr:
    """Queues the fold of a weight."""
    var arguments = Arguments(values)
    ref launcher = launcher_at[DTYPE](arguments.integer())[]
    var wc = arguments.integer()
    var s = arguments.integer()
    var c = arguments.integer()
    var w = arguments.integer()
    var gamma = arguments.integer()
    var beta = arguments.integer()
    var bias = arguments.integer()
    var n = arguments.integer()
    var k = arguments.integer()
    var centred = arguments.integer() != 0
    var float32 = arguments.integer() != 0
    try:
        comptime for wide in range(2):
            if float32 == (wide == 1):
                launch_fold[DTYPE, DType.float32 if wide == 1 else DTYPE](
                    launcher.gpu,
                    wc,
                    s,
                    c,
                    w,
                    gamma,
                    beta,
                    bias,
                    n,
                    k,
                    centred,
                )
        return integer(0)
    except error:
        return failure(error)


@export
def PyInit_norm_linear_sm90() abi("C") -> PythonObject:
    """Makes the module.

    Returns:
        The module.
    """
    try:
        var builder = PythonModuleBuilder("norm_linear_sm90")
        _ = (
            builder.add_type[Own]("Launcher")
            .def_py_init[Own.py_init]()
            .def_method[Own.address]("address")
        )
        builder.def_py_c_function(
            gemm,
            "gemm",
            docstring=(
                "gemm(launcher, y, x, w, m, n, k, w_transposed) -> 0; y = x @"
                " w^T, where w is stored as [n, k] or [k, n]"
            ),
        )
        builder.def_py_c_function(
            composed_forward,
            "composed_forward",
            docstring=(
                "composed_forward(launcher, y, z, mean, rstd, x, gamma, beta,"
                " w, bias, m, n, k, eps, affine_is_float32) -> 0; mean and rstd"
                " are 0 if they are not wanted, gamma, beta and bias if there"
                " is none"
            ),
        )
        comptime if not IS_TF32:
            builder.def_py_c_function(
                weight_gradient,
                "weight_gradient",
                docstring=(
                    "weight_gradient(launcher, dw, db, dy, z, workspace, m, n,"
                    " k, float32, accumulate) -> 0; db is 0 if it is not"
                    " wanted; the workspace is that of the backward less dz;"
                    " with float32, dw and db are, and can be added to"
                ),
            )
            builder.def_py_c_function(
                forward,
                "forward",
                docstring=(
                    "forward(launcher, y, mean, rstd, x, wc, s, c, m, n, k,"
                    " eps) -> 0; y, mean and rstd are written"
                ),
            )
            builder.def_py_c_function(
                backward,
                "backward",
                docstring=(
                    "backward(launcher, dx, dgamma, dbeta, dw, db, dy, x,"
                    " gamma, beta, w, mean, rstd, workspace, m, n, k, eps,"
                    " affine_is_float32, accumulates) -> 0; gradients are 0"
                    " where none is wanted; dw, and db beside it, are float32"
                    " and added to if it accumulates"
                ),
            )
            builder.def_py_c_function(
                backward_workspace,
                "backward_workspace",
                docstring=(
                    "backward_workspace(launcher, m, n, k, wants_sums,"
                    " wants_weight, in_graph) -> bytes, or -1 where PyTorch's"
                    " products are faster; wants_sums with dgamma or dbeta"
                ),
            )
            builder.def_py_c_function(
                stats,
                "stats",
                docstring="stats(launcher, mean, rstd, x, m, k, eps) -> 0",
            )
            builder.def_py_c_function(
                fold,
                "fold",
                docstring=(
                    "fold(launcher, wc, s, c, w, gamma, beta, bias, n, k,"
                    " centred, affine_is_float32) -> 0; gamma, beta and bias"
                    " are 0 where there is none"
                ),
            )
        return builder.finalize()
    except e:
        abort(t"failed to create norm_linear_sm90: {e}")
