"""Programmatic dependent launch (PDL), where the GPU has it: NVIDIA's from Hopper on.

A grid launched with `pdl_attributes` starts once every block of the grid before it has called `pdl_trigger` or has
ended. So it calls `pdl_wait` before it reads what earlier grids write, and before it writes what they may still read.
Our kernels wait first, unless their code says what they do before; and each triggers only after it has waited. So a
grid that starts early knows that all grids are complete except the one just before it.
"""

from max.gpu.host.launch_attribute import LaunchAttribute
from max.gpu.primitives.grid_controls import (
    PDLLevel,
    launch_dependent_grids,
    pdl_launch_attributes,
    wait_on_dependent_grids,
)
from std.sys import inlined_assembly, is_nvidia_gpu

comptime LINE = 128
"""Bytes of a line that is fetched."""


def pdl_attributes() -> List[LaunchAttribute]:
    """Returns the attributes of a launch that may start while the grid before it ends.

    Returns:
        The attributes; none on other GPUs.
    """
    return pdl_launch_attributes(PDLLevel.OVERLAP_AT_END)


@always_inline
def pdl_wait():
    """Waits until all earlier grids of the stream are complete, and what they wrote is visible."""
    wait_on_dependent_grids()


@always_inline
def pdl_trigger():
    """Allows the next grid of the stream to start before this one ends."""
    launch_dependent_grids()


@always_inline
def prefetch(address: Int):
    """Asks for a line of memory in the L2 cache, which any kernel may do before it waits: nothing is read.

    A vector that was last read a layer ago comes from DRAM otherwise, after all that the next kernel asks for ahead.

    Args:
        address: An address in the line, of 128 bytes.
    """
    comptime if is_nvidia_gpu():
        inlined_assembly[
            "prefetch.global.L2::evict_last [$0];",
            NoneType,
            constraints="l",
        ](Int64(address))
