"""Computes the parameters' gradients from the matrix products.

With G = dy^T @ x_hat, h = dy @ weight and the linear bias's gradient
db = dy^T @ 1,

    dW = G * gamma + db (x) beta,
    dgamma = sum over rows of h * x_hat = sum over n of W * G,
    dbeta = sum over rows of h = sum over n of W * db.

From h where rows are few; from G where they are many, so that nothing of the
input's size is read for gamma and beta. Sums over n are taken in chunks of fixed
size, so that they do not depend on how the product is divided.
"""

from std.math import ceildiv

from ...call import Call, CallPointer
from ...gemm.cpu.blocking import Blocking
from ...gemm.cpu.memory import Matrix, buffer, load_first, store_first
from ...norms.norm import Norm
from ...rounding import converted
from .backward_plan import BackwardPlan, SUM_ROWS
from .job import Job
from .parameters import store_gradient
from .statistics import Statistics

comptime CHUNK = 256
"""Columns of dy that are summed together."""


def sum_dy[dtype: DType](job: Job[dtype, BackwardPlan[dtype]], first: Int):
    """Sums a chunk of dy's columns, row after row: cache lines of rows may collide.

    Parameters:
        dtype: Element type of the tensors.

    Args:
        job: The call. Its sums, and dbias where it is wanted, are written.
        first: The first column.
    """
    comptime B = Blocking[dtype]
    comptime Lanes = SIMD[DType.float64, B.width]
    ref call = job.call[]
    var sums = job.at[DType.float64](job.plan.dbias).unsafe_offset(first)
    var columns = min(CHUNK, call.N - first)
    for j in range(0, columns, B.width):
        sums.unsafe_offset(j).unsafe_store(Lanes(0))
    for row in range(call.M):
        var line = Matrix[dtype](call.dy, call.N).at(row, first)
        for j in range(0, columns, B.width):
            var value = converted[B.accum](
                load_first[B.width](line.unsafe_offset(j), columns - j)
            )
            var target = sums.unsafe_offset(j)
            target.unsafe_store(
                target.unsafe_load[width=B.width]()
                + value.cast[DType.float64]()
            )
    if call.dbias != 0:
        var target = buffer[dtype](call.dbias).unsafe_offset(first)
        for j in range(0, columns, B.width):
            var sum = sums.unsafe_offset(j).unsafe_load[width=B.width]()
            store_first(
                target.unsafe_offset(j),
                converted[dtype](sum.cast[B.accum]()),
                columns - j,
            )


def sum_over_rows[
    dtype: DType, ThisNorm: Norm
](
    call_at: CallPointer,
    h: Matrix[Blocking[dtype].accum],
    first: Int,
    last: Int,
    shifts: Int,
):
    """Computes dgamma and dbeta of some features from h, where they are wanted.

    Parameters:
        dtype: Element type of the tensors.
        ThisNorm: The norm.

    Args:
        call_at: The tensors.
        h: `dy @ weight`, readable in whole vectors.
        first: First feature.
        last: End of the features.
        shifts: Address of what the saved means lack; 0 for nothing.
    """
    comptime B = Blocking[dtype]
    comptime Lanes = SIMD[DType.float64, B.width]
    ref call = call_at[]
    var x = Matrix[dtype](call.x, call.K)
    for k in range(first, last, B.width):
        var left = call.K - k
        var dgamma = Lanes(0)
        var dbeta = Lanes(0)
        for m in range(call.M):
            var value = h.at(m, k).unsafe_load[width=B.width]()
            var x_hat = (
                Statistics[dtype, ThisNorm]
                .saved(call_at, m, shifts)
                .normalize(
                    converted[B.accum](load_first[B.width](x.at(m, k), left))
                )
            )
            dgamma += (value * x_hat).cast[DType.float64]()
            dbeta += value.cast[DType.float64]()
        if call.dgamma != 0:
            _store[dtype](call, call.dgamma, k, dgamma, left)
        if call.dbeta != 0:
            _store[dtype](call, call.dbeta, k, dbeta, left)


def finish_weight_rows[
    dtype: DType
](
    job: Job[dtype, BackwardPlan[dtype]],
    product: Matrix[Blocking[dtype].accum],
    n: Int,
    k: Int,
    rows: Int,
    columns: Int,
):
    """Makes rows of dW from G, and a partial sum of dgamma and of dbeta.

    Parameters:
        dtype: Element type of the tensors.

    Args:
        job: The call.
        product: G at these rows and columns, readable in whole vectors.
        n: The first row, a multiple of `SUM_ROWS`.
        k: The first column.
        rows: Number of rows, at most `SUM_ROWS`.
        columns: Number of columns.
    """
    ref call = job.call[]
    if call.dweight != 0:
        _store_weight_gradient(job, product, n, k, rows, columns)
    if call.dgamma != 0 or call.dbeta != 0:
        _store_partial_sums(job, product, n, k, rows, columns)


