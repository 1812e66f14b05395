"""The chain of a call in C++, once, on LibTorch's stable ABI; and what it asks of Python."""
