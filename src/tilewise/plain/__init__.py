"""Attention in torch operations, on any device: `reference` is the specification, `tiled` the loop of our kernels."""
