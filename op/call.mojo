"""The record of a call: everything a pass of norm + Linear needs, from PyTorch's tensors to the launch.

C++ writes it (fused_norm/chain/call.h), tests and scripts write it in Python (fused_norm/call/record.py), kernels read
it. A test compares the three field by field. Every field takes eight bytes. Tensors are dense and given by address, 0
for one that is not there or not wanted. M rows have K features and N outputs.
"""


comptime SCALE_BLOCK = 128
"""Elements along each side of a block that has a scale of its own."""
comptime VECTORS = 1
"""What `block_scales` says where blocks are of 128 elements of a row."""
comptime SQUARES = 2
"""Where they are of 128 by 128."""


@fieldwise_init
struct Part(TrivialRegisterPassable):
    """One Linear layer of a grouped call, whose layers read the same rows."""

    var N: Int
    """Its outputs."""
    var weight: Int
    """Its weight [N, K]."""
    var bias: Int
    """Its bias [N]."""
    var y: Int
    """Its output [M, N]."""
    var dy: Int
    """Gradient of that [M, N]."""
    var scale: Int
    """Scales of the rows of a weight in 8 bits [N], float32."""


# Not passable in registers: the compiler damages structs of many fields that functions pass to each other.
struct Call(ImplicitlyCopyable, Movable):
    """A forward or a backward: its own half first, then that of its parameters."""

    # The call's half: sizes and conditions.
    var M: Int
    """Rows."""
    var eps: Float64
    """Added to the variance before the square root."""
    var context: Int
    """What runs it: a `Launcher` on a GPU, `GOMP_parallel` (or 0) on a CPU."""
    var threads: Int
    """How many threads a CPU may use."""
    var in_graph: Int
    """Whether a CUDA graph captures the call, so that launches cost the host nothing."""
    var may_keep: Int
    """Whether a fold of the weight may be kept for later calls."""
    var accumulate: Int
    """Whether dweight, and dbias with it, are float32 and are added to."""
    var invariant: Int
    """Whether the bits of a row may not depend on the other rows, nor on how many there are."""
    # Its tensors.
    var x: Int
    """Input [M, K]."""
    var y: Int
    """Output [M, N]."""
    var mean: Int
    """Mean of each row [M], in the type of sums."""
    var rstd: Int
    """Reciprocal standard deviation of each row [M], in the type of sums."""
    var z: Int
    """Normalized rows [M, K], in the type of the weight; in a backward they may take the place of dz."""
    var dy: Int
    """Gradient of y [M, N]."""
    var dz: Int
    """Gradient of z [M, K]."""
    var dx: Int
    """Gradient of x [M, K]."""
    var dgamma: Int
    """Gradient of gamma [K]."""
    var dbeta: Int
    """Gradient of beta [K]."""
    var dweight: Int
    """Gradient of the weight [N, K]."""
    var dbias: Int
    """Gradient of the bias [N], of [2N] before a gate."""
    # What comes before the norm, with it and after the product.
    var normalization: Int
    """The norm: 0 LayerNorm, 1 RMSNorm, and 2 none, for a CPU's product alone."""
    var weight_offset: Float64
    """Added to gamma, where there is a gamma."""
    var has_statistics: Int
    """Whether a forward is given mean and rstd instead of computing them."""
    var residual: Int
    """Added to x before the norm [M, K]."""
    var sum: Int
    """Their sum, rounded to their type [M, K]; a backward gets it as its x."""
    var dsum: Int
    """Gradient of the sum from what else reads it [M, K]; added to dx."""
    var groups: Int
    """How many groups of M / groups rows have their own scale and shift, or gate; 0 if there is none."""
    var scale: Int
    """Modulation z (1 + scale) + shift [groups, K], in the type of x."""
    var shift: Int
    """The other half of it [groups, K]."""
    var gate: Int
    """What multiplies a product before the residual is added [groups, N]."""
    var group_pitch: Int
    """Elements from the scale, the shift or the gate of one group to the next; 0 for K."""
    var dscale: Int
    """Gradient of the scale [groups, K]."""
    var dshift: Int
    """Gradient of the shift [groups, K]."""
    var activation: Int
    """What becomes of the product: a number of op/gemm/activation.mojo; 0 for nothing."""
    var h: Int
    """The product before its activation [M, N]; before a gate [M, 2N], the gate first."""
    var a: Int
    """The product after its activation [M, N]."""
    var da: Int
    """Gradient of a [M, N]."""
    var dh: Int
    """Gradient of h, shaped as h."""
    var parts: Int
    """Address of a `Part` for each Linear layer of a grouped call; their outputs add up to N."""
    var part_count: Int
    """How many there are; 0 where `weight` is the only one."""
    var pitch: Int
    """Elements from one row of each part's output, or of its gradient, to the next; 0 for N of the part."""
    var eight_bits: Int
    """Type of z in 8 bits: E4M3 or E5M2 of op/rows/types.mojo; 0 where it has the type of the weight."""
    var power_of_two: Int
    """Whether the scales of what has 8 bits are rounded up to powers of two."""
    var one_scale: Int
    """Whether all elements of a matrix that is quantized have one, which is written for each row and column."""
    var block_scales: Int
    """Which blocks of z have scales of their own, `VECTORS` or `SQUARES`; 0 for none. In a product those of the weight
    are squares."""
    var z_scale: Int
    """Scales of the rows of z in 8 bits [M], float32."""
    var y_scale: Int
    """Scales of y in e4m3, float32: [M, ceil(N / 128)] for each 128 elements of a row, or [M] where z has scales of
    rows. 0 where y has 16 bits."""
    var y_one_scale: Float64
    """What all of the latter are: a power of two, by which no element of y can exceed the type."""
    var zt: Int
    """Z in 8 bits once more, its columns scaled and stored as rows [K, M]."""
    var zt_scale: Int
    """Scales of those [K], float32."""
    var workspace: Int
    """Scratch memory of `workspace_bytes`, from a multiple of 256 bytes on."""
    # What the plan decides.
    var strategy: Int
    """How it runs: one of the strategies in op/norm_linear/plan.mojo. 0 leaves that to the plan."""
    var workspace_bytes: Int
    """Size of the scratch memory."""
    # The parameters' half.
    var K: Int
    """Features."""
    var N: Int
    """Outputs."""
    var gamma: Int
    """Weight of the norm [K]."""
    var beta: Int
    """Bias of the norm [K]."""
    var weight: Int
    """Weight of the Linear layer [N, K]."""
    var bias: Int
    """Bias of the Linear layer [N]."""
    var up: Int
    """The matrix that a weight gates [N, K]: its second half, or a separate tensor. Hopper's fold reads it."""
    var up_bias: Int
    """Bias of that [N]."""
    var norm_is_float32: Int
    """Whether gamma and beta, and their gradients, are float32 where x is narrower."""
    var narrow: Int
    """Type of the weight where autocast made it narrower than x: 0 that of x, 1 bfloat16, 2 float16."""
    var weight_scale: Int
    """Scales of the rows of a weight in 8 bits [N], float32."""
    var up_scale: Int
    """Those of `up` [N]."""
    var fold_weight: Int
    """Weight with gamma folded in and rows centered, rounded [N, K]."""
    var fold_sums: Int
    """Row sums of that [N], float32."""
    var fold_constants: Int
    """Bias + weight beta [N], float32."""

    def __init__(out self):
        """Leaves everything 0."""
        self.M = 0
        self.eps = 0
        self.context = 0
        self.threads = 0
        self.in_graph = 0
        self.may_keep = 0
        self.accumulate = 0
        self.invariant = 0
        self.x = 0
        self.y = 0
        self.mean = 0
        self.rstd = 0
        self.z = 0
        self.dy = 0
        self.dz = 0
        self.dx = 0
        self.dgamma = 0
        self.dbeta = 0
        self.dweight = 0
        self.dbias = 0
        self.normalization = 0
        self.weight_offset = 0
        self.has_statistics = 0
        self.residual = 0
        self.sum = 0
        self.dsum = 0
        self.groups = 0
        self.scale = 0
        self.shift = 0
        self.gate = 0
        self.group_pitch = 0
        self.dscale = 0
        self.dshift = 0
        self.activation = 0
        self.h = 0
        self.a = 0
        self.da = 0
        self.dh = 0
        self.parts = 0
        self.part_count = 0
        self.pitch = 0
        self.eight_bits = 0
        self.power_of_two = 0
        self.one_scale = 0
        self.block_scales = 0
        self.z_scale = 0
        self.y_scale = 0
        self.y_one_scale = 0
        self.zt = 0
        self.zt_scale = 0
        self.workspace = 0
        self.strategy = 0
        self.workspace_bytes = 0
        self.K = 0
        self.N = 0
        self.gamma = 0
        self.beta = 0
        self.weight = 0
        self.bias = 0
        self.up = 0
        self.up_bias = 0
        self.norm_is_float32 = 0
        self.narrow = 0
        self.weight_scale = 0
        self.up_scale = 0
        self.fold_weight = 0
        self.fold_sums = 0
        self.fold_constants = 0

    def modulation_pitch(self) -> Int:
        """Finds how far the modulations of two groups are from each other.

        Returns:
            The elements from the scale or the shift of one group to the next.
        """
        return self.group_pitch if self.group_pitch != 0 else self.K


comptime CallPointer = Pointer[Call, MutUntrackedOrigin]
"""A record by its address, as entry points get it."""
