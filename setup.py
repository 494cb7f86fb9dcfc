"""What pyproject.toml cannot say: how the host kernels are built.

They are a plain shared library with a C interface, loaded with ctypes; building it as an extension
puts it beside the package. Without a compiler the install succeeds all the same, and the first
clip of a gradient in host memory warns that it takes the slower way.
"""

from pathlib import Path

from setuptools import Extension, setup

SOURCES = Path("kernels/host/csrc")
FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-pthread",
    "-fvisibility=hidden",
    "-fno-math-errno",
    # A fused multiply-add rounds once, two operations round twice: results must not depend on
    # which an instruction set has. Kernels fuse by hand where a product is exact.
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-Wconversion",
]

setup(
    ext_modules=[
        Extension(
            "hyper_parallel.kernels.host._host_kernels",
            sources=sorted(map(str, SOURCES.glob("*.cpp"))),
            depends=sorted(map(str, SOURCES.glob("*.h"))),
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        )
    ]
)
