"""Mends Triton's interpreter, as far as our kernels meet its faults.

Products of bf16 multiply their bits as if they were integers (3.6, 3.7). ``range`` over a tensor is an error
with numpy 2.4, which makes no number of an array of one element (3.6, which belongs to torch 2.11).

It is enough to import this module. Without the interpreter nothing changes.
"""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    plain_dot = interpreter.InterpreterBuilder.create_dot
    plain_patch = interpreter._patch_lang_tensor

    def in_fp32(x):
        """A bf16 tensor of the interpreter -> the same numbers in fp32"""
        bits = x.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self, a, b, *more):
        a, b = (in_fp32(x) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return plain_dot(self, a, b, *more)

    def patch_lang_tensor(tensor, scope):
        plain_patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter.InterpreterBuilder.create_dot = create_dot
    interpreter._patch_lang_tensor = patch_lang_tensor
