"""Kernels for GPUs, written in Triton: what a model computes besides matrix products. Its files:

kernels.py    offers the kernels as functions of tensors, those of cpu/kernels.py
layers.py     RMS norm, rotary positions and gates, with their gradients
attention.py  attention of new tokens over the KV cache
tokens.py     log-probs and entropy of tokens, from logits, with their gradient
sampling.py   from logits to tokens, and what the sampler keeps of them
"""
