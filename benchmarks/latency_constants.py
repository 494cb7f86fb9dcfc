"""Reads `latency_constants.toml`: durations and bandwidths that cannot be measured here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib

__all__ = ["LEVELS", "Constant", "Machine", "injected_latencies", "load_machines"]

LEVELS = ("low", "typical", "high")

_FILE = Path(__file__).parent / "latency_constants.toml"


@dataclass(frozen=True)
class Constant:
    """One constant with its bounds.

    Attributes:
        values: By level. For a duration high is slow, for a bandwidth high is fast.
        unit: Of the values.
        source: Where they are from, or that they are assumed.
        confidence: high, medium or low.
    """

    values: Mapping[str, float]
    unit: str
    source: str
    confidence: str


@dataclass(frozen=True)
class Machine:
    """What the model needs to know of a kind of machine."""

    key: str
    title: str
    ranks_per_server: int
    ranks_per_supernode: int | None
    constants: Mapping[str, Constant]

    def at(self, name: str, level: str) -> float:
        """Return a constant's value: for a `high` cost durations are high and bandwidths low."""
        constant = self.constants[name]
        if constant.unit.endswith("/s"):
            level = {"low": "high", "high": "low"}.get(level, level)
        return constant.values[level]


def load_machines() -> dict[str, Machine]:
    """Return the machines by their key."""
    raw = _read()
    shared = {name: _constant(entry) for name, entry in raw["shared"].items()}
    return {
        key: Machine(
            key,
            entry["title"],
            entry["ranks_per_server"],
            entry.get("ranks_per_supernode"),
            {
                **shared,
                **{name: _constant(one) for name, one in entry.items() if isinstance(one, dict)},
            },
        )
        for key, entry in raw["machines"].items()
    }


def injected_latencies() -> dict[str, float]:
    """Return what the simulated NPU is configured with: arguments of `simnpu.configure`.

    The simulator has one duration for all copies: the mean of the machine's typical copies up
    (pageable, as the peers' are) and down.
    """
    machine = load_machines()[_read()["injected"]["machine"]]
    up, down = (machine.at(name, "typical") for name in ("h2d_pageable", "d2h_and_sync"))
    collective = machine.at("dispatch", "typical") + machine.at("allreduce_server", "typical")
    return {"copy_us": (up + down) / 2, "collective_us": collective}


def _constant(entry: Mapping[str, Any]) -> Constant:
    values = dict(zip(LEVELS, entry["values"], strict=True))
    return Constant(values, entry["unit"], entry["source"], entry["confidence"])


def _read() -> dict[str, Any]:
    return tomllib.loads(_FILE.read_text())
