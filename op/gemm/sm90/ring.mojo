"""A position in the ring of shared-memory slots between producer and consumers."""


@doc_hidden
@fieldwise_init
struct RingPlace(TrivialRegisterPassable):
    """Which slot of the ring, and the parity of its current round."""

    var slot: UInt32
    """The slot."""
    var parity: UInt32
    """Parity of completed rounds."""

    @always_inline
    def advance[stages: Int](mut self):
        """Moves to the next slot."""
        self.slot += 1
        if self.slot == UInt32(stages):
            self.slot = 0
            self.parity ^= 1

    @always_inline
    def skip[stages: Int](mut self, slots: UInt32):
        """Moves over slots."""
        var last = self.slot + slots
        self.slot = last % UInt32(stages)
        self.parity ^= (last // UInt32(stages)) & 1
