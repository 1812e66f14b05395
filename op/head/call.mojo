"""The record of a chunk of rows of the head: everything its kernels need, from PyTorch's tensors to the launch.

Python writes it (fused_norm/call/head_record.py), kernels read it; a test compares the two field by field.
Every field takes eight bytes. Tensors are dense and given by address, 0 for one that is not there or not wanted. A
chunk has M rows of K features; the vocabulary has V rows.
"""


# Not passable in registers: the compiler damages structs of many fields that functions pass to each other.
struct HeadCall(ImplicitlyCopyable, Movable):
    """A chunk of rows, their logits' exponentials, and what becomes of them."""

    var context: Int
    """A `Launcher`."""
    var M: Int
    """Rows of the chunk."""
    var K: Int
    """Features, a multiple of 8."""
    var V: Int
    """Size of the vocabulary."""
    var pitch: Int
    """Elements from one row of the exponentials to the next, a multiple of 8."""
    var columns: Int
    """Columns of a tile of the product, a number of `TILES` in product.mojo."""
    var tiles: Int
    """How many tiles a row has."""
    var x: Int
    """The rows [M, K], bfloat16."""
    var weight: Int
    """Weight of the vocabulary [V, K], bfloat16."""
    var bias: Int
    """Its bias [V], bfloat16."""
    var target: Int
    """Labels of the rows [M], int64."""
    var are_in_range: Int
    """Whether all labels are classes or ignored [1], int32, set to 0 if not; 0 where nobody asks."""
    var samples: Int
    """Logits of some classes, without their bias [M, sample_count], bfloat16."""
    var sample_count: Int
    """How many."""
    var sample_step: Int
    """Classes from one of them to the next."""
    var offsets: Int
    """What is taken off the logits of each row before their exponentials [M], float32."""
    var exponentials: Int
    """The exponentials [M, V], bfloat16, with a softcap times its slope; 0 where only sums are wanted."""
    var partials: Int
    """Sums of the exponentials of each tile [M, tiles], float32."""
    var maxima: Int
    """Largest logits of each tile of a row that is computed again [M, tiles], float32."""
    var sums: Int
    """Sums of the exponentials of each row [M], float32."""
    var is_any_bad: Int
    """Whether a sum of the chunk left the safe range [1], int32."""
    var scales: Int
    """Gradients of the rows' losses [M], float32; 0 where no gradient is wanted."""
    var logsumexp_scales: Int
    """Gradients of the logarithms of sums [M], float32."""
    var class_weight: Int
    """Weights of the classes [V], float32."""
    var class_weight_sum: Int
    """Their sum [1], float32."""
    var mean_weight: Int
    """Sum over the classes of their weight times their row of the vocabulary's weight [K], float32."""
    var mean_bias: Int
    """The same of the bias [1], float32."""
    var losses: Int
    """Losses of the rows [M], float32, 0 for those that are ignored."""
    var logsumexp: Int
    """Logarithm of the sum of the exponentials of each row's logits [M], float32."""
    var factors: Int
    """Factor of each row of the exponentials in the gradient of the logits [M], float32."""
    var scaled: Int
    """The rows, multiplied by their factors [M, K], bfloat16."""
    var dx: Int
    """The gradient of the rows [M, K], bfloat16."""
    var dx_columns: Int
    """Columns of a tile of it, a number of `TILES` in input_gradient.mojo."""
    var dx_is_split: Int
    """Whether two blocks share the sums of a tile of it."""
    var ignore_index: Int
    """Label of rows that have no loss."""
    var label_smoothing: Float64
    """Share of the label that all classes have alike."""
    var z_loss: Float64
    """Factor of the squared logarithm of the sum in the loss."""
    var softcap: Float64
    """What tanh limits logits to, 0 for nothing; not with label smoothing."""
    var tensor: Int
    """What is multiplied by a number on the device [count], in place."""
    var count: Int
    """Its elements."""
    var is_float32: Int
    """Whether it is float32, otherwise bfloat16."""
    var scale: Int
    """The number [1], float32. Nothing is read or written where it is 1."""


comptime HeadPointer = Pointer[HeadCall, MutUntrackedOrigin]
"""A record by its address."""
