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

from op.layernorm_linear.cpu.backward import backward_bytes, compute_gradients
from op.layernorm_linear.cpu.blocking import Blocking, Buffer
from op.layernorm_linear.cpu.forward import Forward, ForwardPlan
from op.layernorm_linear.cpu.gradients import Gradients, Wanted
from op.layernorm_linear.cpu.parameters import Parameter
from op.layernorm_linear.cpu.workspace import buffer
from op.python_call import Arguments, Values, integer

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


def _plan(mut arguments: Arguments) -> ForwardPlan[DTYPE]:
    var M = arguments.integer()
    var K = arguments.integer()
    var N = arguments.integer()
    var threads = arguments.integer()
    return ForwardPlan[DTYPE](M, K, N, threads)


def forward_workspace(
    module: PyObjectPtr, values: Values, count: Py_ssize_t
) abi("C") -> PyObjectPtr:
    """Returns the size in bytes of the workspace that `forward` needs."""
    var arguments = Arguments(values)
    var plan = _plan(arguments)
    return integer(plan.bytes if plan.bytes > STACK_BYTES else 0)


def forward(
    module: PyObjectPtr, values: Values, count: Py_ssize_t
) abi("C") -> PyObjectPtr:
    """Computes y, and the rows' mean and rstd where their address is given."""
    var arguments = Arguments(values)
    var plan = _plan(arguments)
    var gomp_parallel = arguments.integer()
    var workspace = arguments.integer()
    var ln_is_float32 = arguments.integer() != 0
    var eps = arguments.number()
    var y = buffer[DTYPE](arguments.integer())
    var mean = _optional[ACCUM](arguments.integer())
    var rstd = _optional[ACCUM](arguments.integer())
    var x = buffer[DTYPE](arguments.integer())
    var ln_weight = Parameter(arguments.integer(), ln_is_float32)
    var ln_bias = Parameter(arguments.integer(), ln_is_float32)
    var weight = buffer[DTYPE](arguments.integer())
    var bias = _optional[DTYPE](arguments.integer())
    var is_long = plan.M * plan.K * plan.N >= LONG_PRODUCTS
    var room = stack_allocation[STACK_BYTES, DType.uint8]()
    if workspace == 0:
        workspace = Int(room)
    var job = Forward[DTYPE](
        plan^,
        y,
        mean,
        rstd,
        x,
        ln_weight,
        ln_bias,
        weight,
        bias,
        eps,
        workspace,
    )
    if is_long:
        with GILReleased(Python()):
            job.run(gomp_parallel)
    else:
        job.run(gomp_parallel)
    return integer(0)


def backward_workspace(
    module: PyObjectPtr, values: Values, count: Py_ssize_t
) abi("C") -> PyObjectPtr:
    """Returns the size in bytes of the workspace that `backward` needs."""
    var arguments = Arguments(values)
    var M = arguments.integer()
    var K = arguments.integer()
    var N = arguments.integer()
    var threads = arguments.integer()
    var wanted = Wanted(
        arguments.integer() != 0,
        arguments.integer() != 0,
        arguments.integer() != 0,
        arguments.integer() != 0,
        arguments.integer() != 0,
    )
    var bytes = backward_bytes[DTYPE](M, K, N, wanted, threads)
    return integer(bytes if bytes > STACK_BYTES else 0)


def backward(
    module: PyObjectPtr, values: Values, count: Py_ssize_t
) abi("C") -> PyObjectPtr:
    """Computes the gradients whose address is given."""
    var arguments = Arguments(values)
    var M = arguments.integer()
    var K = arguments.integer()
    var N = arguments.integer()
    var threads = arguments.integer()
    var gomp_parallel = arguments.integer()
    var workspace = arguments.integer()
    var ln_is_float32 = arguments.integer() != 0
    var dx = arguments.integer()
    var dln_weight = Parameter(arguments.integer(), ln_is_float32)
    var dln_bias = Parameter(arguments.integer(), ln_is_float32)
    var dweight = arguments.integer()
    var dbias = arguments.integer()
    var dy = buffer[DTYPE](arguments.integer())
    var x = buffer[DTYPE](arguments.integer())
    var mean = buffer[ACCUM](arguments.integer())
    var rstd = buffer[ACCUM](arguments.integer())
    var ln_weight = Parameter(arguments.integer(), ln_is_float32)
    var ln_bias = Parameter(arguments.integer(), ln_is_float32)
    var weight = buffer[DTYPE](arguments.integer())
    var gradients = Gradients[DTYPE](
        M,
        K,
        N,
        dx,
        dln_weight,
        dln_bias,
        dweight,
        dbias,
        dy,
        x,
        mean,
        rstd,
        ln_weight,
        ln_bias,
        weight,
    )
    var room = stack_allocation[STACK_BYTES, DType.uint8]()
    if workspace == 0:
        workspace = Int(room)
    if M * K * N >= LONG_PRODUCTS:
        with GILReleased(Python()):
            compute_gradients(gradients, threads, workspace, gomp_parallel)
    else:
        compute_gradients(gradients, threads, workspace, gomp_parallel)
    return integer(0)


@export
def PyInit_layernorm_linear_cpu() abi("C") -> PythonObject:
    try:
        var builder = PythonModuleBuilder("layernorm_linear_cpu")
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
        abort(t"failed to create layernorm_linear_cpu: {e}")
