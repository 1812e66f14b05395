"""Runs a call on a CPU for MAX: the kernels that PyTorch's front door runs, on Mojo's threads."""

from std.runtime import parallelism_level

from ..call import Call
from ..layernorm_linear.cpu.backward import backward_bytes, compute_gradients
from ..layernorm_linear.cpu.blocking import Blocking
from ..layernorm_linear.cpu.forward import Forward
from ..layernorm_linear.cpu.forward_plan import ForwardPlan
from ..layernorm_linear.cpu.gradients import Gradients
from ..layernorm_linear.cpu.parameters import Parameter
from ..layernorm_linear.cpu.workspace import buffer


def forward[dtype: DType](call: Call):
    """Computes y, mean and rstd.

    Parameters:
        dtype: The type of x.

    Args:
        call: The forward, without workspace or threads.
    """
    comptime accum = Blocking[dtype].accum
    var is_float32 = call.norm_is_float32 != 0
    var plan = ForwardPlan[dtype](call.M, call.K, call.N, parallelism_level())
    var workspace = List[UInt8](unsafe_uninit_length=plan.bytes)
    var job = Forward[dtype](
        plan^,
        buffer[dtype](call.y),
        buffer[accum](call.mean),
        buffer[accum](call.rstd),
        buffer[dtype](call.x),
        Parameter(call.gamma, is_float32),
        Parameter(call.beta, is_float32),
        buffer[dtype](call.weight),
        buffer[dtype](call.bias),
        call.eps,
        Int(workspace.unsafe_ptr()),
    )
    job.run(gomp_parallel=0)
    _ = workspace^


def backward[dtype: DType](call: Call):
    """Computes dx, dgamma, dbeta, dweight and dbias.

    Parameters:
        dtype: The type of x.

    Args:
        call: The backward, without workspace or threads.
    """
    comptime accum = Blocking[dtype].accum
    var is_float32 = call.norm_is_float32 != 0
    var gradients = Gradients[dtype](
        call.M,
        call.K,
        call.N,
        call.dx,
        Parameter(call.dgamma, is_float32),
        Parameter(call.dbeta, is_float32),
        call.dweight,
        call.dbias,
        buffer[dtype](call.dy),
        buffer[dtype](call.x),
        buffer[accum](call.mean),
        buffer[accum](call.rstd),
        Parameter(call.gamma, is_float32),
        Parameter(call.beta, is_float32),
        buffer[dtype](call.weight),
    )
    var threads = parallelism_level()
    var workspace = List[UInt8](
        unsafe_uninit_length=backward_bytes[dtype](
            call.M, call.K, call.N, gradients.wanted(), threads
        )
    )
    compute_gradients(
        gradients, threads, Int(workspace.unsafe_ptr()), gomp_parallel=0
    )
    _ = workspace^
