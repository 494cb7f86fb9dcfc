import os

# One thread, set before torch starts any: OpenMP's workers do not survive the fork that starts
# the ranks of a test (tests/ranks.py).
os.environ["OMP_NUM_THREADS"] = "1"

import torch

torch.set_num_threads(1)
