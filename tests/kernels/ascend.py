"""Compile the device kernels for Ascend, and run what triton-ascend lowers them to on the CPU.

No NPU and no CANN: triton-ascend lowers Python to linalg, bishengir-compile (ascendnpu-ir) that to
HIVM, Ascend's intermediate language for vector cores. There it stops for want of CANN's `hivmc`:
"compiles to HIVM", never "runs on Ascend". Debian's mlir-19-tools and llvm-19 compile the linalg
for the CPU instead.

Needs a process without `TRITON_INTERPRET`; tests start it as `python -m tests.kernels.ascend`.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

TARGETS = ("Ascend910B1", "Ascend910B3", "Ascend910_9391")
LLVM = Path("/usr/lib/llvm-19/bin")
LLVM_TOOLS = ("mlir-opt", "mlir-translate", "llc")
HIVM = "module.hivm.opt.mlir"

_TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.int32: "*i32",
}
_TO_LLVM = (
    "--convert-elementwise-to-linalg",
    "--eliminate-empty-tensors",
    "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true",
    "--convert-bufferization-to-memref",
    "--convert-linalg-to-loops",
    "--lower-affine",
    "--convert-scf-to-cf",
    "--expand-strided-metadata",
    "--lower-affine",
    "--convert-cf-to-llvm",
    "--convert-math-to-llvm",
    "--convert-math-to-libm",
    "--convert-arith-to-llvm",
    "--convert-index-to-llvm",
    "--memref-expand",
    "--finalize-memref-to-llvm",
    "--convert-func-to-llvm",
    "--lower-affine",
    "--convert-arith-to-llvm",
    "--reconcile-unrealized-casts",
)


@dataclass(frozen=True)
class Launch:
    """One call of a kernel, as Triton would compile it."""

    kernel: Any
    args: tuple[Any, ...]
    constants: tuple[tuple[str, Any], ...]
    grid: int

    @property
    def signature(self) -> dict[str, str]:
        return dict(zip(self.kernel.arg_names, map(_type_of, self.args), strict=False))

    @property
    def variant(self) -> tuple[object, ...]:
        """Equal for calls that share compiled code."""
        return self.kernel.__name__, tuple(self.signature.values()), self.constants


@dataclass
class Recorder:
    """Stands in the place of a kernel and hands its launches on."""

    kernel: Any
    take: Callable[[Launch], None]

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*args: Any, **constants: Any) -> None:
            self.take(Launch(self.kernel, args, tuple(constants.items()), *grid))

        return launch


def intercept(take: Callable[[Launch], None]) -> None:
    """Let `take` have every launch of this process."""
    from hyper_parallel.kernels.triton import encode, finish, partial_norms, scale

    for module in (encode, finish, partial_norms, scale):
        name = module.__all__[0]
        setattr(module, name, Recorder(getattr(module, name), take))


def _type_of(arg: object) -> str:
    if isinstance(arg, torch.Tensor):
        return _TYPES[arg.dtype]
    return "i32" if isinstance(arg, int) else "fp32"


def lower(launch: Launch) -> str:
    """Return the linalg that triton-ascend makes of a kernel, the same for every target."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend

    npu = GPUTarget("npu", TARGETS[0], 0)
    backend = make_backend(npu)
    options = backend.parse_options({})
    source = ASTSource(launch.kernel, launch.signature, dict(launch.constants))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(
        options, backend.get_codegen_implementation(), backend.get_module_map(), context
    )
    metadata = {"target": npu, "hash": "0" * 64, **vars(options)}
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options)
    linalg: str = stages["ttadapter"](stages["ttir"](module, metadata), metadata)
    return linalg


