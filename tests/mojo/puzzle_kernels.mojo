"""Runs every GPU kernel of the puzzle and holds it to the CPU version.

    mojo run -I . tests/mojo/puzzle_kernels.mojo

No PyTorch and no MAX graph, so it is also the program for a sanitizer, and what a
machine without a GPU builds with `--target-accelerator` to see that every kernel
still compiles.
"""

from max.gpu.host import DeviceBuffer, DeviceContext
from std.random import randn_float64, seed
from std.sys import has_accelerator
from std.utils.numerics import nan

from op.puzzle.addresses import Input, Output
from op.puzzle.launch_backward import launch_backward
from op.puzzle.launch_forward import launch_forward

comptime dtype = DType.float32
comptime Values = List[Scalar[dtype]]
comptime TOLERANCE = 1e-4


def main() raises:
    comptime if has_accelerator():
        seed(0)
        # The document's size; its hidden dimension ends inside a tile.
        check[batch_size=4, seq_len=4, hidden_dim=8, output_dim=16]()
        # Nothing divides anything.
        check[batch_size=3, seq_len=5, hidden_dim=33, output_dim=19]()
        # Several tiles in each direction.
        check[batch_size=2, seq_len=37, hidden_dim=96, output_dim=48]()
        print("all correct")
    else:
        print("SKIPPED: no GPU")


def check[
    batch_size: Int, seq_len: Int, hidden_dim: Int, output_dim: Int
]() raises:
    """Compares all outputs of both devices at one size."""
    comptime rows = batch_size * seq_len
    print("size", batch_size, seq_len, hidden_dim, output_dim)
    var inputs: List[Values] = [
        random(rows * hidden_dim, mean=2),
        random(hidden_dim, mean=1),
        random(hidden_dim),
        random(output_dim * hidden_dim),
        random(output_dim),
        random(rows * output_dim),
    ]
    var expected = compute[
        "cpu", "fused", batch_size, seq_len, hidden_dim, output_dim
    ](DeviceContext(api="cpu"), inputs)
    comptime for algorithm in [StaticString("fused"), StaticString("unfused")]:
        var actual = compute[
            "gpu", algorithm, batch_size, seq_len, hidden_dim, output_dim
        ](DeviceContext(), inputs)
        var names: List[StaticString] = [
            algorithm,
            "grad_input",
            "grad_ln_weight",
            "grad_ln_bias",
            "grad_linear_weight",
            "grad_linear_bias",
        ]
        for i in range(len(names)):
            compare(names[i], actual[i], expected[i])


def compute[
    target: StaticString,
    algorithm: StaticString,
    batch_size: Int,
    seq_len: Int,
    hidden_dim: Int,
    output_dim: Int,
](ctx: DeviceContext, inputs: List[Values]) raises -> List[Values]:
    """Returns the output and the five gradients, computed on one device."""
    var x = upload(ctx, inputs[0])
    var ln_weight = upload(ctx, inputs[1])
    var ln_bias = upload(ctx, inputs[2])
    var linear_weight = upload(ctx, inputs[3])
    var linear_bias = upload(ctx, inputs[4])
    var grad_output = upload(ctx, inputs[5])

    # NaN stays visible wherever a kernel writes nothing, or adds to what the
    # launch did not clear.
    var y = upload(ctx, nans(batch_size * seq_len * output_dim))
    var grad_input = upload(ctx, nans(batch_size * seq_len * hidden_dim))
    var grad_ln_weight = upload(ctx, nans(hidden_dim))
    var grad_ln_bias = upload(ctx, nans(hidden_dim))
    var grad_weight = upload(ctx, nans(output_dim * hidden_dim))
    var grad_bias = upload(ctx, nans(output_dim))

    launch_forward[
        target, algorithm, batch_size, seq_len, hidden_dim, output_dim
    ](
        written(y),
        read(x),
        read(ln_weight),
        read(ln_bias),
        read(linear_weight),
        read(linear_bias),
        ctx,
    )
    launch_backward[target, batch_size, seq_len, hidden_dim, output_dim](
        written(grad_input),
        written(grad_ln_weight),
        written(grad_ln_bias),
        written(grad_weight),
        written(grad_bias),
        read(grad_output),
        read(x),
        read(ln_weight),
        read(ln_bias),
        read(linear_weight),
        ctx,
    )
    return [
        download(ctx, y),
        download(ctx, grad_input),
        download(ctx, grad_ln_weight),
        download(ctx, grad_ln_bias),
        download(ctx, grad_weight),
        download(ctx, grad_bias),
    ]


def compare(name: StaticString, actual: Values, expected: Values) raises:
    """Raises unless every element is within the tolerance."""
    var largest: Scalar[dtype] = 1
    var error: Scalar[dtype] = 0
    for i in range(len(expected)):
        largest = max(largest, abs(expected[i]))
        var difference = abs(actual[i] - expected[i])
        # Not `difference > TOLERANCE`, which is false for NaN.
        if not difference <= TOLERANCE * largest:
            raise Error(
                name, "[", i, "] is ", actual[i], ", expected ", expected[i]
            )
        error = max(error, difference)
    print(" ", name, error)


def random(count: Int, mean: Float64 = 0) -> Values:
    """Returns normally distributed values."""
    return [randn_float64(mean).cast[dtype]() for _ in range(count)]


def nans(count: Int) -> Values:
    """Returns values that no kernel may leave behind."""
    return [nan[dtype]() for _ in range(count)]


def upload(ctx: DeviceContext, values: Values) raises -> DeviceBuffer[dtype]:
    """Copies values to the device."""
    var buffer = ctx.enqueue_create_buffer[dtype](len(values))
    with buffer.map_to_host() as host:
        for i in range(len(values)):
            host[i] = values[i]
    return buffer


def download(
    ctx: DeviceContext, mut buffer: DeviceBuffer[dtype]
) raises -> Values:
    """Copies values from the device once its work is done."""
    ctx.synchronize()
    with buffer.map_to_host() as host:
        return [host[i] for i in range(len(buffer))]


def written(mut buffer: DeviceBuffer[dtype]) -> Output[dtype]:
    """Returns the address of an output."""
    return buffer.unsafe_ptr().unsafe_origin_cast[MutAnyOrigin]()


def read(mut buffer: DeviceBuffer[dtype]) -> Input[dtype]:
    """Returns the address of an input."""
    return written(buffer).unsafe_mut_cast[False]()
