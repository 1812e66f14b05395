"""The record of the heads of a tensor: what Python writes (fused_norm/call/rotary_record.py) and kernels read.

A test compares the two field by field. Every field takes eight bytes. Tensors are dense and given by address,
0 for one that is not there. There are M rows of `heads` vectors of D elements.
"""

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
    """Its result [M, second_heads, D]."""

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


comptime RotaryPointer = Pointer[RotaryCall, MutUntrackedOrigin]
"""A record by its address."""