def compile_to_hivm(linalg: str, target: str) -> tuple[str | None, str]:
    """Return the optimised HIVM, None if bishengir-compile fails before that, and its messages."""
    spec = importlib.util.find_spec("ascendnpuir")
    assert spec is not None
    assert spec.origin is not None
    with tempfile.TemporaryDirectory() as folder:
        source, kept = Path(folder, "kernel.mlir"), Path(folder, "kept")
        source.write_text(_without_mix_mode(linalg))
        kept.mkdir()
        outcome = subprocess.run(
            [
                Path(spec.origin).parent / "bin" / "bishengir-compile",
                source,
                f"--target={target}",
                "--enable-auto-multi-buffer=True",
                "--enable-auto-bind-sub-block=True",
                "--enable-hfusion-compile=true",
                "--enable-hivm-compile=true",
                "--enable-triton-kernel-compile=true",
                f"--save-temps={kept}",
                "-o",
                Path(folder, "kernel"),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        result = kept / HIVM
        hivm = result.read_text() if result.exists() else None
    return hivm, outcome.stdout + outcome.stderr


def _without_mix_mode(linalg: str) -> str:
    return re.sub(r', mix_mode\s*=\s*"[^"]*"', "", linalg)


@dataclass
class Processor:
    """Runs launches on the CPU, from the linalg that Ascend's compiler would be given."""

    folder: Path
    functions: dict[tuple[object, ...], Any] = field(default_factory=dict)

    def run(self, launch: Launch) -> None:
        if launch.variant not in self.functions:
            self.functions[launch.variant] = self._build(launch)
        nothing = _memref(None)
        arguments = [*nothing, *nothing]  # the sync-block lock and the workspace
        for arg in launch.args:
            arguments += _arguments(arg)
        for program in range(launch.grid):
            place = map(ctypes.c_int32, (launch.grid, 1, 1, program, 0, 0))
            self.functions[launch.variant](*arguments, *place)

    def _build(self, launch: Launch) -> Any:
        base = self.folder / f"kernel{len(self.functions)}"
        steps = [base.with_suffix(suffix) for suffix in (".mlir", ".llvm", ".ll", ".o", ".so")]
        source, llvm, text, binary, library = map(str, steps)
        linalg = _without_mix_mode(lower(launch)).replace(" {hivm.unlikely_condition}", "")
        Path(source).write_text(linalg)
        _run(LLVM / "mlir-opt", source, *_TO_LLVM, "-o", llvm)
        _run(LLVM / "mlir-translate", llvm, "--mlir-to-llvmir", "-o", text)
        # Contraction would be harmless, and would hide it if it were not.
        _run(LLVM / "llc", "-O2", "-fp-contract=off", "-filetype=obj", "-relocation-model=pic",
             text, "-o", binary)  # fmt: skip
        runtime = Path(__file__).with_name("ascend_runtime.c")
        _run("gcc", "-O2", "-shared", "-fPIC", "-o", library, binary, runtime, "-lm")
        function = getattr(ctypes.CDLL(library), launch.kernel.__name__)
        function.restype = None
        return function


def _arguments(arg: object) -> list[Any]:
    if isinstance(arg, torch.Tensor):
        return _memref(arg)
    return [ctypes.c_int32(arg) if isinstance(arg, int) else ctypes.c_float(arg)]


def _memref(tensor: torch.Tensor | None) -> list[Any]:
    """Return a rank-1 memref as five arguments: allocated, aligned, offset, size, stride."""
    address = ctypes.c_void_p(tensor.data_ptr() if tensor is not None else 0)
    numel = tensor.numel() if tensor is not None else 0
    return [address, address, ctypes.c_int64(0), ctypes.c_int64(numel), ctypes.c_int64(1)]


def _run(*command: object) -> None:
    outcome = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if outcome.returncode:
        raise RuntimeError(f"{command[0]} failed: {outcome.stderr[:2000]}")


def launches() -> Iterator[tuple[str, Launch]]:
    """Yield every kernel for every dtype and norm, as the launcher calls them."""
    from hyper_parallel.kernels import triton as kernels
    from tests.kernels.triton_checks import DTYPES, HEADER_NUMEL, lane_format

    taken: list[Launch] = []
    intercept(taken.append)
    for dtype in DTYPES:
        tensors = [torch.zeros(5, dtype=dtype)]
        launcher = kernels.Launcher(tensors, [0], tensors[0].device)
        for power in (2, 1, 0):
            launcher.partial_norms(tensors, power)
            yield f"partial_norms-p{power}-{_TYPES[dtype][1:]}", taken.pop()
        launcher.scale_(tensors, torch.ones(1))
        yield f"scale-{_TYPES[dtype][1:]}", taken.pop()
    for power in (2, 1, 0):
        form = lane_format(kernels, power, 17)
        table = kernels.LaneTable([(0, 1)], [[HEADER_NUMEL]], tensors[0].device)
        buffer = torch.zeros(HEADER_NUMEL + form.lane_numel)
        launcher.encode(buffer, buffer.clone(), table, form)
        yield f"encode-p{power}", taken.pop()
        launcher.finish(buffer, buffer.clone(), torch.zeros(1, 3), table, 1.0, form)
        yield f"finish-p{power}", taken.pop()


def controls() -> Iterator[tuple[str, Launch]]:
    """Yield what Ascend's compiler must refuse: float64, and a block larger than the buffer."""
    from tests.kernels.ascend_controls import sum_float64_kernel

    wide = torch.zeros(64, dtype=torch.float64)
    yield "float64", Launch(sum_float64_kernel, (wide, wide), (("BLOCK", 64),), 1)
    fits = dict(launches())["partial_norms-p2-fp32"]
    constants = {**dict(fits.constants), "LOG2_BLOCK": 15}
    yield "block-32768", Launch(fits.kernel, fits.args, tuple(constants.items()), 1)


def report(cases: Iterable[tuple[str, Launch]]) -> dict[str, dict[str, str]]:
    """Return, for each case and target, "" if it compiles to HIVM, else why not."""

    def outcome(linalg: str, target: str) -> str:
        hivm, messages = compile_to_hivm(linalg, target)
        if hivm is None:
            return messages[-2000:] or "no HIVM and no message"
        return "" if "func_core_type<AIV>" in hivm else "not for a vector core"

    answers: dict[str, dict[str, str]] = {}
    with ThreadPoolExecutor(2) as pool:
        pending = {}
        for name, launch in cases:
            linalg = lower(launch)
            for target in TARGETS:
                pending[name, target] = pool.submit(outcome, linalg, target)
        for (name, target), future in pending.items():
            answers.setdefault(name, {})[target] = future.result()
    return answers


def missing_tools() -> list[str]:
    """Return what is needed to run lowered kernels on the CPU and is not there."""
    return [str(LLVM / tool) for tool in LLVM_TOOLS if not (LLVM / tool).exists()]


def run_process(*arguments: str, timeout_s: float) -> str:
    """Run this module in a process of its own and return what it prints.

    Raises:
        RuntimeError: If it fails, with what it wrote.
    """
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    outcome = subprocess.run(
        [sys.executable, "-m", "tests.kernels.ascend", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
        timeout=timeout_s,
        check=False,
    )
    if outcome.returncode:
        raise RuntimeError(f"{outcome.stdout[-2000:]}\n{outcome.stderr[-4000:]}")
    return outcome.stdout


def main(arguments: Sequence[str]) -> None:
    what, *_ = arguments
    if what == "launches":
        print(json.dumps(report(launches())))
    elif what == "controls":
        print(json.dumps(report(controls())))
    elif what == "run":
        from tests.kernels import lowered_checks

        with tempfile.TemporaryDirectory() as folder:
            intercept(Processor(Path(folder)).run)
            for name in lowered_checks.run_all():
                print(name)


if __name__ == "__main__":
    main(sys.argv[1:])
