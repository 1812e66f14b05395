"""The layout of a call's workspace: its parts, one after another."""

from std.math import align_up

comptime PART = 256
"""Every part starts at a multiple of this many bytes."""


def part(mut end: Int, bytes: Int) -> Int:
    """Adds a part to a workspace.

    Args:
        end: Where the workspace ends, to be moved on.
        bytes: Size of the part.

    Returns:
        Where the part starts.
    """
    var start = end
    end += align_up(bytes, PART)
    return start
