"""The ops as PyTorch knows them: schemas, fakes, gradients, and which calls the kernels serve."""
