"""Keeps the pytest process fit to fork the ranks of a test from (tests/ranks.py).

Besides the one thread below: no test calls `backward()` in this process, since autograd's device
threads do not survive a fork either; it runs in `run_ranks(..., 1, backend="none")`.
"""

import os

# One thread, set before torch starts any: OpenMP's workers do not survive the fork that starts
# the ranks of a test (tests/ranks.py).
os.environ["OMP_NUM_THREADS"] = "1"

import torch

torch.set_num_threads(1)
