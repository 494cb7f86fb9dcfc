"""The YAML file: one frozen dataclass per section, every mistake found before a rank starts."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

__all__ = [
    "AcceleratorConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "FsdpConfig",
    "ModelConfig",
    "TrainingConfig",
    "load_config",
    "parse_config",
]

DEVICE_OF_BACKEND = {
    "hccl": "npu",
    "cpu:gloo,npu:hccl": "npu",
    "nccl": "cuda",
    "cpu:gloo,cuda:nccl": "cuda",
    "gloo": "cpu",
}


class ConfigError(ValueError):
    """The configuration cannot be run; the message has one line per offending key."""

    def __init__(self, problems: list[str], *, source: str = "configuration") -> None:
        lines = (f"  {line}" for line in problems)
        super().__init__("\n".join([f"{source} cannot be run:", *lines]))
        self.problems = problems


_MAX_COUNT = 2**31 - 1  # of anything; no machine gets there
_MAX_SEED = 2**64 - 1  # torch.manual_seed's


def _at_least(minimum: int, *, default: int, at_most: int = _MAX_COUNT) -> Any:
    return field(default=default, metadata={"at_least": minimum, "at_most": at_most})


def _above_zero(*, default: float) -> Any:
    return field(default=default, metadata={"above": 0.0})


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the transformer; every layer holds attention, a dense MLP and routed experts."""

    dim: int = _at_least(1, default=64)
    num_layers: int = _at_least(1, default=2)
    num_heads: int = _at_least(1, default=4)
    mlp_dim: int = _at_least(1, default=128)
    num_experts: int = _at_least(1, default=8)
    expert_dim: int = _at_least(1, default=64)
    top_k: int = _at_least(1, default=2)


@dataclass(frozen=True)
class TrainingConfig:
    """The loop; ``batch_size`` counts sequences per rank that has data of its own.

    ``norm_before_offload`` takes the gradients' norms on the device, where they are offloaded from
    one that can; ``clip_in_optimizer`` leaves the scaling to the optimizer's step.
    """

    steps: int = _at_least(1, default=20)
    lr: float = _above_zero(default=3e-3)
    max_grad_norm: float = _above_zero(default=1.0)
    backend: str = field(default="hccl", metadata={"choices": tuple(DEVICE_OF_BACKEND)})
    seed: int = _at_least(0, default=0, at_most=_MAX_SEED)
    batch_size: int = _at_least(1, default=4)
    seq_len: int = _at_least(2, default=64)
    norm_before_offload: bool = True
    clip_in_optimizer: bool = True


@dataclass(frozen=True)
class AcceleratorConfig:
    """How many ranks share a layer (``tp_size``) and how many share the experts (``ep_size``)."""

    tp_size: int = _at_least(1, default=1)
    ep_size: int = _at_least(1, default=1)


@dataclass(frozen=True)
class FsdpConfig:
    """How many ranks with their own data shard the parameters, and where the shards live."""

    dp_shard_size: int = _at_least(1, default=1)
    enable_offload: bool = False


@dataclass(frozen=True)
class DataConfig:
    """Text to learn: a file, a folder of text files, or nothing for Python's own sources."""

    path: str | None = None
    max_bytes: int = _at_least(1, default=4 * 2**20)


@dataclass(frozen=True)
class Config:
    """A whole YAML file."""

    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    accelerator: AcceleratorConfig = field(default_factory=AcceleratorConfig)
    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)
    data: DataConfig = field(default_factory=DataConfig)

    @property
    def num_ranks(self) -> int:
        """Ranks in all: every rank shards data or shares a layer with one that does."""
        return self.fsdp_config.dp_shard_size * self.accelerator.tp_size

    @property
    def device_type(self) -> str:
        """The device that ``training.backend`` reduces on, and hence the one to train on."""
        return DEVICE_OF_BACKEND[self.training.backend]


def load_config(path: str | Path) -> Config:
    """Read a YAML file.

    Raises:
        ConfigError: The file cannot be read, or some keys are unknown, of the wrong type, out of
            range or contradict each other; all of them are named.
    """
    try:
        from hyper_parallel.trainer.yaml_file import YamlFileError, read_yaml
    except ModuleNotFoundError as error:
        if error.name != "yaml":
            raise
        remedy = "PyYAML is not installed: pip install 'hyper-parallel[trainer]'"
        raise ConfigError([remedy], source=str(path)) from error
    try:
        document = read_yaml(path)
    except YamlFileError as error:
        raise ConfigError([str(error)], source=str(path)) from error
    return parse_config(document, source=str(path))


def parse_config(document: object, *, source: str = "configuration") -> Config:
    """Turn a parsed YAML document into a Config; see load_config."""
    problems: dict[str, str] = {}
    sections: dict[str, Any] = {}
    hints = get_type_hints(Config)
    for name, content in _mapping(document, "", problems).items():
        if name not in hints:
            problems[name] = _unknown(name, hints)
            continue
        sections[name] = _parse_section(hints[name], name, content, problems)
    config = Config(**sections)
    lines = [f"{key}: {text}" for key, text in problems.items()]
    # A key already refused holds its default here, which says nothing about what was meant.
    lines += [
        f"{' / '.join(found.keys)}: {found.text}"
        for found in _contradictions(config)
        if not _concern(found.keys, problems)
    ]
    if lines:
        raise ConfigError(lines, source=source)
    return config


