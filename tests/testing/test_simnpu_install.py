"""When the simulator is compiled, when it is not, and when it stays out of the way."""

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from hyper_parallel.testing import simnpu
from hyper_parallel.testing.simnpu import _build

pytestmark = pytest.mark.simnpu

REPOSITORY = Path(__file__).parents[2]
NUM_PROCESSES = 4


def python(program: str, *import_paths: Path) -> str:
    """Run `program` in a fresh interpreter and return what it prints."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, [*import_paths, REPOSITORY])),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    outcome = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr
    return outcome.stdout.strip()


def test_import_alone_does_nothing() -> None:
    program = """
        import torch
        from hyper_parallel.testing import simnpu
        print(simnpu.is_installed(), hasattr(torch, "npu"))
        try:
            simnpu.counters()
        except RuntimeError as error:
            print(error)
    """
    assert python(program).splitlines() == [
        "False False",
        "the simulated NPU is not installed: call simnpu.install() first",
    ]


def test_steps_aside_for_torch_npu(tmp_path: Path) -> None:
    package = tmp_path / "torch_npu"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('must not be imported')")
    program = """
        import torch
        from hyper_parallel.testing import simnpu
        print(simnpu.install(), simnpu.is_installed(), hasattr(torch, "npu"))
    """
    assert python(program, tmp_path) == "False False False"


def test_steps_aside_for_another_torch_npu_module() -> None:
    program = """
        import types
        import torch
        torch.npu = real = types.ModuleType("torch.npu")
        from hyper_parallel.testing import simnpu
        print(simnpu.install(), simnpu.is_installed(), torch.npu is real)
    """
    assert python(program) == "False False True"


def test_spawned_process_installs_by_itself() -> None:
    program = """
        import torch
        from hyper_parallel.testing import simnpu
        print(simnpu.install(), simnpu.install(), torch.ones(2, device="npu").sum().item())
    """
    assert python(program) == "True True 2.0"


def test_number_of_devices_is_the_first_callers_and_later_ones_may_need_fewer() -> None:
    program = """
        import torch
        from hyper_parallel.testing import simnpu
        simnpu.install(num_devices=3)
        print(simnpu.install(), simnpu.install(num_devices=2), torch.npu.device_count())
        try:
            simnpu.install(num_devices=4)
        except RuntimeError as error:
            print(error)
    """
    assert python(program).splitlines() == [
        "True True 3",
        "4 simulated NPUs are needed and this process has 3 already: "
        "pass num_devices to the first call of simnpu.install()",
    ]


@pytest.mark.parametrize("number", [0, -1, 128])
def test_impossible_number_of_devices_is_named(number: int) -> None:
    with pytest.raises(ValueError, match=f"num_devices must be from 1 to 127, got {number}"):
        simnpu.install(num_devices=number)


def test_build_dir_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    monkeypatch.setenv("HYPER_PARALLEL_SIMNPU_BUILD_DIR", "/builds")
    assert _build.default_build_dir() == Path("/builds")
    monkeypatch.delenv("HYPER_PARALLEL_SIMNPU_BUILD_DIR")
    assert _build.default_build_dir() == Path("/cache/hyper_parallel/simnpu")


class TinyLibrary:
    """One C++ function to build in place of the simulator, and a log of compiler calls."""

    def __init__(self, folder: Path) -> None:
        self.sources = folder / "sources"
        self.sources.mkdir()
        (self.sources / "unit_tiny.cpp").write_text('extern "C" int answer() { return 42; }')
        self.build_dir = folder / "builds"
        self.log = folder / "log"
        self._folder = folder

    def use_compiler(self, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
        compiler = self._folder / "compiler"
        compiler.write_text(f'#!/bin/sh\necho "$@" >> {self.log}\n{script}\n')
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))

    def build(self) -> Path:
        return _build.build("tiny", sources=self.sources, build_dir=self.build_dir)

    def num_compiler_calls(self) -> int:
        return len(self.log.read_text().splitlines())


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TinyLibrary:
    library = TinyLibrary(tmp_path)
    # Exported, since the function is looked up by name.
    library.use_compiler('exec g++ "$@" -fvisibility=default', monkeypatch)
    return library


def test_many_processes_build_once(tiny: TinyLibrary) -> None:
    context = multiprocessing.get_context("fork")
    start = context.Barrier(NUM_PROCESSES)

    def child() -> None:
        start.wait()
        if ctypes.CDLL(str(tiny.build())).answer() != 42:
            os._exit(1)

    processes = [context.Process(target=child) for _ in range(NUM_PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=30)
    assert [process.exitcode for process in processes] == [0] * NUM_PROCESSES
    assert tiny.num_compiler_calls() == 2  # compile, link


def test_changed_source_is_built_anew(tiny: TinyLibrary) -> None:
    first = tiny.build()
    (tiny.sources / "header.h").write_text("// new")
    assert tiny.build() != first
    assert first.exists()


def test_build_announces_itself_once(tiny: TinyLibrary, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.build()
    assert capsys.readouterr().err == (
        "building the simulated NPU, about a minute (only once)...\n"
    )
    tiny.build()
    assert capsys.readouterr().err == ""


def test_killed_build_leaves_nothing_that_is_loaded(
    tiny: TinyLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    good_compiler = (tiny.log.parent / "compiler").read_text()
    write_half = 'for last; do :; done\necho half > "$last"\n'
    tiny.use_compiler(write_half + 'case "$1" in -shared) sleep 60;; esac', monkeypatch)

    def child() -> None:
        os.setsid()
        tiny.build()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    deadline = time.monotonic() + 20
    while not (tiny.log.exists() and tiny.num_compiler_calls() == 2):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.join()

    compiler = tiny.log.parent / "compiler"
    compiler.write_text(good_compiler)
    assert ctypes.CDLL(str(tiny.build())).answer() == 42


def test_missing_compiler_names_the_remedy(
    tiny: TinyLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match=r"no-such-compiler.*apt-get install g\+\+"):
        tiny.build()


def test_compile_error_is_shown_and_not_cached(tiny: TinyLibrary) -> None:
    source = tiny.sources / "unit_tiny.cpp"
    good = source.read_text()
    source.write_text("this is not C++")
    with pytest.raises(RuntimeError, match=r"error: .*this"):
        tiny.build()
    source.write_text(good)
    assert tiny.build().exists()
