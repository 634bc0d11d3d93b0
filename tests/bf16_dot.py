"""Mends products of bf16 in Triton's interpreter, which multiplies their bits as if they were integers (3.7).

It is enough to import this module. Without the interpreter nothing changes.
"""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    plain_dot = interpreter.InterpreterBuilder.create_dot

    def in_fp32(x):
        """A bf16 tensor of the interpreter -> the same numbers in fp32"""
        bits = x.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self, a, b, *more):
        a, b = (in_fp32(x) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return plain_dot(self, a, b, *more)

    interpreter.InterpreterBuilder.create_dot = create_dot
