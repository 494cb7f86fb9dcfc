"""A simulated NPU: device type `npu` and backend `hccl`, on the CPU, for tests without hardware.

It is stricter than the hardware, so that what passes here is right there:

* Device memory faults when the CPU touches it.
* Streams are lazy: work runs as late as the program permits, and a copy to the host arrives only
  when the host synchronises. A missing synchronisation gives a wrong answer every time.
* Only pinned host memory is copied asynchronously.
* `hccl` takes npu tensors only. A CPU tensor raises torch's own error.
* Under `TRITON_INTERPRET=1` Triton kernels run on device memory, by Triton's interpreter.

Every copy, collective and wait is counted, and latencies can be injected. Nothing happens at
import: `install()` compiles the simulator once per machine and registers it with torch.
"""

from __future__ import annotations

from hyper_parallel.testing.simnpu import _registration

__all__ = [
    "MAX_NUM_DEVICES",
    "configure",
    "counters",
    "install",
    "is_installed",
    "reset_counters",
]

MAX_NUM_DEVICES = _registration.MAX_NUM_DEVICES


def install(*, num_devices: int | None = None) -> bool:
    """Make `npu` and `hccl` available in this process, unless real ones are.

    Call it before any other use of `torch.npu`; calling it again does nothing. The first call on a
    machine compiles for about a minute and says so on stderr. Forked processes inherit the
    installation, spawned ones call `install()` themselves.

    Args:
        num_devices: How many are needed, at most MAX_NUM_DEVICES. None: as many as there are, 8 if
            this call installs them.

    Environment:
        HYPER_PARALLEL_SIMNPU_BUILD_DIR: Where compiled simulators are kept, the user's cache folder
            if unset.

    Returns:
        Whether the simulated NPU is in place. False means that it stepped aside: torch_npu is
        installed, or torch has another `npu`.

    Raises:
        ValueError: If there cannot be `num_devices`.
        RuntimeError: If it cannot be compiled, or an earlier call installed fewer devices; the
            message names the remedy.
    """
    return _registration.install(num_devices=num_devices)


def is_installed() -> bool:
    """Return whether `torch.npu` in this process is the simulated one."""
    return _registration.is_installed()


def counters() -> dict[str, int]:
    """Return what this process asked of the device since the last reset.

    Always present:
        h2d, d2h, h2d_bytes, d2h_bytes: Copies. `tensor.item()` is one of 8 bytes.
        h2d_async, d2h_async: Those of them that the host did not wait for.
        collectives, collective_bytes: Barriers and point-to-point operations included.
        host_syncs: Times that the host had to wait for the device: synchronising a stream, event or
            device, blocking and pageable copies, reading a scalar, operators whose result's shape
            depends on data, barriers.
        event_sync, stream_sync, device_sync: Some of these, by reason.
        kernels: Operators run on the device, views not included.
        kernel_launches: Triton kernels run on the device (`TRITON_INTERPRET=1`).
        pinned_allocs: Allocations of pinned memory.
        early_rewrites: Pinned buffers that the host changed after the device had read them but
            before the host had synchronised with the copy. On hardware the device may get either
            bytes, so each is a bug.
        device_bytes, pinned_bytes: Memory in use, and `_peak` since the reset. Not reset.

    Others appear when they first happen, as `collective.allreduce`, `h2d_blocking`, `d2h_pageable`,
    `scalar_sync`.
    """
    return _registration.native().counters()


def reset_counters() -> None:
    """Set every counter to 0; gauges (`device_bytes`, `pinned_bytes`) keep their level."""
    _registration.native().reset_counters()


def configure(
    *,
    copy_us: float = 0.0,
    copy_us_per_mib: float = 0.0,
    collective_us: float = 0.0,
    collective_us_per_mib: float = 0.0,
    trace_ops: bool = False,
    poison: bool = False,
) -> None:
    """Set latencies and debugging aids for this process; what is left out returns to its default.

    Args:
        copy_us: Simulated duration of a copy between host and device.
        copy_us_per_mib: Added for each MiB copied.
        collective_us: Simulated duration of a collective, on top of what gloo really takes.
        collective_us_per_mib: Added for each MiB.
        trace_ops: Count every operator as `op.<name>`.
        poison: Fill fresh device memory with NaN bytes, so that reading memory that nobody wrote
            shows.

    Raises:
        ValueError: If a duration is negative or not finite.
    """
    _registration.configure(
        copy_us=copy_us,
        copy_us_per_mib=copy_us_per_mib,
        collective_us=collective_us,
        collective_us_per_mib=collective_us_per_mib,
        trace_ops=trace_ops,
        poison=poison,
    )
