"""Compile the simulator once per (sources, torch, Python), whoever asks first."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

__all__ = ["build", "default_build_dir"]

_BUILD_DIR_VARIABLE = "HYPER_PARALLEL_SIMNPU_BUILD_DIR"
_SOURCES = Path(__file__).resolve().parent / "csrc"
_MAX_JOBS = 2  # as many as there are units to compile

_COMPILE_FLAGS = (
    "-std=c++20",
    "-fPIC",
    "-fvisibility=hidden",
    "-O1",
    "-g0",
    "-Wall",
    "-Wextra",
    # gcc 12 sees an overflow in torch's IValue destructor that is not there.
    "-Wno-stringop-overflow",
)
_LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")


def default_build_dir() -> Path:
    """Return the folder that keeps compiled simulators."""
    configured = os.environ.get(_BUILD_DIR_VARIABLE)
    if configured:
        return Path(configured)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "hyper_parallel" / "simnpu"


def build(name: str, *, sources: Path = _SOURCES, build_dir: Path | None = None) -> Path:
    """Return the shared library compiled from `sources/unit_*.cpp`, compiling it if need be.

    Safe from many processes: one compiles, the others wait for it. The library appears under its
    final name only when it is complete.

    Args:
        name: The extension module's name.
        sources: Folder of C++ sources; every file in it counts as an input.
        build_dir: Where to keep the result; `default_build_dir()` if None.

    Raises:
        RuntimeError: If there is no compiler, no Python header or a compile error.
    """
    folder = build_dir or default_build_dir()
    key = f"torch{torch.__version__}-{sysconfig.get_config_var('SOABI')}-{_fingerprint(sources)}"
    library = folder / key / f"{name}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with _exclusive(folder / f"{key}.lock"):
        if not library.exists():
            _compile_into(library, sources)
    return library


def _fingerprint(sources: Path) -> str:
    digest = hashlib.sha256(repr(_COMPILE_FLAGS).encode())
    for path in sorted(sources.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _exclusive(lock: Path) -> Iterator[None]:
    """Hold a lock that the kernel releases when its holder dies."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _announce("waiting for another process that builds the simulated NPU...")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _announce(message: str) -> None:
    sys.stderr.write(message + "\n")
    sys.stderr.flush()


def _compile_into(library: Path, sources: Path) -> None:
    compiler = _resolve_compiler()
    _announce("building the simulated NPU, about a minute (only once)...")
    library.parent.mkdir(exist_ok=True)
    # Beside the result, since os.replace does not cross file systems.
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        units = sorted(sources.glob("unit_*.cpp"))
        objects = [Path(scratch) / f"{unit.stem}.o" for unit in units]
        with ThreadPoolExecutor(_MAX_JOBS) as pool:
            commands = [
                [*compiler, *_compile_flags(), "-c", str(unit), "-o", str(compiled)]
                for unit, compiled in zip(units, objects, strict=True)
            ]
            list(pool.map(_run, commands))
        linked = Path(scratch) / library.name
        _run([*compiler, "-shared", *map(str, objects), *_link_flags(), "-o", str(linked)])
        os.replace(linked, library)


def _resolve_compiler() -> list[str]:
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    if shutil.which(compiler[0]) is None:
        raise RuntimeError(
            f"the simulated NPU needs a C++20 compiler and found no {compiler[0]!r}: install one "
            "(Debian: apt-get install g++) or name it in the environment variable CXX"
        )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        raise RuntimeError(
            f"the simulated NPU needs Python's headers and found no {header}: install them "
            "(Debian: apt-get install python3-dev)"
        )
    return compiler


def _compile_flags() -> list[str]:
    # Imported late: it takes a quarter of a second, which only a build should pay.
    from torch.utils.cpp_extension import include_paths

    includes = [*include_paths(), sysconfig.get_path("include")]
    # System includes, so that warnings are about our own sources.
    return [*_COMPILE_FLAGS, *(flag for path in includes for flag in ("-isystem", path))]


def _link_flags() -> list[str]:
    from torch.utils.cpp_extension import library_paths

    flags = [flag for path in library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    return [*flags, *(f"-l{library}" for library in _LIBRARIES)]


def _run(command: list[str]) -> None:
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    if outcome.returncode != 0:
        raise RuntimeError(
            f"building the simulated NPU failed: {shlex.join(command)}\n{outcome.stderr}"
        )
