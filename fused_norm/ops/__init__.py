"""The ops registered with PyTorch: schemas, fakes, gradients, and which calls kernels serve."""
