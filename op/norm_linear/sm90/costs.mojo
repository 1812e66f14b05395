"""The cost model of forwards on Hopper: the time that each strategy takes.

fused_norm/devices/hopper.py has the model, fits it to measurements, and writes the coefficients that are read here.
"""

from std.math import ceildiv
from std.python._cpython import Py_ssize_t, PyObjectPtr

from ...device import Launcher
from ...gemm.sm90.tiling import MOST_FEW_ROWS, fewest_cycles
from ...gemm.sm90.wgmma import K_BLOCK
from ...python import Arguments, Values, integer
from ..plan import DECLINED, FUSED, KEPT_FOLD, NEW_FOLD

comptime _STRATEGIES = [KEPT_FOLD, NEW_FOLD, FUSED, DECLINED]
comptime _COUNT = len(_STRATEGIES)
# The last of them, whose product is PyTorch's.
comptime _LIBRARY = 3
comptime _TERMS = 6
# Sets of costs: of few rows, for which both libraries have special kernels, and of many.
comptime _ROWS = 2
comptime _EXCEPTION = 8
# Sizes are alike whose ratios are at most this, each.
comptime _ALIKE = 1.5

# Places of an exception after its sizes: the fastest strategy launched or in a graph, where a fold may be kept or not,
# and behind a pass.
comptime _LAUNCHED_KEPT = 3
comptime _GRAPH = 2
comptime _PASSED = 7

# cuBLAS's tiles, as seen in profiles: rows, columns, and cycles of their products of 1000 that tensor cores need.
comptime _LIBRARY_TILES = [
    (64, 64, 1400),
    (64, 128, 1250),
    (128, 64, 1300),
    (128, 128, 1060),
    (128, 192, 1010),
    (192, 192, 1000),
    (128, 256, 1000),
    (256, 128, 1000),
]
# Cycles in which it stores 128 rows of 128 columns, and those around a tile.
comptime _LIBRARY_STORE = 1200
comptime _LIBRARY_START = 2000


