"""CUDA graphs for decoding: a GPU replays a whole step instead of starting a few hundred small kernels.

A captured step reads and writes the same memory at every replay, so each of its tensors must keep its
address. On a CPU nothing is captured: ``CudaGraphs.run`` just calls the step.

Code that runs only on a GPU, tested by tests/test_gpu.py where there is one (benchmarks/ have a few branches
more, for measuring):

- this file: capture and replay;
- generation/engine.py, ``Engine.advance``: several steps between two checks for finished sequences, in few
  shapes;
- compute/batching.py: a larger micro-batch (``tokens_per_pass``), copies from pinned memory (``pad_right``);
- compute/logprobs.py: a larger chunk of logits (``CHUNK``);
- compute/precision.py: whether the GPU computes in bf16 or fp16 (``fast_dtype``), TF32 and sums in fp32
  (``set_precision``);
- compute/memory.py, ``attempt``: torch's cached GPU memory is freed after an out-of-memory error;
- runs/distributed.py, ``init_world``: which GPU a process uses, and nccl as the backend;
- runs/run_logger.py, ``summary``: the peak of GPU memory;
- errors.py, ``run_script``: an out-of-memory error of the GPU is printed as one line.

The reverse, code that runs only on a CPU: the compiled kernels of compute/cpu, and the branches that ask for
``"cpu"`` in compute/attention.py, compute/precision.py, generation/kv_cache.py and sampler_copy.py.
"""

import warnings

import torch


class CudaGraphs:
    """Runs decoding steps: on a GPU it captures a step at its first call and replays it from then on."""

    def __init__(self, device):
        self.possible = device.type == "cuda"
        self.captured = {}
        self.pool = None  # memory that all graphs share, because only one of them runs at a time

    def run(self, key, step, state):
        """Run ``step()`` once. key: what its shapes and constants depend on; each key has a graph of its own.
        state: the tensors that it changes in place; they are restored after a capture, whose warm-up runs
        change them. If capturing fails, a warning says so, and steps run without graphs from then on.
        """
        if not self.possible:
            step()
            return
        if key not in self.captured:
            saved = [x.clone() for x in state]
            try:
                self.captured[key] = self.capture(step)
            except RuntimeError as error:  # the model waits for the GPU or asks it for a size
                self.possible = False
                reason = str(error).strip().splitlines()[0]
                warnings.warn(f"no CUDA graphs, decoding is slower: {reason}", stacklevel=2)
            for x, before in zip(state, saved, strict=True):
                x.copy_(before)
            self.run(key, step, state)
            return
        self.captured[key]()

    def capture(self, step):
        """Capture ``step`` -> a function that replays it. Two warm-up runs come first, so that libraries
        allocate their memory before the capture."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            step()
        self.pool = graph.pool()
        return graph.replay
