"""PyTorch's own attention kernels, one by one.

`candidates` runs them, `gates` says which problems each takes, and `bugs` what is known against running one.
"""
