"""What the benchmark asks of whoever clips gradients."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

if TYPE_CHECKING:
    from clip_layouts import Case

__all__ = ["Adapter"]


class Adapter:
    """A way to clip a case's gradients.

    Constructing it is set-up, and not timed. Whatever it or `clip` raises is shown as what that
    method says of the layout.

    Attributes:
        name: In tables.
        package: Of which a version is noted; None if it is this repository or torch.
        modules: What it imports, to be imported once before ranks are forked.
        is_peer: Whether it is somebody else's, to be run on another group if this one fails.
        before_scalar_path: Called by those that can when the partial norms are known.
        scalar_path: When the last clip was back from that call, and when it had the total norm; by
            `time.perf_counter`.
    """

    name: ClassVar[str]
    package: ClassVar[str | None] = None
    modules: ClassVar[tuple[str, ...]] = ()
    is_peer: ClassVar[bool] = True
    scalar_path: tuple[float, float] | None = None

    def __init__(self, case: Case) -> None:
        self.case = case
        self.before_scalar_path: Callable[[], object] = lambda: None

    def clip(self) -> torch.Tensor | float:
        """Clip, and return the total norm: what is timed."""
        raise NotImplementedError

    def clip_and_time_scalar_path(self) -> None:
        """Clip, call `before_scalar_path` on the way and set `scalar_path`, if that can be."""
        self.clip()

    def finish(self) -> None:
        """Do what completes the clip later in the step, such as the optimizer's; not timed."""

    def restore(self) -> None:
        """Put the original gradients back; not timed."""
        self.case.restore()

    @property
    def local_grads(self) -> Sequence[torch.Tensor]:
        """This rank's gradient shards, in the order of the case's."""
        return self.case.local_grads

    @classmethod
    def version(cls) -> str | None:
        """Return the installed version of `package`; None if there is none."""
        if cls.package is None:
            return None
        try:
            return importlib.metadata.version(cls.package)
        except importlib.metadata.PackageNotFoundError:
            return None

    @classmethod
    def is_installed(cls) -> bool:
        """Whether it can be tried here."""
        return cls.package is None or cls.version() is not None
