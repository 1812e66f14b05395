"""The native extensions: their sources, how they are built, kept and loaded, and the C++ node."""
