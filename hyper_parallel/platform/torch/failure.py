"""Failures that all ranks of a group raise together, each naming the ranks at fault.

What fails on one rank before the reduce is caught there and announced in the header. After the
reduce all ranks know, give an account of themselves in one gather, and raise the same error. Where
a collective itself fails, each rank raises what it knows, and what others tell on the store.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist

from .lanes import describe_ranks
from .meeting import AgreementError, RanksMissingError, report_failure

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    import torch

    from .clip_result import NonfiniteGradient
    from .reduction_groups import ReductionGroup

__all__ = [
    "LocalFailure",
    "collectives_of",
    "join_some",
    "raise_frozen_elsewhere",
    "raise_if_any_failed",
    "raise_if_any_overflows",
    "raise_mismatch",
    "raise_nonfinite",
    "raise_together",
]

_TYPES: dict[str, type[Exception]] = {
    "ValueError": ValueError,
    "TypeError": TypeError,
    "RuntimeError": RuntimeError,
}
_MOST_PARTS = 8
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


@contextlib.contextmanager
def collectives_of(group: ReductionGroup) -> Iterator[None]:
    """Guard collectives: one that fails makes the group's ranks meet and agree anew.

    Raises:
        AgreementError: As it comes: all ranks decided it alike.
        RuntimeError: For whatever else fails, with the ranks at fault as far as they can be told.
    """
    try:
        yield
    except AgreementError:
        raise
    except Exception as error:
        cause = _summary(error) or ""
        # A copy may still be under way in the buffer, hence a new one.
        group.layout = group.staging = None
        parts = [str(error)]
        if not isinstance(error, RanksMissingError):
            parts += report_failure(group, cause)
            parts.append("a group may be of no use after that: make it anew, or restart the ranks")
        raise RuntimeError(
            f"rank {group.rank}: the reduction of the gradient norm failed; no gradient was "
            f"changed on this rank: {'; '.join(parts)}"
        ) from error


def join_some(parts: list[str]) -> str:
    """Join the first few parts of a message and say how many more there are."""
    more = len(parts) - _MOST_PARTS
    return "; ".join(parts[:_MOST_PARTS]) + (f"; and {more} more" if more > 0 else "")


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
    text = join_some([f"rank {rank}: {account}" for rank, account in accounts])
    raise _kind_of(accounts)(
        f"gradient clipping failed; no gradient was changed on any rank. {text}"
    ) from error


def raise_if_any_failed(group: ReductionGroup, error: Exception | None) -> None:
    """Raise one error on all ranks if any failed while it was set up.

    Args:
        group: Whose ranks all call, whether or not they failed.
        error: This rank's, if it did.
    """
    accounts = _accounts(group, _summary(error))
    if accounts:
        text = join_some([f"rank {rank}: {account}" for rank, account in accounts])
        raise _kind_of(accounts)(f"gradient clipping could not be set up. {text}") from error


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
    wishes = join_some([f"rank(s) {describe_ranks(by_wish[wish])}: {wish}" for wish in by_wish])
    raise ValueError(
        "all ranks of the group must ask for the same clip; no gradient was changed on any rank. "
        + wishes
    ) from error


def raise_frozen_elsewhere(group: ReductionGroup, asked: str, error: Exception | None) -> NoReturn:
    """Raise on every rank whose host takes part: some rank's does not, and joins no gather.

    Args:
        group: Of whose ranks none is asked.
        asked: What this rank was asked for, in words.
        error: What failed on this rank, if anything.
    """
    why = f"; here {_summary(error)}" if error is not None else ""
    raise ValueError(
        f"rank {group.rank}: all ranks of the group must ask for the same clip; no gradient was "
        f"changed on any rank. This rank: {asked}, through the host{why}. Other ranks: a clip that "
        "NormReducer(model) runs without the host, whose norm is NaN now. Pass norm_type, "
        "error_if_nonfinite, foreach, optimizer and skip_nonfinite to clip_, and reproducible to "
        "NormReducer, alike on all ranks"
    ) from error


def raise_nonfinite(
    group: ReductionGroup | None, norm_type: float, offenders: tuple[NonfiniteGradient, ...]
) -> NoReturn:
    """Raise RuntimeError on all ranks, naming the ranks and parameters that are not finite."""
    names = join_some([f"{o.name} ({_kind(o)})" for o in offenders])
    if group is None:
        text = f"rank {dist.get_rank()}: {names}" if names and dist.is_initialized() else names
    else:
        accounts = _accounts(group, names[:_LONGEST_MESSAGE] or None)
        text = join_some([f"rank {rank}: {account}" for rank, account in accounts])
    text = text or "every addend of a Partial gradient is finite, its sum is not"
    raise RuntimeError(
        f"the total norm of order {norm_type} of the gradients is non-finite, so they cannot be "
        f"clipped; no gradient was changed on any rank. {text}. Set error_if_nonfinite=False to "
        "scale by it anyway"
    )


def _summary(error: Exception | None) -> str | None:
    if error is None:
        return None
    try:
        text = str(error)
    except Exception:  # of the user's own class; the other ranks wait for this account
        text = "(its message cannot be printed)"
    return f"{type(error).__name__}: {text}"[:_LONGEST_MESSAGE]


def _kind_of(accounts: list[tuple[int, Any]]) -> type[Exception]:
    """Return the type of the first rank's error, as far as users may expect it."""
    return _TYPES.get(accounts[0][1].split(":", 1)[0], RuntimeError)


def _kind(offender: NonfiniteGradient) -> str:
    if offender.num_nan or offender.num_inf:
        return f"{offender.num_nan} NaN, {offender.num_inf} inf"
    return "finite, but the sum of its elements' powers leaves float64's range"


def raise_if_any_overflows(
    group: ReductionGroup | None, total_norm: torch.Tensor, norm_type: float
) -> None:
    """Raise RuntimeError on all ranks if the norm of finite gradients is infinite on any of them.

    Ranks may read different lanes, and have unsharded gradients of their own.

    Args:
        group: Whose ranks all call, since the header told them to.
        total_norm: This rank's.
        norm_type: As it was asked for.
    """
    account = f"the norm is beyond {total_norm.dtype}" if total_norm.isinf() else None
    accounts = _accounts(group, account) if group else [(0, account)] if account else []
    if accounts:
        raise RuntimeError(
            f"the total norm of order {norm_type} of finite gradients is infinite, so they cannot "
            "be clipped; no gradient was changed on any rank. "
            + join_some([f"rank {rank}: {text}" for rank, text in accounts])
            + ". Set error_if_nonfinite=False to scale by it anyway"
        )


def _accounts(group: ReductionGroup, account: Any) -> list[tuple[int, Any]]:
    """Return (global rank, account) of every rank that has one."""
    with collectives_of(group):
        rows = group.gather_json(account)
    return [(r, row) for r, row in zip(group.ranks, rows, strict=True) if row is not None]
