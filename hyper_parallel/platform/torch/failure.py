"""Failures that all ranks of a group raise together, each naming the ranks at fault.

What fails on one rank before the reduce is caught there and announced in the header. After the
reduce all ranks know, give an account of themselves in one gather, and raise the same error.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist

from .lanes import describe_ranks

if TYPE_CHECKING:
    from types import TracebackType

    from .clip_result import NonfiniteGradient
    from .exchange import ReductionGroup

__all__ = ["LocalFailure", "raise_mismatch", "raise_nonfinite", "raise_together"]

_TYPES: dict[str, type[Exception]] = {
    "ValueError": ValueError,
    "TypeError": TypeError,
    "RuntimeError": RuntimeError,
}
_MOST_RANKS = 8
_MOST_NAMES = 8
_LONGEST_MESSAGE = 2000


class LocalFailure(contextlib.AbstractContextManager["LocalFailure"]):
    """Catch what fails inside the block and keep it for the ranks to raise together.

    Attributes:
        error: The exception, or None.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if isinstance(exc, Exception):
            self.error = exc
            return True
        return False


def raise_together(group: ReductionGroup | None, error: Exception | None) -> NoReturn:
    """Raise one error on all ranks that names the ranks that failed and how.

    Args:
        group: Whose ranks all call, since the header told them to; None for a clip without one,
            which raises its own error as it is.
        error: This rank's, if it is one of those.
    """
    if group is None:
        assert error is not None  # noqa: S101
        raise error
    accounts = _accounts(group, _summary(error))
    text = _join([f"rank {rank}: {account}" for rank, account in accounts])
    kind = accounts[0][1].split(":", 1)[0]
    raise _TYPES.get(kind, RuntimeError)(
        f"gradient clipping failed; no gradient was changed on any rank. {text}"
    ) from error


def raise_mismatch(group: ReductionGroup, asked: str, error: Exception | None) -> NoReturn:
    """Raise one error on all ranks: they were not asked for the same clip.

    Args:
        group: Whose ranks all call.
        asked: What this rank was asked for, in words.
        error: Why this rank could not make out what it was asked for, if so.
    """
    by_wish: dict[str, list[int]] = {}
    for rank, wish in _accounts(group, _summary(error) or asked):
        by_wish.setdefault(wish, []).append(rank)
    wishes = _join([f"rank(s) {describe_ranks(by_wish[wish])}: {wish}" for wish in by_wish])
    raise ValueError(
        "all ranks of the group must ask for the same clip; no gradient was changed on any rank. "
        + wishes
    ) from error


def raise_nonfinite(
    group: ReductionGroup | None, norm_type: float, offenders: tuple[NonfiniteGradient, ...]
) -> NoReturn:
    """Raise RuntimeError on all ranks, naming the ranks and parameters that are not finite."""
    names = _join(
        [f"{o.name} ({o.num_nan} NaN, {o.num_inf} inf)" for o in offenders[:_MOST_NAMES]],
        num_more=len(offenders) - _MOST_NAMES,
    )
    if group is None:
        text = f"rank {dist.get_rank()}: {names}" if dist.is_initialized() else names
    else:
        accounts = _accounts(group, names[:_LONGEST_MESSAGE] or None)
        text = _join([f"rank {rank}: {account}" for rank, account in accounts])
    raise RuntimeError(
        f"the total norm of order {norm_type} of the gradients is non-finite, so they cannot be "
        f"clipped; no gradient was changed on any rank. {text}. Set error_if_nonfinite=False to "
        "scale by it anyway"
    )


def _summary(error: Exception | None) -> str | None:
    return f"{type(error).__name__}: {error}"[:_LONGEST_MESSAGE] if error else None


def _accounts(group: ReductionGroup, account: Any) -> list[tuple[int, Any]]:
    """Return (global rank, account) of every rank that has one."""
    rows = group.gather_json(account)
    return [(r, row) for r, row in zip(group.ranks, rows, strict=True) if row is not None]


def _join(parts: list[str], *, num_more: int = 0) -> str:
    num_more = max(num_more, 0) + len(parts[_MOST_RANKS:])
    return "; ".join(parts[:_MOST_RANKS]) + (f"; and {num_more} more" if num_more else "")
