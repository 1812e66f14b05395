"""The device of a MAX graph: passes over rows, products and memory, from which the ops are composed."""

from max.gpu.host import DeviceBuffer, DeviceContext
from std.runtime import parallelism_level

from . import norm_linear_cpu, norm_linear_gpu
from ..call import Call
from ..norms.no_norm import NoNorm
from ..passes.activate import (
    activate_backward_bytes,
    run_activate,
    run_activate_backward,
)
from ..passes.cpu import CpuRunner
from ..passes.modulation import has_wide_features
from ..passes.normalize import normalize_bytes
from ..passes.normalize_backward import workspace
from ..passes.passes import normalize, normalize_backward_of
from ..passes.runner import Runner
from ..rows.operands import accumulator
from ..team import Team
from .norm_linear_gpu import gpu_runner


@fieldwise_init
struct Device[target: StaticString](Copyable, Movable):
    """Where a graph runs an op. Calls name tensors of this device, and need no workspace.

    Parameters:
        target: Its kind, "cpu" or a GPU's.
    """

    var context: DeviceContext
    """The device."""

    def room[dtype: DType](self, elements: Int) raises -> DeviceBuffer[dtype]:
        """Returns memory that lives until the work that was queued before its end is done.

        Parameters:
            dtype: The type of its elements.

        Args:
            elements: How many; there is memory for one at least.

        Returns:
            The memory.

        Raises:
            If there is none.
        """
        return self.context.enqueue_create_buffer[dtype](max(elements, 1))

    def linear[dtype: DType](self, call: Call) raises:
        """Writes y = x W^T + bias.

        Parameters:
            dtype: The type of x.

        Args:
            call: A forward that names these alone.

        Raises:
            If a launch fails.
        """
        comptime if Self.target == "cpu":
            norm_linear_cpu.forward[dtype, NoNorm](call)
        else:
            norm_linear_gpu.linear[dtype](call, self.context)

    def linear_backward[dtype: DType](self, call: Call) raises:
        """Writes which of dx = dy W and dweight = dy^T x are wanted.

        Parameters:
            dtype: The type of x.

        Args:
            call: A backward that names these alone.

        Raises:
            If a launch fails.
        """
        comptime if Self.target == "cpu":
            norm_linear_cpu.backward[dtype, NoNorm](call)
        else:
            norm_linear_gpu.linear_backward[dtype](call, self.context)

    def normalize[dtype: DType](self, call: Call) raises:
        """Writes which of sum, z, mean and rstd are wanted from x.

        Parameters:
            dtype: The type of x.

        Args:
            call: The forward.

        Raises:
            If a launch fails.
        """
        self._run[dtype, _normalize](call)

    def normalize_backward[dtype: DType](self, call: Call) raises:
        """Writes which of dx, z, dgamma, dbeta, dscale, dshift and dbias are wanted from dz, x and dy.

        Parameters:
            dtype: The type of x.

        Args:
            call: The backward.

        Raises:
            If a launch fails.
        """
        self._run[dtype, _normalize_backward](call)

    def activate[dtype: DType](self, call: Call) raises:
        """Writes a from h.

        Parameters:
            dtype: The type of x.

        Args:
            call: The forward.

        Raises:
            If a launch fails.
        """
        self._run[dtype, _activate](call)

    def activate_backward[dtype: DType](self, call: Call) raises:
        """Writes which of dh, a and dbias are wanted from da and h; without an activation dbias alone.

        Parameters:
            dtype: The type of x.

        Args:
            call: The backward.

        Raises:
            If a launch fails.
        """
        self._run[dtype, _activate_backward](call)

    def _run[dtype: DType, part: _Part](self, call: Call) raises:
        """Runs a part whose calls need no workspace on whatever runs parts here."""
        comptime if Self.target == "cpu":
            var runner = CpuRunner(Team(0, parallelism_level()))
            part[dtype](runner, call, self.context)
        else:
            var runner = gpu_runner[dtype](self.context)
            part[dtype](runner, call, self.context)


comptime _Part = def[dtype: DType, R: Runner](
    mut R, Call, DeviceContext
) raises thin -> None


def _placed(
    call: Call, bytes: Int, ctx: DeviceContext
) raises -> Tuple[Call, DeviceBuffer[DType.uint8]]:
    """Returns a call with a workspace."""
    var scratch = ctx.enqueue_create_buffer[DType.uint8](max(bytes, 1))
    var placed = call
    placed.workspace = Int(scratch.unsafe_ptr())
    return placed, scratch^


def _normalize[
    dtype: DType, R: Runner
](mut runner: R, call: Call, ctx: DeviceContext) raises:
    var placed, scratch = _placed(call, normalize_bytes[dtype](call), ctx)
    normalize[dtype](runner, placed)
    _ = scratch^


def _normalize_backward[
    dtype: DType, R: Runner
](mut runner: R, call: Call, ctx: DeviceContext) raises:
    var placed, scratch = _placed(
        call, workspace[dtype, dtype](runner, call).bytes, ctx
    )
    comptime accum = accumulator[dtype]()
    if dtype != accum and has_wide_features(call):
        normalize_backward_of[dtype, accum, dtype](runner, placed)
    else:
        normalize_backward_of[dtype, dtype, dtype](runner, placed)
    _ = scratch^


def _activate[
    dtype: DType, R: Runner
](mut runner: R, call: Call, ctx: DeviceContext) raises:
    run_activate[dtype](runner, call)


def _activate_backward[
    dtype: DType, R: Runner
](mut runner: R, call: Call, ctx: DeviceContext) raises:
    var placed, scratch = _placed(
        call, activate_backward_bytes[dtype](runner, call), ctx
    )
    run_activate_backward[dtype](runner, placed)
    _ = scratch^
