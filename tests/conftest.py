"""Every test runs on one thread: the models are so small that a second one only waits for the first."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start: sums depend on the threads

import torch

torch.set_num_threads(1)
