"""The head of a language model on Hopper: the product with the vocabulary, and its cross entropy."""
