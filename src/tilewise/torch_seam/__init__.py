"""Where calls meet PyTorch: switches and modes, autograd, the registered operators, and torch.compile."""
