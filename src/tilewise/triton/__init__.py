"""Attention in Triton: `backend` chooses and launches, `kernels` holds the kernels and needs Triton to be imported."""
