"""Compiled kernels for CPUs, in C: what a model computes besides matrix products."""
