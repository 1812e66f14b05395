"""The record of the heads of a tensor: what Python writes (fused_norm/call/rotary_record.py) and kernels read.

A test compares the two field by field. Every field takes eight bytes. Tensors are dense and given by address,
0 for one that is not there. There are M rows of `heads` vectors of D elements.
"""

from std.os import abort

from ..argument import KernelArgument


# Not passable in registers: the compiler damages structs of many fields that functions pass to each other.
struct RotaryCall(ImplicitlyCopyable, KernelArgument, Movable):
    """Heads to normalize and rotate, forward or, where dy is given, backward."""

    var context: Int
    """On a CPU the address of `GOMP_parallel`, on a GPU a `Launcher`."""
    var threads: Int
    """Threads of a CPU."""
    var M: Int
    """Rows."""
    var heads: Int
    """Heads of a row."""
    var D: Int
    """Elements of a head."""
    var pitch: Int
    """Elements from one row of x to the next; rows of y, dy and dx are contiguous."""
    var rotary: Int
    """How many of them are rotated, the first; 0 for none."""
    var positions: Int
    """Rows of cos and sin: row m is rotated by row m % positions."""
    var angles: Int
    """Columns of cos and sin: `rotary`, or half of it."""
    var is_interleaved: Int
    """Whether an element is rotated with its neighbor instead of with that half of `rotary` away."""
    var is_normalized: Int
    """Whether each head is divided by its root mean square."""
    var eps: Float64
    """Added to the mean square."""
    var weight_offset: Float64
    """Added to gamma."""
    var gamma_is_float32: Int
    """Whether gamma is float32, otherwise of the type of x."""
    var angles_are_float32: Int
    """Whether cos and sin are."""
    var x: Int
    """The heads [M, heads, D], with `pitch`."""
    var gamma: Int
    """Weight of the norm [D]; 0 for ones."""
    var cos: Int
    """Cosines [positions, angles]."""
    var sin: Int
    """Sines [positions, angles]."""
    var y: Int
    """The result [M, heads, D], of the forward."""
    var dy: Int
    """Its gradient [M, heads, D], 0 in the forward."""
    var dx: Int
    """The gradient of x [M, heads, D]."""
    var parts: Int
    """In how many parts the heads are divided, in order."""
    var dgamma: Int
    """What each part adds to the gradient of gamma [parts, D], in the type of sums; 0 where it is not wanted."""
    var second_heads: Int
    """Heads of a row of a second tensor with the same rows and angles, such as keys; 0 for none, and in a backward."""
    var second_pitch: Int
    """Elements from one row of it to the next."""
    var second_x: Int
    """Its heads [M, second_heads, D]."""
    var second_gamma: Int
    """Weight of its norm [D], of the type of gamma; 0 for ones."""
    var second_y: Int
    """Its result [M, second_heads, D]; where there are slots, a cache [sequences, second_heads, slot_count, D]."""
    var slots: Int
    """Where caches have the tokens of a sequence [tokens], int64; 0 where the results are dense."""
    var slot_count: Int
    """Tokens of a sequence that a cache has room for."""
    var tokens: Int
    """Rows of a sequence: row m is token m % tokens of sequence m // tokens."""
    var second_sequence: Int
    """Elements from one sequence of second_y to the next."""
    var second_head: Int
    """Elements from one head of it to the next."""
    var second_slot: Int
    """Elements from one token of it to the next."""
    var third_pitch: Int
    """Elements from one row to the next of a third tensor, such as values, that is stored like the second as it is."""
    var third_x: Int
    """Its heads [M, second_heads, D]; 0 without one."""
    var third_y: Int
    """Its cache, in the layout of the second's or another one."""
    var third_sequence: Int
    """Elements from one sequence of third_y to the next."""
    var third_head: Int
    """Elements from one head of it to the next."""
    var third_slot: Int
    """Elements from one token of it to the next."""
    var y_sequence: Int
    """Elements from one sequence of y to the next, where y is a cache: the kernel sets it, as the next two."""
    var y_head: Int
    """Elements from one head of it to the next."""
    var y_slot: Int
    """Elements from one token of it to the next; 0 where y is dense."""
    var gamma_sum: Int
    """The gradient of gamma [D], of the type of gamma: the sum of dgamma over parts; 0 where it is not wanted, and on a CPU."""

    def units(self) -> Int:
        """Counts the heads of all rows of x.

        Returns:
            Their number.
        """
        return self.M * self.heads

    def second_units(self) -> Int:
        """Counts those of the second tensor.

        Returns:
            Their number.
        """
        return self.M * self.second_heads

    @always_inline
    def turn_to_second(mut self):
        """Makes the second tensor the first."""
        self.heads = self.second_heads
        self.pitch = self.second_pitch
        self.x = self.second_x
        self.gamma = self.second_gamma
        self.y = self.second_y
        self.y_sequence = self.second_sequence
        self.y_head = self.second_head
        self.y_slot = self.second_slot

    @always_inline
    def turn_to_third(mut self):
        """Makes the third tensor the first, neither normalized nor rotated."""
        self.heads = self.second_heads
        self.pitch = self.third_pitch
        self.x = self.third_x
        self.y = self.third_y
        self.y_sequence = self.third_sequence
        self.y_head = self.third_head
        self.y_slot = self.third_slot
        self.gamma = 0
        self.is_normalized = 0
        self.rotary = 0

    @always_inline
    def start_of(self, unit: Int) -> Int:
        """Locates a head of x.

        Args:
            unit: Which of all heads.

        Returns:
            The index of its first element.
        """
        var row = unit // self.heads
        return row * self.pitch + (unit - row * self.heads) * self.D

    @always_inline
    def step_of_y(self) -> Int:
        """Returns the elements from one head of y to the next.

        Returns:
            How many.
        """
        return self.D if self.y_slot == 0 else self.y_head

    @always_inline
    def start_of_y(self, row: Int, head: Int) -> Int:
        """Locates a head of y. A slot that a cache does not have ends the program, as in PyTorch.

        Args:
            row: The row.
            head: Which head of it.

        Returns:
            The index of its first element.
        """
        if self.y_slot == 0:
            return (row * self.heads + head) * self.D
        var sequence = row // self.tokens
        var slot = Int(
            Pointer[Int64, MutAnyOrigin](unsafe_from_address=self.slots)
            .unsafe_offset(row - sequence * self.tokens)
            .unsafe_load()
        )
        if slot < 0 or slot >= self.slot_count:
            abort()
        return (
            sequence * self.y_sequence + head * self.y_head + slot * self.y_slot
        )


comptime RotaryPointer = Pointer[RotaryCall, MutUntrackedOrigin]
"""A record by its address."""
