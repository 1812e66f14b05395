"""What the threads of a pass share."""

from std.atomic import Atomic

from ...call import CallPointer
from ...gemm.cpu.blocking import Blocking
from ...gemm.cpu.memory import Buffer, buffer
from .parameters import in_type_of_sums


struct Job[dtype: DType, Plan: Movable & Deinitable](Movable):
    """A call, its plan, and a counter of tasks.

    Parameters:
        dtype: Element type of the tensors.
        Plan: The pass's plan.
    """

    comptime accum = Blocking[Self.dtype].accum
    """The type of sums."""

    var call: CallPointer
    """The tensors."""
    var plan: Self.Plan
    """How the work is divided."""
    var workspace: Int
    """Address of the workspace, aligned."""
    var gamma: Buffer[Self.accum]
    """Weight of the norm [K] in the type of sums, its offset added."""
    var beta: Buffer[Self.accum]
    """Bias of the norm [K] in the type of sums."""
    var shifts: Int
    """In a backward, address of what the rounded means lack [M]; 0 where that is nothing to speak of."""
    var next_task: Int64
    """Counter from which workers take tasks."""

    def __init__(
        out self,
        call: CallPointer,
        var plan: Self.Plan,
        workspace: Int,
        gamma: Int,
        beta: Int,
    ):
        """Brings the norm's parameters into the type of sums.

        Args:
            call: The tensors.
            plan: How the work is divided.
            workspace: Address of the workspace, aligned.
            gamma: The offset of room for gamma.
            beta: The offset of room for beta.
        """
        var is_float32 = call[].norm_is_float32 != 0
        self.call = call
        self.plan = plan^
        self.workspace = workspace
        self.gamma = in_type_of_sums[Self.dtype](
            workspace + gamma,
            call[].gamma,
            call[].K,
            default=1,
            is_float32=is_float32,
            offset=call[].weight_offset,
        )
        self.beta = in_type_of_sums[Self.dtype](
            workspace + beta,
            call[].beta,
            call[].K,
            default=0,
            is_float32=is_float32,
        )
        self.shifts = 0
        self.next_task = 0

    @always_inline
    def at[type: DType](self, offset: Int) -> Buffer[type]:
        """Finds an array of the workspace.

        Parameters:
            type: Type of its elements.

        Args:
            offset: Where it begins.

        Returns:
            Its first element.
        """
        return buffer[type](self.workspace + offset)

    @always_inline
    def take(mut self) -> Int:
        """Takes the next task.

        Returns:
            Its index; there may be fewer tasks.
        """
        return Int(Atomic.fetch_add(Pointer(to=self.next_task), 1))
