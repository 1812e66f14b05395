"""Small wrong edits to the library, each of which its tests must notice."""

from __future__ import annotations

from mutations import cpu, gpu
from mutations.gpu import KERNELS
from mutations.mutation import Mutation

__all__ = ["KERNELS", "MUTATIONS", "Mutation"]

MUTATIONS = (*cpu.MUTATIONS, *gpu.MUTATIONS)
