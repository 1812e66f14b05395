"""Python extension module of the CPU kernels, for one element type per build.

Arguments are integers: addresses of dense row-major tensors (0 for none) and
sizes of at least 1. The caller validates, allocates and serves empty tensors.
"""

from std.memory import stack_allocation
from std.os import abort
from std.python import Python, PythonObject
from std.python._cpython import GILReleased, Py_ssize_t, PyObjectPtr
from std.python.bindings import PythonModuleBuilder
from std.sys import get_defined_dtype

from op.call import Call
from op.layernorm_linear.cpu.backward import backward_bytes, compute_gradients
from op.layernorm_linear.cpu.blocking import Blocking, Buffer
from op.layernorm_linear.cpu.forward import Forward
from op.layernorm_linear.cpu.forward_plan import ForwardPlan
from op.layernorm_linear.cpu.gradients import Gradients, Wanted
from op.layernorm_linear.cpu.parameters import Parameter
from op.layernorm_linear.cpu.workspace import buffer
from op.python import Arguments, Values, integer

comptime DTYPE = get_defined_dtype["dtype", DType.float32]()
comptime ACCUM = Blocking[DTYPE].accum

comptime STACK_BYTES = 65536
"""A workspace of up to this size lives on the stack."""

comptime LONG_PRODUCTS = 1 << 21
"""From so much work on, other Python threads may run meanwhile."""


def _optional[dtype: DType](address: Int) -> Optional[Buffer[dtype]]:
    if address == 0:
        return None
    return buffer[dtype](address)


def _call(mut arguments: Arguments) -> Call:
    var call = Call()
    call.M = arguments.integer()
    call.K = arguments.integer()
    call.N = arguments.integer()
    call.threads = arguments.integer()
    return call


def _plan(call: Call) -> ForwardPlan[DTYPE]:
    return ForwardPlan[DTYPE](call.M, call.K, call.N, call.threads)


def _compute_forward(call: Call):
    var ln_is_float32 = call.ln_is_float32 != 0
    var room = stack_allocation[STACK_BYTES, DType.uint8]()
    var job = Forward[DTYPE](
        _plan(call),
        buffer[DTYPE](call.y),
        _optional[ACCUM](call.mean),
        _optional[ACCUM](call.rstd),
        buffer[DTYPE](call.x),
        Parameter(call.ln_weight, ln_is_float32),
        Parameter(call.ln_bias, ln_is_float32),
        buffer[DTYPE](call.weight),
        _optional[DTYPE](call.bias),
        call.eps,
        call.workspace if call.workspace != 0 else Int(room),
    )
    job.run(call.context)


def forward_workspace(
    module: PyObjectPtr, values: Values, count: Py_ssize_t
) abi("C") -> PyObjectPtr:
    """Returns the size in bytes of the workspace that `forward` needs."""
    var arguments = Arguments(values)
    var plan = _plan(_call(arguments))
    return integer(plan.bytes if plan.bytes > STACK_BYTES else 0)


def forward(
    module: PyObjectPtr, values: Values, count: Py_ssize_t
) abi("C") -> PyObjectPtr:
    """Computes y, and the rows' mean and rstd where their address is given."""
    var arguments = Arguments(values)
    var call = _call(arguments)
    call.context = arguments.integer()
    call.workspace = arguments.integer()
    call.ln_is_float32 = arguments.integer()
    call.eps = arguments.number()
    call.y = arguments.integer()
    call.mean = arguments.integer()
    call.rstd = arguments.integer()
    call.x = arguments.integer()
    call.ln_weight = arguments.integer()
    call.ln_bias = arguments.integer()
    call.weight = arguments.integer()
    call.bias = arguments.integer()
    if call.M * call.K * call.N >= LONG_PRODUCTS:
        with GILReleased(Python()):
            _compute_forward(call)
    else:
        _compute_forward(call)
    return integer(0)


def _wanted(call: Call) -> Wanted:
    return Wanted(
        call.dx != 0,
        call.dln_weight != 0,
        call.dln_bias != 0,
        call.dweight != 0,
        call.dbias != 0,
    )


def _workspace(call: Call) -> Int:
    var bytes = backward_bytes[DTYPE](
        call.M, call.K, call.N, _wanted(call), call.threads
    )
    return bytes if bytes > STACK_BYTES else 0


