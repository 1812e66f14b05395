"""Grids that start while the one before them ends (PDL), where the GPU can do that: NVIDIA's from Hopper on.

A grid launched so starts as soon as every block of the grid before it has let it or has ended. So it has to wait
before it reads what earlier grids write, and before it writes what they may still read. All of ours do so first of
all, unless they say what they do before: whoever lets a later grid start has waited itself. That grid then knows
that everything is complete but what the one before it does.
"""

from max.gpu.host.launch_attribute import LaunchAttribute
from max.gpu.primitives.grid_controls import (
    PDLLevel,
    launch_dependent_grids,
    pdl_launch_attributes,
    wait_on_dependent_grids,
)


def beside_earlier() -> List[LaunchAttribute]:
    """Launches a grid so that it may start while the one before it ends.

    Returns:
        The attributes of the launch; none on other GPUs.
    """
    return pdl_launch_attributes(PDLLevel.OVERLAP_AT_END)


@always_inline
def wait_on_earlier_grids():
    """Waits until the grids this one was launched after are complete, and what they wrote can be seen."""
    wait_on_dependent_grids()


@always_inline
def let_later_grids_start():
    """Allows the grid launched after this one to start before this one ends."""
    launch_dependent_grids()
