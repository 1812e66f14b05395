"""The passes as entry points run them: on the address of a `Call`, by the runner that it names."""

from ..call import CallPointer
from . import passes
from .runner import Runner


struct Passes[dtype: DType, R: Runner]:
    """The passes for one type of x on one kind of device.

    Parameters:
        dtype: The type of x.
        R: What runs them.
    """

    @doc_hidden
    @staticmethod
    def plan_normalize(call: CallPointer) raises:
        passes.plan_normalize[Self.dtype](call[])

    @doc_hidden
    @staticmethod
    def normalize(call: CallPointer) raises:
        var runner = Self.R.of(call[])
        passes.normalize[Self.dtype](runner, call[])

    @doc_hidden
    @staticmethod
    def plan_normalize_backward(call: CallPointer) raises:
        passes.plan_normalize_backward[Self.dtype](Self.R.of(call[]), call[])

    @doc_hidden
    @staticmethod
    def normalize_backward(call: CallPointer) raises:
        var runner = Self.R.of(call[])
        passes.normalize_backward[Self.dtype](runner, call[])

    @doc_hidden
    @staticmethod
    def activate(call: CallPointer) raises:
        var runner = Self.R.of(call[])
        passes.activate[Self.dtype](runner, call[])

    @doc_hidden
    @staticmethod
    def plan_activate_backward(call: CallPointer) raises:
        passes.plan_activate_backward[Self.dtype](Self.R.of(call[]), call[])

    @doc_hidden
    @staticmethod
    def activate_backward(call: CallPointer) raises:
        var runner = Self.R.of(call[])
        passes.activate_backward[Self.dtype](runner, call[])
