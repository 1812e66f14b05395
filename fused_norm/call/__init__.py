"""What kernels receive: records of calls, and parameters that are known to be frozen."""
