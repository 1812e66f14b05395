"""The cost model of forwards on Hopper: the time that each strategy takes.

fused_norm/devices/hopper.py fits the costs of the `terms` to measurements, and writes what is read here.
"""

from std.math import hypot
from std.utils import StaticTuple

from ...device import Launcher
from ...gemm.sm90.few_tiles import split_of
from ..plan import DECLINED, FUSED, KEPT_FOLD, NEW_FOLD
from .terms import (
    BEHIND_PASS,
    LIBRARY,
    OF_FOLD,
    ROW_SETS,
    TERMS,
    TILES,
    row_set,
    terms,
    terms_of_fold,
)

comptime _STRATEGIES = [KEPT_FOLD, NEW_FOLD, FUSED, DECLINED]
comptime _COUNT = len(_STRATEGIES)
# The last two of them differ in the product: ours or PyTorch's.
comptime _OURS = 2
comptime _LIBRARY = 3
comptime _EXCEPTION = 8
# Places: the number of exceptions, our product behind a pass, the host's costs, and the device's.
comptime _PRODUCT = 1
comptime _HOST = 2
comptime _DEVICE = _HOST + _COUNT
# Sizes are alike whose ratios are at most this, each.
comptime _ALIKE = 1.05

# Places of an exception after its sizes: the fastest strategy launched or in a graph, where a fold may be kept or not,
# and behind a pass.
comptime _LAUNCHED_KEPT = 3
comptime _GRAPH = 2
comptime _PASSED = 7


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
        var ours = self._terms_of_ours(m, k, n)
        var folded = terms_of_fold(ours, m, k, n)
        # Nobody shares the sums of a fold's tiles.
        if self._splits(m, k, n):
            folded = terms(m, k, n, self.processors, OF_FOLD)
        var theirs = terms(m, k, n, self.processors, LIBRARY)
        comptime for i in range(_COUNT):
            comptime strategy = _STRATEGIES[i]
            if strategy != KEPT_FOLD or may_keep:
                var found = folded
                comptime if i == _OURS:
                    found = ours
                elif i == _LIBRARY:
                    found = theirs
                var us = self._us(i, row_set(m, k), found)
                if not in_graph:
                    us = hypot(us, self._at(_HOST + i))
                if us < least:
                    least = us
                    best = strategy
        return best

    def is_faster(self, m: Int, k: Int, n: Int, saved: Float64 = 0) -> Bool:
        """Tells whether our product is faster than PyTorch's behind the same pass.

        Args:
            m: Rows.
            k: Length of the sums.
            n: Columns of the product.
            saved: Microseconds of other kernels that only ours saves; they do not count at exceptions.

        Returns:
            Whether it is.
        """
        if self.address == 0:
            return True
        var measured = self._exception(m, k, n)
        if measured != 0:
            return Int(self._at(measured + _PASSED)) == FUSED
        var rows = row_set(m, k)
        var ours = self._terms_of_ours(m, k, n)
        var theirs = terms(m, k, n, self.processors, LIBRARY)
        return (
            self._us(_OURS, rows, ours)
            <= self._us(_LIBRARY, rows, theirs) + saved
        )

    def _splits(self, m: Int, k: Int, n: Int) -> Bool:
        """Tells whether blocks share the sums of our product's tiles."""
        return (
            Int(self._at(_PRODUCT)) == BEHIND_PASS
            and row_set(m, k) == TILES
            and split_of(m, n, k, self.processors).blocks > 1
        )

    def _terms_of_ours(self, m: Int, k: Int, n: Int) -> StaticTuple[Int, TERMS]:
        return terms(m, k, n, self.processors, Int(self._at(_PRODUCT)))

    def _us(
        self, strategy: Int, rows: Int, found: StaticTuple[Int, TERMS]
    ) -> Float64:
        """Estimates the time of a forward in a graph, by its set of costs and the place of its strategy in _STRATEGIES."""
        var place = _DEVICE + (rows * _COUNT + strategy) * TERMS
        var us = Float64(0)
        for i in range(TERMS):
            us += self._at(place + i) * Float64(found[i])
        return us

    def _exception(self, m: Int, k: Int, n: Int) -> Int:
        """Finds the nearest exception among those alike, 0 without one."""
        var place = _DEVICE + ROW_SETS * _COUNT * TERMS
        var nearest = _ALIKE * _ALIKE * _ALIKE
        var found = 0
        for _ in range(Int(self._at(0))):
            var others = (
                self._at(place),
                self._at(place + 1),
                self._at(place + 2),
            )
            # Few are alike in the first size: divisions would take as long as the rest of the choice.
            if (
                _are_alike(m, others[0])
                and _are_alike(k, others[1])
                and _are_alike(n, others[2])
            ):
                var distance = (
                    _ratio(m, others[0])
                    * _ratio(k, others[1])
                    * _ratio(n, others[2])
                )
                if distance < nearest:
                    nearest = distance
                    found = place
            place += _EXCEPTION
        return found


def _are_alike(size: Int, other: Float64) -> Bool:
    var a = Float64(size)
    return max(a, other) <= _ALIKE * min(a, other)


def _ratio(size: Int, other: Float64) -> Float64:
    var a = Float64(size)
    return max(a, other) / min(a, other)
