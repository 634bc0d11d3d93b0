"""CUDA graphs for decoding: a GPU replays a whole step instead of starting a few hundred small kernels.

A captured step reads and writes the same memory at every replay, so each of its tensors must keep its
address. It cannot wait for the GPU, because nothing is computed while it is captured. So a step first runs
where waiting is an error; if that fails, no capture is begun, and steps run one kernel after the other. On a
CPU nothing is captured: ``CudaGraphs.run`` just calls the step.

All graphs of a sampler share one pool of memory, because only one of them runs at a time. All captures use
one stream: cuBLAS keeps a workspace for every stream that it has met.

Code that runs only on a GPU, tested by tests/gpu where there is one and by
tests/generation/test_cuda_branches.py as far as a CPU can (benchmarks/ have a few branches more):

- this file: capture and replay;
- generation/engine.py, where it asks for ``asynchronous``: several steps between two checks for finished
  sequences, in few shapes; which have finished, copied without waiting (``_send_flags``); logits in fp32
  (``_logits``); the kernel that samples and stores (``_sample_and_store``);
- generation/sampler_copy.py (``use_all_experts``): a mixture of experts without shapes that depend on data;
- generation/kv_cache.py (``tabulate_rotary``, ``by_position``);
- compute/cuda: the Triton kernels;
- compute/attention.py: torch's flash attention of packed rows (``flash_attention``) and its fused attention
  (``_fused``), positions in the place of a mask;
- compute/batching.py: a larger micro-batch (``tokens_per_pass``), copies from pinned memory (``send``);
- compute/logprobs.py: logits in fp32 and larger chunks of them (``_gpu_kernels``, ``CHUNK``);
- compute/precision.py: whether the GPU computes in bf16 or fp16 (``fast_dtype``), TF32, no cuDNN attention
  (``set_precision``), heads without TF32 (``ScoreHead``);
- compute/memory.py: torch's cached GPU memory is freed after an out-of-memory error (``attempt``);
  compute/memory.py: free memory is counted, and frozen models wait outside it;
- trainer/memory_plan.py: micro-batches as large as the memory allows;
- runs/distributed.py, ``init_world``: which GPU a process uses, and nccl as the backend;
- runs/run_logger.py, ``summary``: the peak of GPU memory;
- errors.py, ``run_script``: an out-of-memory error of the GPU is printed as one line.

The reverse, code that runs only on a CPU: the compiled kernels of compute/cpu, and the branches that ask for
``"cpu"`` in compute/attention.py, compute/precision.py, generation/kv_cache.py and sampler_copy.py.
"""

import warnings
from contextlib import contextmanager, suppress
from functools import cache

import torch

from errors import first_line
from trainer.compute.memory import is_out_of_memory


class CudaGraphs:
    """Runs decoding steps: on a GPU it captures a step at its first call and replays it from then on.

    A sampler has one for all its engines, so that whether its model can be captured is found out once.
    ``asynchronous``: work for the device is queued, and to read a result means to wait (a GPU).
    """

    def __init__(self, device):
        self.asynchronous = device.type == "cuda"
        self.possible = self.asynchronous
        self.captured = {}
        self.pool = None

    def forget(self):
        """Let go of all graphs and their memory. Call it before the tensors that they use are freed."""
        self.captured = {}
        self.pool = None

    def run(self, key, step, state):
        """Run ``step()`` once. key: what its shapes and constants depend on; each key has a graph of its own.
        state: the tensors that it changes in place; they are restored after a capture, whose warm-up runs
        change them.

        If memory runs out in a capture, the error is raised. If capturing fails otherwise, a warning says so,
        and all steps run without graphs from then on.
        """
        if self.possible and key not in self.captured:
            saved = [x.clone() for x in state]
            try:
                self.warm_up(step)
                self.captured[key] = self.record(step)
            except RuntimeError as error:
                if is_out_of_memory(error):  # the sampler starts again with fewer slots, and with graphs
                    raise
                self.possible = False
                self.forget()
                warnings.warn(f"no CUDA graphs, decoding is slower: {first_line(error)}", stacklevel=3)
            for x, before in zip(state, saved, strict=True):
                x.copy_(before)
        self.captured.get(key, step)()

    def warm_up(self, step):
        """Run ``step`` twice on the stream of captures. In the first run, kernels are compiled and libraries
        allocate their memory. The second must not wait for the GPU: RuntimeError if it does."""
        side = capture_stream(torch.cuda.current_device())
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                step()
                with waiting_is_an_error():
                    step()
        finally:
            current.wait_stream(side)

    def record(self, step):
        """Record ``step`` as a graph -> a function that replays it. Where this fails, the stream and torch's
        allocator are as they were; ``torch.cuda.graph`` alone does not see to that."""
        device = torch.cuda.current_device()
        graph = torch.cuda.CUDAGraph()
        side = capture_stream(device)
        pool = self.pool or torch.cuda.graph_pool_handle()
        mode = "thread_local"  # what other threads do meanwhile, such as nccl's, does not matter
        try:
            with (
                torch.cuda.stream(side),  # goes back to the stream before, even where the next one does not
                torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode=mode),
            ):
                step()
        except RuntimeError:
            with suppress(RuntimeError):  # if the capture could be ended, this has been done already
                torch._C._cuda_endAllocateToPool(device, pool)
                torch._C._cuda_releasePool(device, pool)
            raise
        self.pool = pool
        return graph.replay


@cache
def capture_stream(device):
    """The stream of all captures and their warm-ups on this device (its number)."""
    return torch.cuda.Stream(device)


@contextmanager
def waiting_is_an_error():
    """A context in which torch's operations raise RuntimeError where the host would wait for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():  # torch says that this mode does not notice every operation that waits
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