def _store_weight_gradient[
    dtype: DType
](
    job: Job[dtype, BackwardPlan[dtype]],
    product: Matrix[Blocking[dtype].accum],
    n: Int,
    k: Int,
    rows: Int,
    columns: Int,
):
    """Computes rows of dW."""
    comptime B = Blocking[dtype]
    var dweight = Matrix[dtype](job.call[].dweight, job.call[].K).part(n, k)
    var dbias = job.at[DType.float64](job.plan.dbias).unsafe_offset(n)
    var gammas = job.gamma.unsafe_offset(k)
    var betas = job.beta.unsafe_offset(k)
    for i in range(rows):
        var db = dbias.unsafe_offset(i).unsafe_load().cast[B.accum]()
        for j in range(0, columns, B.width):
            var left = columns - j
            var g = product.at(i, j).unsafe_load[width=B.width]()
            var gamma = load_first[B.width](gammas.unsafe_offset(j), left)
            var beta = load_first[B.width](betas.unsafe_offset(j), left)
            store_first(
                dweight.at(i, j),
                converted[dtype](g.fma(gamma, beta * db)),
                left,
            )


def _store_partial_sums[
    dtype: DType
](
    job: Job[dtype, BackwardPlan[dtype]],
    product: Matrix[Blocking[dtype].accum],
    n: Int,
    k: Int,
    rows: Int,
    columns: Int,
):
    """Computes these rows' share of dgamma and dbeta."""
    comptime B = Blocking[dtype]
    comptime Lanes = SIMD[B.accum, B.width]
    ref call = job.call[]
    var weight = Matrix[dtype](call.weight, call.K).part(n, k)
    var dbias = job.at[DType.float64](job.plan.dbias).unsafe_offset(n)
    var dgamma = _partial(job, job.plan.dgamma_partial).at(n // SUM_ROWS, k)
    var dbeta = _partial(job, job.plan.dbeta_partial).at(n // SUM_ROWS, k)
    for j in range(0, columns, B.width):
        var left = columns - j
        var gamma_sum = Lanes(0)
        var beta_sum = Lanes(0)
        for i in range(rows):
            var w = converted[B.accum](
                load_first[B.width](weight.at(i, j), left)
            )
            if call.dgamma != 0:
                gamma_sum = w.fma(
                    product.at(i, j).unsafe_load[width=B.width](), gamma_sum
                )
            var db = dbias.unsafe_offset(i).unsafe_load()
            beta_sum = w.fma(Lanes(db.cast[B.accum]()), beta_sum)
        if call.dgamma != 0:
            store_first(dgamma.unsafe_offset(j), gamma_sum, left)
        if call.dbeta != 0:
            store_first(dbeta.unsafe_offset(j), beta_sum, left)


def sum_partials[
    dtype: DType
](job: Job[dtype, BackwardPlan[dtype]], first: Int, last: Int):
    """Adds up the partial sums of some features, where they are wanted.

    Parameters:
        dtype: Element type of the tensors.

    Args:
        job: The call.
        first: First feature.
        last: End of the features.
    """
    ref call = job.call[]
    if call.dgamma != 0:
        _sum_partial(job, call.dgamma, job.plan.dgamma_partial, first, last)
    if call.dbeta != 0:
        _sum_partial(job, call.dbeta, job.plan.dbeta_partial, first, last)


def _sum_partial[
    dtype: DType
](
    job: Job[dtype, BackwardPlan[dtype]],
    target: Int,
    offset: Int,
    first: Int,
    last: Int,
):
    comptime B = Blocking[dtype]
    ref call = job.call[]
    var partial = _partial(job, offset)
    for k in range(first, last, B.width):
        var left = last - k
        var total = SIMD[DType.float64, B.width](0)
        for chunk in range(ceildiv(call.N, SUM_ROWS)):
            total += load_first[B.width](partial.at(chunk, k), left).cast[
                DType.float64
            ]()
        _store[dtype](call, target, k, total, left)


def _partial[
    dtype: DType
](job: Job[dtype, BackwardPlan[dtype]], offset: Int) -> Matrix[
    Blocking[dtype].accum
]:
    return {job.at[Blocking[dtype].accum](offset), job.call[].K}


def _store[
    dtype: DType
](
    call: Call,
    address: Int,
    k: Int,
    value: SIMD[DType.float64, Blocking[dtype].width],
    count: Int,
):
    store_gradient[dtype](address, call.norm_is_float32 != 0, k, value, count)
