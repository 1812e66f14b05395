"""Which output tile a cluster works on next."""


@fieldwise_init
struct Tiles(TrivialRegisterPassable):
    """The grid of output tiles and the order in which it is walked.

    Tiles are taken down a band of `band` tile rows before the next tile
    column, so that the tiles being computed at one time share their rows of x
    and of the weight in the L2 cache.
    """

    var rows: UInt32
    """Tile rows."""
    var columns: UInt32
    """Tile columns."""
    var band: UInt32
    """Tile rows in one band."""
    var first: UInt32
    """Place in the walk of the first tile of this cluster."""
    var step: UInt32
    """Clusters, and so places from one tile of a cluster to its next."""

    @always_inline
    def count(self) -> UInt32:
        """Counts the tiles.

        Returns:
            How many there are.
        """
        return self.rows * self.columns

    @always_inline
    def at(self, index: UInt32) -> Tuple[UInt32, UInt32]:
        """Finds a tile.

        Args:
            index: Its place in the walk.

        Returns:
            Its row and column among the tiles.
        """
        var per_band = self.band * self.columns
        var first = index // per_band * self.band
        var rest = index % per_band
        var height = min(self.band, self.rows - first)
        return first + rest % height, rest // height
