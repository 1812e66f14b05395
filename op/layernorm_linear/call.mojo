"""The arguments of a forward or a backward in one struct, for a caller that is not Python."""


struct Call(TrivialRegisterPassable):
    """Tensors by address, all of them dense; 0 for one that is not wanted or not there.

    `Call` in fused_norm/extension/kernels.h has the same fields in the same order.
    """

    var dx: Int
    """Gradient of x [M, K]."""
    var dln_weight: Int
    """Gradient of gamma [K]."""
    var dln_bias: Int
    """Gradient of beta [K]."""
    var dweight: Int
    """Gradient of the weight [N, K]."""
    var dbias: Int
    """Gradient of the Linear layer's bias [N]."""
    var dy: Int
    """Gradient of y [M, N]."""
    var y: Int
    """Result [M, N]."""
    var x: Int
    """Input [M, K]."""
    var ln_weight: Int
    """Gamma [K]."""
    var ln_bias: Int
    """Beta [K]."""
    var weight: Int
    """Weight [N, K]."""
    var bias: Int
    """Bias of the Linear layer [N]."""
    var mean: Int
    """Mean of each row [M]."""
    var rstd: Int
    """Reciprocal standard deviation of each row [M]."""
    var workspace: Int
    """Scratch memory of the size that was asked for."""
    var M: Int
    """Rows."""
    var K: Int
    """Features."""
    var N: Int
    """Outputs."""
    var ln_is_float32: Int
    """Whether gamma and beta are float32 beside a narrower x."""
    var threads: Int
    """How many threads a CPU may use."""
    var context: Int
    """What runs it: a launcher on a GPU, `GOMP_parallel` on a CPU."""
    var eps: Float64
    """Added to the variance."""

    def __init__(out self):
        """Leaves everything 0."""
        self.dx = 0
        self.dln_weight = 0
        self.dln_bias = 0
        self.dweight = 0
        self.dbias = 0
        self.dy = 0
        self.y = 0
        self.x = 0
        self.ln_weight = 0
        self.ln_bias = 0
        self.weight = 0
        self.bias = 0
        self.mean = 0
        self.rstd = 0
        self.workspace = 0
        self.M = 0
        self.K = 0
        self.N = 0
        self.ln_is_float32 = 0
        self.threads = 0
        self.context = 0
        self.eps = 0
