"""The output tiles that a cluster computes, in order."""


@doc_hidden
@fieldwise_init
struct Tiles(TrivialRegisterPassable):
    """The order in which a cluster computes output tiles.

    Two walks. In bands, all clusters together take tiles down a band of tile
    rows before the next tile column, so that what is being computed at the same
    time shares rows of a and of b in the L2 cache. In runs, each cluster takes
    consecutive tiles of a tile row, and so reads the same rows of a repeatedly.
    """

    var rows: UInt32
    """Tile rows."""
    var columns: UInt32
    """Tile columns."""
    var band: UInt32
    """Tile rows in one band; 0 to walk in runs."""
    var first: UInt32
    """Place of this cluster's first tile."""
    var step: UInt32
    """Places from one tile of the cluster to its next."""
    var end: UInt32
    """Place where the cluster stops."""

    @staticmethod
    @always_inline
    def of_cluster(
        rows: UInt32,
        columns: UInt32,
        band: UInt32,
        cluster: UInt32,
        clusters: UInt32,
    ) -> Self:
        """Plans the order of one cluster."""
        var count = rows * columns
        if band == 0:
            var run = (count + clusters - 1) // clusters
            return Self(
                rows,
                columns,
                band,
                cluster * run,
                1,
                min(count, (cluster + 1) * run),
            )
        return Self(rows, columns, band, cluster, clusters, count)

    @always_inline
    def at(self, index: UInt32) -> Tuple[UInt32, UInt32]:
        """Finds a tile."""
        if self.band == 0:
            return index // self.columns, index % self.columns
        var per_band = self.band * self.columns
        var top = index // per_band * self.band
        var rest = index % per_band
        var height = min(self.band, self.rows - top)
        return top + rest % height, rest // height
