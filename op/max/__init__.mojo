"""What MAX graphs and `CustomOpLibrary` find of the production kernels."""
