"""Layouts of sharded parameters, read from `layouts/*.toml`, and the gradients that they hold."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

__all__ = ["LAYOUT_NAMES", "Case", "Layout", "load_layout"]

_FOLDER = Path(__file__).parent / "layouts"
LAYOUT_NAMES = tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))
_MAX_NUM_SEEDS = 1 << 20  # shards of one parameter that can be told apart


@dataclass(frozen=True)
class MeshSpec:
    """Names and sizes of a mesh's dims; -1 is what the others leave of the ranks."""

    names: tuple[str, ...]
    shape: tuple[int, ...]

    def sizes(self, num_ranks: int) -> tuple[int, ...]:
        """Return the sizes for this many ranks."""
        known = math.prod(size for size in self.shape if size > 0)
        if num_ranks % known or (-1 not in self.shape and num_ranks != known):
            raise ValueError(f"a mesh of {self.names} {self.shape} cannot hold {num_ranks} ranks")
        return tuple(num_ranks // known if size == -1 else size for size in self.shape)


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter: the shape of a rank's shard, and how it is placed; no mesh: a plain tensor."""

    name: str
    shard: tuple[int, ...]
    mesh: str | None
    placements: tuple[Placement, ...]


@dataclass(frozen=True)
class Layout:
    """Meshes, and the parameters on them."""

    name: str
    title: str
    meshes: Mapping[str, MeshSpec]
    parameters: Sequence[ParameterSpec]

    @property
    def numel_per_rank(self) -> int:
        """Elements that a rank holds."""
        return sum(math.prod(parameter.shard) for parameter in self.parameters)

    def num_hops(self, num_ranks: int) -> int:
        """Return K x D: over buckets of like-placed parameters, the mesh dims that shard them."""
        sizes = {name: mesh.sizes(num_ranks) for name, mesh in self.meshes.items()}
        buckets = {(p.mesh, p.placements) for p in self.parameters if p.mesh is not None}
        return sum(
            isinstance(placement, Shard) and size > 1
            for mesh, placements in buckets
            if mesh is not None
            for placement, size in zip(placements, sizes[mesh], strict=True)
        )


def load_layout(name: str, scale: float = 1.0) -> Layout:
    """Return a layout.

    Args:
        name: One of LAYOUT_NAMES.
        scale: What shards are multiplied by in size; each keeps at least one element.
    """
    raw = tomllib.loads((_FOLDER / f"{name}.toml").read_text())
    meshes = {
        key: MeshSpec(tuple(mesh["names"]), tuple(mesh["shape"]))
        for key, mesh in raw["meshes"].items()
    }
    parameters = [spec for entry in raw["parameters"] for spec in _expand(entry, scale)]
    return Layout(name, raw["title"], meshes, parameters)


def _expand(entry: Mapping[str, Any], scale: float) -> Iterator[ParameterSpec]:
    """Yield a parameter for each index that `count` gives to the braces of its name."""
    shard = _scaled(entry["shard"], scale)
    placements = tuple(
        Replicate() if text == "R" else Shard(int(text[1:])) for text in entry.get("placements", ())
    )
    for indices in itertools.product(*map(range, entry.get("count", ()))):
        yield ParameterSpec(
            entry["name"].format(*indices), shard, entry.get("mesh"), tuple(placements)
        )


def _scaled(shape: Sequence[int], scale: float) -> tuple[int, ...]:
    """Return the shape with about `scale` as many elements, taken from the first dims first."""
    scaled = []
    for size in shape:
        smaller = min(size, max(1, round(size * scale)))
        scale = min(1.0, scale * size / smaller)
        scaled.append(smaller)
    return tuple(scaled)


class Case:
    """A layout's parameters on this rank, with gradients that can be put back.

    Args:
        layout: The layout.
        device_type: Of the meshes. Shards are on the host whatever it is, as under FSDP2's CPU
            offload.
        max_norm: To clip to.

    Ranks: all of the default group, which makes the groups of the meshes.
    """

    def __init__(self, layout: Layout, device_type: str, max_norm: float) -> None:
        self.layout = layout
        self.device_type = device_type
        self.max_norm = max_norm
        num_ranks = torch.distributed.get_world_size()
        self.meshes = {
            name: init_device_mesh(device_type, mesh.sizes(num_ranks), mesh_dim_names=mesh.names)
            for name, mesh in layout.meshes.items()
        }
        self.module = torch.nn.Module()
        self.parameters: list[torch.nn.Parameter] = []
        self.local_grads: list[torch.Tensor] = []
        self._dtensor_specs: dict[str, Any] = {}
        for index, spec in enumerate(layout.parameters):
            grad = self._draw(index, spec)
            self.local_grads.append(grad)
            parameter = torch.nn.Parameter(self._place(torch.zeros_like(grad), spec))
            self.parameters.append(parameter)
            self.module.register_parameter(spec.name.replace(".", "_"), parameter)
        self._originals = [grad.clone() for grad in self.local_grads]
        self.restore()

    def restore(self) -> None:
        """Give every gradient the values that it was made with."""
        for grad, original in zip(self.local_grads, self._originals, strict=True):
            grad.copy_(original)
        # New DTensors, as FSDP2 makes them each step; someone who was given the module may also
        # have replaced the old ones.
        rows = zip(self.parameters, self.local_grads, self.layout.parameters, strict=True)
        for parameter, grad, spec in rows:
            parameter.grad = self._place(grad, spec)

    @property
    def counted(self) -> list[bool]:
        """Of each parameter, whether this rank's shard is the one of all its copies that counts."""
        rank = torch.distributed.get_rank()
        return [
            rank == 0
            if spec.mesh is None
            else all(
                isinstance(placement, Shard) or coordinate == 0
                for placement, coordinate in self._coordinates(spec)
            )
            for spec in self.layout.parameters
        ]

    def has_mesh_dim(self, name: str) -> bool:
        """Whether some mesh has a dim of this name."""
        return any(name in mesh.names for mesh in self.layout.meshes.values())

    def _coordinates(self, spec: ParameterSpec) -> list[tuple[Placement, int]]:
        coordinates = self._mesh_of(spec).get_coordinate() or ()
        return list(zip(spec.placements, coordinates, strict=True))

    def _mesh_of(self, spec: ParameterSpec) -> DeviceMesh:
        return self.meshes[spec.mesh or ""]

    def _draw(self, index: int, spec: ParameterSpec) -> torch.Tensor:
        """Return N(0, 1), the same on ranks that hold copies, other numbers on others."""
        seed = 0
        if spec.mesh is not None:
            mesh = self._mesh_of(spec)
            for dim, (placement, coordinate) in enumerate(self._coordinates(spec)):
                own = coordinate if isinstance(placement, Shard) else 0
                seed = seed * mesh.size(dim) + own
        generator = torch.Generator().manual_seed(index * _MAX_NUM_SEEDS + seed)
        return torch.randn(spec.shard, generator=generator)

    def _place(self, local: torch.Tensor, spec: ParameterSpec) -> torch.Tensor:
        """Return a DTensor whose shard is `local` itself, on the host; only FSDP2 makes such."""
        if spec.mesh is None:
            return local
        if spec.name not in self._dtensor_specs:
            described = DTensor.from_local(
                local.to("meta"), self._mesh_of(spec), list(spec.placements), run_check=False
            )
            self._dtensor_specs[spec.name] = described._spec  # noqa: SLF001
        make: Any = DTensor
        placed: torch.Tensor = make(local, self._dtensor_specs[spec.name], requires_grad=False)
        return placed
