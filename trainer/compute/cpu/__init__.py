"""Compiled kernels for CPUs: what a model computes besides matrix products, in C. The files of this folder:

kernels.py   compiles the C files and offers their functions for tensors
vectors.h    vectors of fp32 numbers, reading and writing fp32 or bf16, exp and softmax
layers.c     RMS norm, rotary positions and gates, with their gradients
attention.c  attention over a KV cache (decoding) and of whole sequences, with its gradient
tokens.c     log-probs of given tokens, with their gradient, and sampling of tokens
"""
