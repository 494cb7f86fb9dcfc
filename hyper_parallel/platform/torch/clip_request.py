"""What a clip was asked to do, checked; all ranks of a group must ask alike."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hyper_parallel.kernels.host import EXACT_DTYPES

from .wire_format import fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

__all__ = ["NOTHING_ASKED", "ClipRequest"]


@dataclass(frozen=True)
class ClipRequest:
    """The arguments that decide what the ranks of a group compute together.

    Attributes:
        max_norm: 0 or more; inf to measure only.
        norm_type: Any p >= 0, inf or -inf.
        error_if_nonfinite: Whether to raise if the norm is NaN or infinite.
        reproducible: Whether sums are exact, so that no sharding changes a bit of the norm.
        skip_nonfinite: Whether the optimizer's next step does nothing if the norm is not finite.
    """

    max_norm: float
    norm_type: float
    error_if_nonfinite: bool
    reproducible: bool = False
    skip_nonfinite: bool = False

    @classmethod
    def validated(
        cls,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,  # noqa: FBT001, FBT002 - the order of torch's arguments
        *,
        reproducible: bool = False,
        skip_nonfinite: bool = False,
    ) -> ClipRequest:
        """Check what the user passed.

        Raises:
            ValueError: With the offending value and the remedy.
        """
        max_norm, norm_type = float(max_norm), float(norm_type)
        if not max_norm >= 0:
            raise ValueError(
                f"expected max_norm >= 0, got {max_norm}, which would turn the signs of the "
                "gradients or lose them; pass math.inf to measure only"
            )
        if not (norm_type >= 0 or norm_type == -math.inf):
            raise ValueError(f"expected norm_type >= 0, inf or -inf, got {norm_type}")
        if reproducible and norm_type != 2.0:
            raise ValueError(
                f"expected norm_type 2 with reproducible=True, got {norm_type}: only squares are "
                "summed exactly; pass reproducible=False"
            )
        if skip_nonfinite and error_if_nonfinite:
            raise ValueError("expected one of skip_nonfinite and error_if_nonfinite, got both")
        # + 0.0 turns -0.0 into 0.0, which the stamp would tell apart.
        flags = map(bool, (error_if_nonfinite, reproducible, skip_nonfinite))
        return cls(max_norm + 0.0, norm_type + 0.0, *flags)

    def validate_dtypes(self, dtypes: Iterable[torch.dtype]) -> None:
        """Check that gradients of these dtypes can be measured as asked.

        Raises:
            ValueError: If squares of one have no place on the grid of exact sums.
        """
        if not self.reproducible:
            return
        unfit = sorted({str(dtype) for dtype in dtypes if dtype not in EXACT_DTYPES})
        if unfit:
            raise ValueError(
                "expected float32, bfloat16 and float16 gradients with reproducible=True, got "
                f"{', '.join(unfit)}; pass reproducible=False"
            )

    @property
    def changes_gradients(self) -> bool:
        """Whether gradients are scaled, and not only measured."""
        return self.max_norm < math.inf

    @property
    def stamp(self) -> int:
        """60 bits that differ between ranks that ask for different clips."""
        flags = (self.error_if_nonfinite, self.reproducible, self.skip_nonfinite)
        return fingerprint(self.max_norm, self.norm_type, *map(float, flags))

    @property
    def frozen_stamp(self) -> int:
        """The like of a clip that the host does not wait for; never `stamp`, whatever is asked."""
        return fingerprint(self.max_norm, self.norm_type)


NOTHING_ASKED = ClipRequest(math.inf, 2.0, error_if_nonfinite=False)
"""Stands in on a rank that failed before it knew what it was asked for."""
