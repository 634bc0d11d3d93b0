"""Kernels for GPUs, written in Triton: what a model computes besides matrix products. Its files:

kernels.py    offers the kernels as functions of tensors, the same ones as cpu/kernels.py
layers.py     RMS norm, rotary positions and gates, with their gradients
attention.py  attention of new tokens over the KV cache
sampling.py   from logits to tokens, and what the sampler keeps of them
"""
