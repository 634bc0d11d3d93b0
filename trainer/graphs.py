"""CUDA graphs: a step of a few hundred small kernels, launched at once instead of one by one.

A captured step reads and writes the same memory each time, so everything it touches must stay where it is.
"""

import warnings

import torch


class Graphs:
    """Runs steps; each kind is captured the first time it is asked for, if capturing is possible at all."""

    def __init__(self, device):
        self.possible = device.type == "cuda"
        self.captured = {}
        self.pool = None  # the memory that all graphs share: only one of them runs at a time

    def run(self, key, step, state):
        """Run ``step`` once. key: what its shapes depend on; state: the tensors that it changes in place."""
        if not self.possible:
            step()
            return
        if key not in self.captured:
            saved = [x.clone() for x in state]
            try:
                self.captured[key] = self.capture(step)
            except RuntimeError as error:  # something in the model waits for the GPU, or asks it for a size
                self.possible = False
                reason = str(error).strip().splitlines()[0]
                warnings.warn(f"no CUDA graphs, decoding is slower: {reason}", stacklevel=2)
            for x, before in zip(state, saved, strict=True):
                x.copy_(before)
            self.run(key, step, state)
            return
        self.captured[key]()

    def capture(self, step):
        """-> a function that replays ``step``. Warming up first makes libraries allocate what they need."""
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