@fieldwise_init
struct Costs(TrivialRegisterPassable):
    """Costs of one dtype on one kind of device: `Hopper.as_array` in devices/hopper.py."""

    var processors: Int
    """SMs of the device."""
    var address: Int
    """Address of the costs; 0 where nothing was measured."""

    def __init__(out self, launcher: Launcher):
        """Finds those of a device.

        Args:
            launcher: Where to run.
        """
        self.processors = launcher.gpu.processors
        self.address = launcher.costs

    def _at(self, place: Int) -> Float64:
        return Pointer[Float64, MutUntrackedOrigin](
            unsafe_from_address=self.address + 8 * place
        )[]

    def fastest(
        self, m: Int, k: Int, n: Int, in_graph: Bool, may_keep: Bool
    ) -> Int:
        """Finds the fastest strategy of a forward.

        Args:
            m: Rows.
            k: Features.
            n: Outputs.
            in_graph: Whether launches cost the host nothing.
            may_keep: Whether a fold may be kept.

        Returns:
            The strategy: DECLINED for our norm around PyTorch's product.
        """
        if self.address == 0:
            return KEPT_FOLD if may_keep else FUSED
        var measured = self._exception(m, k, n)
        if measured != 0:
            return Int(
                self._at(
                    measured
                    + _LAUNCHED_KEPT
                    + _GRAPH * Int(in_graph)
                    + Int(not may_keep)
                )
            )
        var best = FUSED
        var least = Float64.MAX
        comptime for i in range(_COUNT):
            comptime strategy = _STRATEGIES[i]
            if strategy != KEPT_FOLD or may_keep:
                var us = self._us(i, m, k, n)
                if not in_graph:
                    us = max(us, self._at(1 + i))
                if us < least:
                    least = us
                    best = strategy
        return best

    def is_faster(self, m: Int, k: Int, n: Int) -> Bool:
        """Tells whether our product is faster than PyTorch's behind the same pass.

        Args:
            m: Rows.
            k: Length of the sums.
            n: Columns of the product.

        Returns:
            Whether it is.
        """
        if self.address == 0:
            return True
        var measured = self._exception(m, k, n)
        if measured != 0:
            return Int(self._at(measured + _PASSED)) == FUSED
        return self._us(2, m, k, n) <= self._us(_LIBRARY, m, k, n)

    def _us(self, strategy: Int, m: Int, k: Int, n: Int) -> Float64:
        """Estimates the time of a forward in a graph, by the place of its strategy in _STRATEGIES."""
        var rows = Float64(m)
        var features = Float64(k)
        var outputs = Float64(n)
        var is_few = m <= MOST_FEW_ROWS
        var place = 1 + _COUNT + (Int(not is_few) * _COUNT + strategy) * _TERMS
        var us = self._at(place)
        us += self._at(place + 1) * rows * features
        us += self._at(place + 2) * features * outputs
        us += self._at(place + 3) * rows * outputs
        if is_few:
            us += self._at(place + 4) * features
            return us + self._at(place + 5) * outputs
        if strategy == _LIBRARY:
            var tiles = library_cycles(m, n, k, self.processors)
            us += self._at(place + 4) * Float64(tiles)
            return us + self._at(place + 5) * features
        var tiles = fewest_cycles(m, n, k, self.processors)
        us += self._at(place + 4) * Float64(tiles)
        if k % K_BLOCK != 0:
            us += self._at(place + 5) * rows * features * outputs
        return us

    def _exception(self, m: Int, k: Int, n: Int) -> Int:
        """Finds the nearest exception among those alike, 0 without one."""
        var place = 1 + _COUNT + _ROWS * _COUNT * _TERMS
        var nearest = _ALIKE * _ALIKE * _ALIKE
        var found = 0
        for _ in range(Int(self._at(0))):
            var distance = Float64(1)
            distance *= _distance(m, self._at(place))
            distance *= _distance(k, self._at(place + 1))
            distance *= _distance(n, self._at(place + 2))
            if distance < nearest:
                nearest = distance
                found = place
            place += _EXCEPTION
        return found


def _distance(size: Int, other: Float64) -> Float64:
    """Returns the ratio of two sizes, infinite where they are not alike."""
    var a = Float64(size)
    var ratio = max(a, other) / min(a, other)
    return ratio if ratio <= _ALIKE else Float64.MAX


def library_cycles(m: Int, n: Int, k: Int, processors: Int) -> Int:
    """Estimates the cycles that a product of cuBLAS takes.

    Args:
        m: Rows of the product.
        n: Columns of the product.
        k: Length of the sums.
        processors: SMs of the device.

    Returns:
        The cycles of the tiles that take the fewest.
    """
    var least = Int.MAX
    comptime for i in range(len(_LIBRARY_TILES)):
        comptime tile = _LIBRARY_TILES[i]
        comptime area = tile[0] * tile[1] // 128
        var waves = ceildiv(
            ceildiv(m, tile[0]) * ceildiv(n, tile[1]), processors
        )
        var products = ceildiv(k, 16) * area * tile[2] // 1000
        least = min(least, waves * (products + _LIBRARY_STORE * area // 128))
    return least + _LIBRARY_START


def cycles(
    module: PyObjectPtr, values: Values, count: Py_ssize_t
) abi("C") -> PyObjectPtr:
    """Returns the cycles of a product that costs are multiplied by.

    Args:
        module: The extension.
        values: M, K, N, the device's SMs, and 0 for our product or 1 for PyTorch's.
        count: 5.

    Returns:
        An integer.
    """
    var arguments = Arguments(values)
    var m = arguments.integer()
    var k = arguments.integer()
    var n = arguments.integer()
    var processors = arguments.integer()
    if arguments.integer() == 0:
        return integer(fewest_cycles(m, n, k, processors))
    return integer(library_cycles(m, n, k, processors))
