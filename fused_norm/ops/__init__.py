"""The ops as PyTorch knows them: schemas, fakes, autograd, validation."""
