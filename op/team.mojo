"""Runs CPU kernels on the threads that PyTorch computes with.

PyTorch's OpenMP workers spin for a while after each parallel region, so a second thread pool on the same
cores slows both. A kernel is therefore written as `part i of n`; the workers of PyTorch's own team take parts
from a shared counter until none is left. Without that team (no libgomp, or a MAX graph) Mojo's pool is used.
"""

from max.algorithm import sync_parallelize
from std.atomic import Atomic
from std.memory import OpaquePointer

comptime Data = OpaquePointer[MutAnyOrigin]
"""Points to the arguments of a kernel, a struct that the kernel knows."""

comptime Part = def(Data, Int) thin -> None
"""Computes one part of a kernel, given its arguments and the part's index."""

comptime _Worker = def(Data) abi("C") thin -> None
comptime _Parallel = def(_Worker, Data, UInt32, UInt32) abi("C") thin -> None


@fieldwise_init
struct _Job(Copyable, Movable):
    var next_part: Int64
    var parts: Int
    var part: Part
    var data: OpaquePointer[MutUntrackedOrigin]


def _address_of[T: AnyType, //](mut value: T) -> Data:
    return (
        Pointer(to=value)
        .unsafe_origin_cast[MutAnyOrigin]()
        .unsafe_bitcast[NoneType]()
    )


def _work(data: Data) abi("C"):
    """Takes parts of the job until none is left; every worker runs this."""
    ref job = data.unsafe_bitcast[_Job]()[]
    while True:
        var index = Int(Atomic.fetch_add(Pointer(to=job.next_part), 1))
        if index >= job.parts:
            return
        job.part(job.data.unsafe_origin_cast[MutAnyOrigin](), index)


@fieldwise_init
struct Team(TrivialRegisterPassable):
    """A set of threads to share the parts of a kernel."""

    var gomp_parallel: Int
    """Address of `GOMP_parallel` in PyTorch's libgomp; 0 selects Mojo's pool."""
    var threads: Int
    """Number of threads, the caller's included."""

    def run[Args: AnyType, //](self, part: Part, parts: Int, mut args: Args):
        """Runs every part once and returns when all are done.

        Parts are taken in order of their index by whichever thread is free.

        Parameters:
            Args: The struct that the kernel gets as its `Data`.

        Args:
            part: The kernel; it must not raise.
            parts: Number of parts.
            args: The kernel's arguments, shared by all parts.
        """
        var data = _address_of(args)
        var workers = min(self.threads, parts)
        if workers <= 1:
            for i in range(parts):
                part(data, i)
            return
        if self.gomp_parallel == 0:

            def body(i: Int) {var part, var data}:
                part(data, i)

            sync_parallelize(body, parts)
            return
        var job = _Job(
            0, parts, part, data.unsafe_origin_cast[MutUntrackedOrigin]()
        )
        var address = self.gomp_parallel
        var parallel = Pointer(to=address).unsafe_bitcast[_Parallel]()[]
        parallel(
            _work,
            _address_of(job),
            UInt32(workers),
            0,
        )
        _ = job^  # the workers read it until here