def _compute(call: Call):
    var ln_is_float32 = call.ln_is_float32 != 0
    var room = stack_allocation[STACK_BYTES, DType.uint8]()
    var gradients = Gradients[DTYPE](
        call.M,
        call.K,
        call.N,
        call.dx,
        Parameter(call.dln_weight, ln_is_float32),
        Parameter(call.dln_bias, ln_is_float32),
        call.dweight,
        call.dbias,
        buffer[DTYPE](call.dy),
        buffer[DTYPE](call.x),
        buffer[ACCUM](call.mean),
        buffer[ACCUM](call.rstd),
        Parameter(call.ln_weight, ln_is_float32),
        Parameter(call.ln_bias, ln_is_float32),
        buffer[DTYPE](call.weight),
    )
    compute_gradients(
        gradients,
        call.threads,
        call.workspace if call.workspace != 0 else Int(room),
        call.context,
    )


def backward_workspace(
    module: PyObjectPtr, values: Values, count: Py_ssize_t
) abi("C") -> PyObjectPtr:
    """Returns the size in bytes of the workspace that `backward` needs."""
    var arguments = Arguments(values)
    var call = _call(arguments)
    call.dx = arguments.integer()
    call.dln_weight = arguments.integer()
    call.dln_bias = arguments.integer()
    call.dweight = arguments.integer()
    call.dbias = arguments.integer()
    return integer(_workspace(call))


def backward(
    module: PyObjectPtr, values: Values, count: Py_ssize_t
) abi("C") -> PyObjectPtr:
    """Computes the gradients whose address is given."""
    var arguments = Arguments(values)
    var call = _call(arguments)
    call.context = arguments.integer()
    call.workspace = arguments.integer()
    call.ln_is_float32 = arguments.integer()
    call.dx = arguments.integer()
    call.dln_weight = arguments.integer()
    call.dln_bias = arguments.integer()
    call.dweight = arguments.integer()
    call.dbias = arguments.integer()
    call.dy = arguments.integer()
    call.x = arguments.integer()
    call.mean = arguments.integer()
    call.rstd = arguments.integer()
    call.ln_weight = arguments.integer()
    call.ln_bias = arguments.integer()
    call.weight = arguments.integer()
    if call.M * call.K * call.N >= LONG_PRODUCTS:
        with GILReleased(Python()):
            _compute(call)
    else:
        _compute(call)
    return integer(0)


@export
def layernorm_linear_forward_workspace(
    call: Pointer[Call, MutUntrackedOrigin]
) abi("C") -> Int:
    """Returns 0, or -1 where the forward needs a workspace: Python keeps one."""
    return 0 if _plan(call[]).bytes <= STACK_BYTES else -1


@export
def layernorm_linear_forward(
    call: Pointer[Call, MutUntrackedOrigin]
) abi("C") -> Int:
    """Computes y, mean and rstd, and returns 0."""
    _compute_forward(call[])
    return 0


@export
def layernorm_linear_backward_workspace(
    call: Pointer[Call, MutUntrackedOrigin]
) abi("C") -> Int:
    """Returns the size in bytes of the workspace that the backward needs."""
    return _workspace(call[])


@export
def layernorm_linear_backward(
    call: Pointer[Call, MutUntrackedOrigin]
) abi("C") -> Int:
    """Computes the gradients whose address is given, and returns 0."""
    _compute(call[])
    return 0


@export
def PyInit_norm_linear_cpu() abi("C") -> PythonObject:
    try:
        var builder = PythonModuleBuilder("norm_linear_cpu")
        builder.def_py_c_function(
            forward_workspace,
            "forward_workspace",
            docstring="forward_workspace(M, K, N, threads) -> bytes",
        )
        builder.def_py_c_function(
            forward,
            "forward",
            docstring=(
                "forward(M, K, N, threads, gomp_parallel, workspace,"
                " ln_is_float32, eps, y, mean, rstd, x, ln_weight, ln_bias,"
                " linear_weight, linear_bias) -> 0"
            ),
        )
        builder.def_py_c_function(
            backward_workspace,
            "backward_workspace",
            docstring=(
                "backward_workspace(M, K, N, threads, dx, dln_weight, dln_bias,"
                " dlinear_weight, dlinear_bias) -> bytes; the gradients are"
                " nonzero if wanted"
            ),
        )
        builder.def_py_c_function(
            backward,
            "backward",
            docstring=(
                "backward(M, K, N, threads, gomp_parallel, workspace,"
                " ln_is_float32, dx, dln_weight, dln_bias, dlinear_weight,"
                " dlinear_bias, dy, x, mean, rstd, ln_weight, ln_bias,"
                " linear_weight) -> 0"
            ),
        )
        return builder.finalize()
    except e:
        abort(t"failed to create norm_linear_cpu: {e}")
