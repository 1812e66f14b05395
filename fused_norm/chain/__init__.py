"""The C++ chain of a call, written once on LibTorch's stable ABI, and the Python that serves it."""
