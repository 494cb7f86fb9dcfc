"""What clipping needs beside torch: nothing; and of torch, nothing private of FSDP2."""

from tests.commands import output_of

ONLY_TORCH = """
import importlib.metadata, re, sys

requires = [line for line in importlib.metadata.requires("torch") if "extra ==" not in line]
allowed = {re.match(r"[\\w-]+", line).group().replace("-", "_") for line in requires}
allowed |= sys.stdlib_module_names | {"torch", "torchgen", "functorch", "hyper_parallel"}
allowed |= {"mpmath", "markupsafe"}  # which sympy and jinja2 require
allowed -= {"triton"}  # which torch requires where it has CUDA

class Installed:
    def __init__(self, finders):
        self.finders = finders

    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in allowed and not top.startswith("_sysconfigdata"):
            return None
        specs = (finder.find_spec(name, path, target) for finder in self.finders)
        return next(filter(None, specs), None)

sys.meta_path[:] = [Installed(list(sys.meta_path))]
import torch
import hyper_parallel
"""
CLIP = """
weight = torch.nn.Parameter(torch.zeros(2))
weight.grad = torch.tensor([3.0, 4.0])
assert hyper_parallel.clip_grad_norm_([weight], 1.0).item() == 5.0
assert weight.grad.norm().item() < 1.001
"""
OTHER_FSDP = """
import sys
import torch
from torch.distributed.fsdp import _fully_shard as fsdp
del fsdp._fsdp_collectives._get_gradient_divide_factors
del fsdp._fsdp_common.FSDPMeshInfo
"""


def test_clip_on_the_cpu_imports_nothing_but_torch_and_the_standard_library():
    output_of("-c", ONLY_TORCH + CLIP)


def test_clip_does_not_need_private_names_of_fsdp():
    """A name that torch renamed broke `import hyper_parallel`, whatever it was imported for."""
    output_of("-c", OTHER_FSDP + "import hyper_parallel\n" + CLIP)


def test_norm_before_offload_with_another_fsdp_says_so_when_it_is_attached():
    attach = """
from hyper_parallel.platform.torch.torch_private_fsdp import FsdpGroup
try:
    FsdpGroup("layer", None, None)
except RuntimeError as error:
    print(error)
"""
    done = output_of("-c", OTHER_FSDP + attach)
    assert "NormBeforeOffload does not know the FSDP2 of torch" in done.stdout
    assert "_get_gradient_divide_factors" in done.stdout