def _mapping(content: object, key: str, problems: dict[str, str]) -> Mapping[str, object]:
    """Return the content of a section; an empty one is {}."""
    if content is None:
        return {}
    if isinstance(content, Mapping):
        return {str(name): value for name, value in content.items()}
    problems[key or "(top level)"] = f"expected keys with values, found {content!r}"
    return {}


def _parse_section(section: Any, name: str, content: object, problems: dict[str, str]) -> Any:
    """Build one section's dataclass; offending keys are recorded and keep their default."""
    hints = get_type_hints(section)
    fields = {item.name: item for item in dataclasses.fields(section)}
    values = {}
    for key, value in _mapping(content, name, problems).items():
        if key not in fields:
            problems[f"{name}.{key}"] = _unknown(key, hints)
            continue
        try:
            values[key] = _checked(_converted(value, hints[key]), fields[key].metadata)
        except ValueError as error:
            problems[f"{name}.{key}"] = str(error)
    return section(**values)


def _concern(keys: Iterable[str], refused: Mapping[str, str]) -> bool:
    """Whether a key, or the section that it is in, was refused already."""
    return any(key in refused or key.split(".")[0] in refused for key in keys)


def _unknown(key: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}"
    return f"unknown key; {hint}"


def _converted(value: object, kind: Any) -> object:
    """Return the value as `kind`; no guessing, except that YAML reads 1e-3 as a string."""
    if kind is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return float(value)
        except (ValueError, OverflowError):
            pass
    elif kind is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    elif isinstance(value, kind):
        return value
    names = {int: "a whole number", float: "a number", bool: "true or false"}
    raise ValueError(f"expected {names.get(kind, 'text')}, found {value!r}")


def _checked(value: object, limits: Mapping[str, Any]) -> object:
    """Return the value if it is inside its field's limits."""
    if isinstance(value, int | float):
        if "at_least" in limits and value < limits["at_least"]:
            raise ValueError(f"expected at least {limits['at_least']}, found {value}")
        if "at_most" in limits and value > limits["at_most"]:
            raise ValueError(f"expected at most {limits['at_most']}, found {value}")
        if "above" in limits and not value > limits["above"]:  # also refuses NaN
            raise ValueError(f"expected more than {limits['above']:g}, found {value}")
    if "choices" in limits and value not in limits["choices"]:
        raise ValueError(f"expected one of {list(limits['choices'])}, found {value!r}")
    return value


class _Contradiction(NamedTuple):
    keys: tuple[str, ...]
    text: str


def _contradictions(config: Config) -> Iterator[_Contradiction]:
    """Find keys that are fine alone but not together."""
    model, training, fsdp = config.model, config.training, config.fsdp_config
    tp_size, ep_size = config.accelerator.tp_size, config.accelerator.ep_size
    tp, ep = "accelerator.tp_size", "accelerator.ep_size"
    num_tokens = training.batch_size * training.seq_len
    keys: tuple[str, ...]
    divisions = [
        (("model.num_heads", "model.dim"), model.num_heads, model.dim),
        ((tp, "model.num_heads"), tp_size, model.num_heads),
        ((tp, "model.mlp_dim"), tp_size, model.mlp_dim),
        ((ep, "model.num_experts"), ep_size, model.num_experts),
    ]
    for keys, divisor, number in divisions:
        if number % divisor:
            yield _Contradiction(keys, f"{divisor} does not divide {number}")
    if config.num_ranks % ep_size:
        ranks = f"{config.num_ranks} ranks ({fsdp.dp_shard_size} x {tp_size})"
        keys = (ep, "fsdp_config.dp_shard_size", tp)
        yield _Contradiction(keys, f"{ep_size} does not divide {ranks}")
    if num_tokens % tp_size:
        keys = (tp, "training.batch_size", "training.seq_len")
        yield _Contradiction(keys, f"{tp_size} does not divide a rank's {num_tokens} tokens")
    if model.top_k > model.num_experts:
        keys = ("model.top_k", "model.num_experts")
        yield _Contradiction(keys, f"cannot choose {model.top_k} of {model.num_experts} experts")
    if math.isinf(training.lr):
        yield _Contradiction(("training.lr",), "expected a finite number, found inf")
    if fsdp.enable_offload and config.device_type == "cpu":
        keys = ("fsdp_config.enable_offload", "training.backend")
        yield _Contradiction(keys, "gloo trains on the CPU, where there is nothing to offload from")
    # os.path, for which '' is no path and an unreachable one no exception.
    if config.data.path is not None and not os.path.exists(config.data.path):
        yield _Contradiction(("data.path",), f"no file or folder {config.data.path!r}")
