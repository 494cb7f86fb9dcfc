"""Without a compiler: the install succeeds, one warning says so, and results are right."""

import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from hyper_parallel.kernels import host

ROOT = Path(__file__).resolve().parents[2]

# Clips host gradients, plainly and reproducibly, twice each.
SCRIPT = """
import warnings

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    import hyper_parallel
    from hyper_parallel.kernels import host

    def clipped(**options):
        param = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
        param.grad = torch.tensor([3.0, 4.0], dtype=torch.bfloat16)
        norm = hyper_parallel.clip_grad_norm_([param], 1.0, **options)
        return norm.item(), param.grad.tolist()

    results = [clipped(), clipped(), clipped(reproducible=True), clipped(reproducible=True)]
assert all(result == results[0] for result in results), results
assert results[0][0] == 5.0
print(host.__file__)
print(host.is_available())
print(*[w.message for w in caught if "host kernels" in str(w.message)], sep="\\n")
"""


def run_script(*, path, **environment):
    outcome = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)],
        env={**os.environ, "PYTHONPATH": str(path), **environment},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        cwd=path,
    )
    assert outcome.returncode == 0, outcome.stderr
    return outcome.stdout.splitlines()


def copy_package(folder, *, with_library):
    ignored = ["__pycache__", *([] if with_library else ["*.so"])]
    ignore = shutil.ignore_patterns(*ignored)
    shutil.copytree(ROOT / "hyper_parallel", folder / "hyper_parallel", ignore=ignore)
    shutil.copytree(ROOT / "kernels", folder / "hyper_parallel" / "kernels", ignore=ignore)


def test_without_the_library_one_warning_says_so_and_clipping_is_right(tmp_path):
    copy_package(tmp_path, with_library=False)
    path, available, *warned = run_script(path=tmp_path)
    assert path.startswith(str(tmp_path))
    assert available == "False"
    assert len(warned) == 1
    assert "Install a C++17 compiler" in warned[0]


def test_with_the_library_nothing_is_warned(tmp_path):
    copy_package(tmp_path, with_library=True)
    path, available, *warned = run_script(path=tmp_path)
    assert path.startswith(str(tmp_path))
    assert available == "True"
    assert warned == [""]


def test_instruction_set_comes_from_the_environment():
    code = "from hyper_parallel.kernels import host; host.is_available()"
    outcome = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HYPER_PARALLEL_HOST_ISA": "mmx"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert "got mmx" in outcome.stderr


@pytest.mark.parametrize("compiler", ["fast", "none"])
def test_wheel_is_built_with_and_without_a_compiler(tmp_path, compiler):
    """A wheel has the library if it could be built, and no top-level package `kernels`."""
    script = tmp_path / compiler
    # That it is built is the point here, not that it is fast.
    script.write_text('#!/bin/sh\nexec c++ "$@" -O0\n' if compiler == "fast" else "exit 1\n")
    script.chmod(0o755)
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(ROOT / name, source)
    ignore = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "hyper_parallel", source / "hyper_parallel", ignore=ignore)
    shutil.copytree(ROOT / "kernels", source / "kernels", ignore=ignore)
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir"]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, str(tmp_path / "wheels"), str(source)],
        env={**os.environ, "CC": str(script), "CXX": str(script)},
        check=True,
        capture_output=True,
        timeout=120,
    )
    [wheel] = (tmp_path / "wheels").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "installed")
    assert not any(name.startswith("kernels/") for name in names)
    _, available, *_ = run_script(path=tmp_path / "installed")
    assert available == str(compiler == "fast")


def test_kernels_are_there_where_tests_run():
    """CI has a compiler: no test may pass by not running."""
    assert host.is_available()
