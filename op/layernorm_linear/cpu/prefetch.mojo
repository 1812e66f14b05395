"""Asks for cache lines ahead of their use."""

from std.sys.intrinsics import PrefetchOptions, prefetch

from .blocking import Buffer


@always_inline
def prefetch_for_write[dtype: DType, //](target: Buffer[dtype]):
    """Starts to fetch the line of an element that will be overwritten.

    Parameters:
        dtype: Element type.

    Args:
        target: The element.
    """
    prefetch[PrefetchOptions().for_write().high_locality().to_data_cache()](
        target
    )


@always_inline
def prefetch_for_read[dtype: DType, //](source: Buffer[dtype]):
    """Starts to fetch the line of an element; it need not exist.

    Parameters:
        dtype: Element type.

    Args:
        source: The element.
    """
    prefetch[PrefetchOptions().for_read().medium_locality().to_data_cache()](
        source
    )
