#!/usr/bin/env bash
# Everything that one GPU can say of the device kernels, in ten minutes: builds, compares every
# kernel with exact or float64 references, clips host and device shards of one rank, and times the
# kernels against torch._foreach_norm, torch._foreach_mul_ and the speed of a copy.
#
# That clip is measured and scaled where shards lie, and added up on the host. A group of one rank has
# nobody to reduce with: nothing goes over NCCL, the kernels that encode lanes and finish a norm are
# checked by themselves only, and the clip of NormReducer(model) without copies does not run.
#
#   benchmarks/device_check.sh [python]
#
# The Python must have a torch that finds the GPU, and mainline Triton (which torch brings), not
# triton-ascend. Nothing is installed into it: the packages of the tests go into .venv-device.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${1:-python3}"
export TRITON_INTERPRET=0

"$python" -c '
import torch, triton
assert torch.cuda.is_available(), "torch finds no GPU"
print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)'

test -x .venv-device/bin/python || "$python" -m venv --system-site-packages .venv-device
.venv-device/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[trainer]' \
	'pytest>=8' 'pytest-timeout>=2.3' 'hypothesis>=6.100'
.venv-device/bin/python -m pytest -q -m device tests/device
.venv-device/bin/python benchmarks/device_kernels.py --save
