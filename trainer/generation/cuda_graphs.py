"""CUDA graphs for decoding: a GPU replays a whole step instead of starting a few hundred small kernels.

A captured step reads and writes the same memory at every replay, so each of its tensors must keep its
address. It cannot wait for the GPU, because nothing is computed while it is captured. So a step first runs
where waiting is an error; if that fails, no capture is begun, and steps run one kernel after the other. On a
CPU nothing is captured. All graphs of a sampler share one pool of memory, because only one of them runs at a
time, and all captures one stream: cuBLAS keeps a workspace for every stream that it has met.
"""

import warnings
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from errors import first_line
from trainer.compute.memory import is_out_of_memory

Step = Callable[[], None]


class CudaGraphs:
    """Runs decoding steps: on a GPU it captures a step at its first call and replays it from then on.

    A sampler has one for all its engines, so that whether its model can be captured is found out once.
    ``asynchronous``: work for the device is queued, and to read a result means to wait (a GPU).
    """

    def __init__(self, device: torch.device) -> None:
        self.asynchronous = device.type == "cuda"
        self.possible = self.asynchronous
        self.known = False  # whether a step of this model has been captured before
        self.forget()

    def forget(self) -> None:
        """Let go of all graphs and their memory. Call it before the tensors that they use are freed."""
        self.captured: dict[Hashable, Step] = {}
        self.pool: Any = None

    def run(self, key: Hashable, step: Step, state: Tensor) -> None:
        """Run ``step()`` once. key: what its shapes and constants depend on; each key has a graph of its own.
        state: what it continues from and changes in place; it is restored after a capture, whose warm-up runs
        change it. If memory runs out in a capture, the error is raised. If capturing fails otherwise, a
        warning says so, and all steps run without graphs from then on.
        """
        if self.possible and key not in self.captured:
            saved = state.clone()
            try:
                self.warm_up(step)
                self.captured[key] = self.record(step)
                self.known = True
            except RuntimeError as error:
                if is_out_of_memory(error):  # the sampler starts again with fewer slots, and with graphs
                    raise
                self.possible = False
                self.forget()
                warnings.warn(f"no CUDA graphs, decoding is slower: {first_line(error)}", stacklevel=3)
            state.copy_(saved)
        self.captured.get(key, step)()

    def warm_up(self, step: Step) -> None:
        """Run ``step`` on the stream of captures: kernels are compiled, and libraries allocate their memory.
        It must not wait for the GPU: RuntimeError if it does. The first step of all may, and runs again."""
        side = capture_stream()
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                if not self.known:
                    step()
                before = torch.cuda.get_sync_debug_mode()
                # torch says that this mode does not notice every operation that waits.
                with warnings.catch_warnings(action="ignore"):
                    torch.cuda.set_sync_debug_mode("error")
                try:
                    step()
                finally:
                    torch.cuda.set_sync_debug_mode(before)
        finally:
            current.wait_stream(side)

    def record(self, step: Step) -> Step:
        """Record ``step`` as a graph -> a function that replays it."""
        graph = torch.cuda.CUDAGraph()
        side = capture_stream()
        # Its mode: what other threads do meanwhile, such as nccl's, does not matter.
        capture = torch.cuda.graph(graph, pool=self.pool, stream=side, capture_error_mode="thread_local")
        with torch.cuda.stream(side), capture:  # the stream goes back, even where a capture fails
            step()
        self.pool = graph.pool()
        return graph.replay


@cache
def capture_stream() -> torch.cuda.Stream:
    """The stream of all captures and their warm-ups. A process computes on one device."""
    return torch.cuda.Stream()
