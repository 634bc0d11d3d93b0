"""Kernels for GPUs, in Triton: what a model computes besides matrix products."""
