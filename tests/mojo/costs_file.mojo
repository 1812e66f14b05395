"""Reads a cost model of forwards from a file that tests have written with `Hopper.as_array`."""

from op.norm_linear.sm90.costs import Costs

comptime PROCESSORS = 132


struct CostsFile(Movable):
    """What a file holds, which outlives what reads it."""

    var bytes: List[UInt8]

    def __init__(out self, path: String) raises:
        with open(path, "r") as file:
            self.bytes = file.read_bytes()

    def costs(self) -> Costs:
        """Returns the costs; an empty file has none."""
        return Costs(
            PROCESSORS, Int(self.bytes.unsafe_ptr()) if len(self.bytes) else 0
        )
