"""Kernels for NVIDIA GPUs, in Triton, with the functions that launch them. Which one runs is decided elsewhere."""
