"""What was measured on a kind of device, and the model that chooses by it how a call runs."""
