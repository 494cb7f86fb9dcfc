"""``make demo``: train with offload, repeat the start without, and report what was measured."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from hyper_parallel.platform.torch.clip_result import Copies
from hyper_parallel.trainer.command_line import run_command
from hyper_parallel.trainer.config import Config, ConfigError, load_config
from hyper_parallel.trainer.data import load_corpus
from hyper_parallel.trainer.launch import launch, say, started_by_torchrun
from hyper_parallel.trainer.train import HostBytes, StepRecord, Trainer, train

__all__ = ["OffloadedRun", "Report", "build_report", "find_difference", "main"]

_COMPARED_STEPS = 5


@dataclass(frozen=True)
class OffloadedRun:
    """What one rank measured with offload."""

    records: list[StepRecord]
    torch_clip_error: str | None  # None: torch's own clip worked


@dataclass
class Report:
    """The JSON line, and why the run is not what the demo promises, if it is not."""

    values: dict[str, object]
    problems: list[str] = field(default_factory=list)


def build_report(offloaded: list[OffloadedRun], resident: list[list[StepRecord]]) -> Report:
    """Sum up what all ranks measured; nothing in the report comes from elsewhere.

    Args:
        offloaded: By rank.
        resident: By rank, the first steps again without offload.
    """
    runs = [run.records for run in offloaded]
    records = runs[0]
    problems = []
    clip: dict[str, object] = {}
    for name in (item.name for item in dataclasses.fields(Copies)):
        counts = sorted({getattr(record.clip_cost, name) for run in runs for record in run})
        clip[name] = counts[0] if len(counts) == 1 else counts
        if len(counts) > 1:
            problems.append(f"ranks or steps disagree on what a clip costs: {name} {counts}")
    # Ranks hold shards of different sizes: the most of any rank and step.
    for name in (item.name for item in dataclasses.fields(HostBytes)):
        clip[name] = max(getattr(record.clip_bytes, name) for run in runs for record in run)
    for step in zip(*runs, strict=True):
        if len({(record.loss, record.grad_norm) for record in step}) > 1:
            problems.append(f"ranks disagree on loss or norm in step {step[0].step}")
    if not records[-1].loss < records[0].loss:
        problems.append(f"the loss did not fall: {records[0].loss} -> {records[-1].loss}")
    difference = find_difference(runs, resident)
    if difference is not None:
        problems.append(f"offload is not the same as resident: {difference}")
    errors = list(dict.fromkeys(run.torch_clip_error for run in offloaded))
    values = {
        "ranks": len(offloaded),
        "steps": len(records),
        "loss_first": records[0].loss,
        "loss_last": records[-1].loss,
        "clip": clip,
        "offload_equals_resident": difference is None,
        "torch_clip_error": errors[0] if len(errors) == 1 else errors,
    }
    return Report(values, problems)


def find_difference(
    offloaded: list[list[StepRecord]], resident: list[list[StepRecord]]
) -> str | None:
    """Compare the resident run, on every rank, with the start of the offloaded one, bit by bit.

    Returns:
        None if losses and norms are equal and every step was really clipped; else the first
        thing that is not so.
    """
    if len(offloaded) != len(resident) or not all(resident):
        return f"{len(offloaded)} and {len(resident)} ranks, or no steps to compare"
    for rank, (host_run, device_run) in enumerate(zip(offloaded, resident, strict=True)):
        if len(host_run) < len(device_run):
            return f"rank {rank} has {len(host_run)} offloaded, {len(device_run)} resident steps"
        for host, device in zip(host_run, device_run, strict=False):
            where = f"rank {rank} step {host.step}"
            # Exact: the floats are the float32 values themselves. NaN is never equal.
            if (host.step, host.loss, host.grad_norm) != (
                device.step,
                device.loss,
                device.grad_norm,
            ):
                return (
                    f"{where}: loss {host.loss!r} and {device.loss!r}, "
                    f"norm {host.grad_norm!r} and {device.grad_norm!r}"
                )
            if not (host.clip_coef < 1 and device.clip_coef < 1):
                return f"{where}: not clipped, coefficient {host.clip_coef}; lower max_grad_norm"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m hyper_parallel.trainer.demo")
    parser.add_argument("config", help="YAML file with fsdp_config.enable_offload: true")
    path = parser.parse_args(arguments).config
    return run_command(lambda: _run(path))


def _run(path: str) -> int:
    started = time.perf_counter()
    config = load_config(path)
    if not config.fsdp_config.enable_offload:
        needed = "fsdp_config.enable_offload: the demo compares true with false, set it to true"
        raise ConfigError([needed], source=path)
    if started_by_torchrun():
        raise ConfigError(["torchrun: the demo starts its ranks itself"], source=path)
    load_corpus(config.data, seq_len=config.training.seq_len)
    say(f"== {config.training.steps} steps with CPU offload")
    offloaded = launch(_train_offloaded, config)
    again = _first_steps_resident(config)
    say(f"== the first {again.training.steps} steps again, without offload")
    resident = launch(train, again)
    report = build_report(offloaded, resident)
    say(f"== done in {time.perf_counter() - started:.0f} s")
    for problem in report.problems:
        print(f"error: {problem}", file=sys.stderr, flush=True)
    say(json.dumps(report.values))
    return 1 if report.problems else 0


def _first_steps_resident(config: Config) -> Config:
    steps = min(_COMPARED_STEPS, config.training.steps)
    return dataclasses.replace(
        config,
        training=dataclasses.replace(config.training, steps=steps),
        fsdp_config=dataclasses.replace(config.fsdp_config, enable_offload=False),
    )


def _train_offloaded(config: Config) -> OffloadedRun:
    """Train on this rank, then see what torch's own clip makes of the same model."""
    trainer = Trainer(config)
    records = trainer.train()
    trainer.forward_backward(config.training.steps + 1)
    whole = _torch_clip_error(trainer.model.parameters(), config.training.max_grad_norm)
    say(f"torch's clip on this model: {whole or 'worked'}")
    # With experts on a mesh of their own torch stumbles over the two meshes first. Given one
    # mesh's parameters at a time, as trainers with expert parallelism do, it gets to the reduce.
    meshes = (group["params"] for group in trainer.optimizer.param_groups)
    tries = (_torch_clip_error(mesh, config.training.max_grad_norm) for mesh in meshes)
    error = next((error for error in tries if error is not None), None)
    say(f"torch's clip on this model, mesh by mesh: {error or 'worked'}")
    return OffloadedRun(records, error)


def _torch_clip_error(parameters: Iterable[nn.Parameter], max_norm: float) -> str | None:
    try:
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


if __name__ == "__main__":
    sys.exit(main())
