"""Computes the gradients of LayerNorm followed by a Linear layer on the CPU.

Two matrix products make all five gradients: one of dy with the normalized rows,
one of dy with the weight. With few rows the time goes into reading the weight
and writing its gradient, with many into the products: each has its own way.

Every sum runs in an order that only the shape decides, so the bits depend
neither on the number of threads nor on which of them does what; those of a row
of dx depend on no other row, nor on the way.
"""

from std.sys import size_of

from ...pages import prefer_large_pages
from ...team import Team
from .blocking import CACHE_LINE
from .few_rows import FewRows
from .few_rows_plan import FewRowsPlan
from .gradients import Gradients, Wanted
from .many_rows import ManyRows
from .many_rows_plan import ManyRowsPlan
from .workspace import FEW_ROWS, ceildiv, useful_threads


def backward_bytes[
    dtype: DType
](M: Int, K: Int, N: Int, wanted: Wanted, threads: Int) -> Int:
    """Measures the workspace of a backward.

    Parameters:
        dtype: Element type of the tensors.

    Args:
        M: Rows.
        K: Features.
        N: Outputs.
        wanted: Which gradients to compute.
        threads: Threads at hand.

    Returns:
        Its size in bytes, with room to align it.
    """
    var workers = useful_threads(M * K * N, threads)
    if M <= FEW_ROWS:
        return FewRowsPlan[dtype](M, K, N, wanted, workers).bytes + CACHE_LINE
    return ManyRowsPlan[dtype](M, K, N, wanted, workers).bytes + CACHE_LINE


def compute_gradients[
    dtype: DType
](
    gradients: Gradients[dtype],
    threads: Int,
    workspace: Int,
    gomp_parallel: Int,
):
    """Computes the gradients that have an address.

    Parameters:
        dtype: Element type of the tensors.

    Args:
        gradients: The tensors.
        threads: Threads at hand.
        workspace: Address of as many bytes as `backward_bytes` says.
        gomp_parallel: Address of `GOMP_parallel` in PyTorch's libgomp; 0
            selects Mojo's pool.
    """
    var M = gradients.M
    var K = gradients.K
    var N = gradients.N
    var wanted = gradients.wanted()
    var aligned = ceildiv(workspace, CACHE_LINE) * CACHE_LINE
    var workers = useful_threads(M * K * N, threads)
    var team = Team(gomp_parallel, workers)
    if wanted.dx:
        prefer_large_pages(gradients.dx, M * K * size_of[dtype]())
    if wanted.dweight:
        prefer_large_pages(gradients.dweight, N * K * size_of[dtype]())
    if M <= FEW_ROWS:
        var plan = FewRowsPlan[dtype](M, K, N, wanted, workers)
        prefer_large_pages(aligned, plan.bytes)
        var job = FewRows[dtype](plan^, gradients, aligned)
        job.run(team)
    else:
        var plan = ManyRowsPlan[dtype](M, K, N, wanted, workers)
        prefer_large_pages(aligned, plan.bytes)
        var job = ManyRows[dtype](plan^, gradients, aligned)
        job.run(team)
