"""The backend of any GPU: row programs around PyTorch's matrix products."""
