"""`NormReducer`: the clip of one model over one group, agreed on at set-up."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from .clip_grad import Call, clip
from .clip_request import ClipRequest
from .declarations import NOTHING_DECLARED, Declarations
from .deferred_scaling import Scaling
from .failure import LocalFailure, raise_if_any_failed
from .frozen_reduction import NORM_TYPES, FrozenReduction
from .grad_shards import GradShards, foretell_grad_shards
from .lanes import describe_ranks
from .layout_table import describe_buffer, describe_kernels, format_lanes, lane_uses
from .norm_reducer import extend_layout
from .parameter_list import ParameterList
from .reduction_groups import resolve_group
from .torch_private import not_compiled

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from .clip_grad import Parameters
    from .clip_result import ClipResult
    from .declarations import Groups

__all__ = ["NormReducer"]


class NormReducer:
    """Clips one model over one group, and tells more of it than `clip_grad_norm_` does.

    Unlike the function it always reduces over its group, so that a parameter list from which a
    filter dropped every DTensor on some rank cannot leave the others waiting.

    Args:
        model: If given, the group's ranks agree on its rank sets here, so that the first clip costs
            what every clip costs, and errors name its parameters. If the model lies on the group's
            devices on all ranks, and there are kernels for these, clips of p = 2, 1 or inf that do
            not ask for an error then run without the host: nothing is copied up or down or waited
            for, and norms and coefficient stay on the device. A rank that fails, or whose gradients
            are not as agreed, raises alone. The others cannot be told: their norms are NaN, the
            coefficient is 1 and gradients are as they were. So it is on all ranks that ask for
            different max_norm or norm_type; if some ask for what needs the host, these raise
            ValueError. Failures after the reduce are told to nobody. Not with pp_group, declared
            tensors, reproducible=True or one rank: these take the way of every other
            clip, with its result. `explain()` says which it is.
        group: Ranks to reduce over; the default group if None.
        pp_group: See `clip_grad_norm_`.
        sharded_over: See there; tensors of the model, of which a clip may list some.
        replicated_over: See there.
        reproducible: See there.

    Ranks: all of the group construct it, if `model` is given.

    Raises:
        ValueError: If the group lacks this rank or has no usable backend, or gradients are sharded
            over ranks outside it; and as `clip_grad_norm_` does of groups and declared tensors.
        RuntimeError: If a rank does not come before the group's timeout; names it.
    """

    @not_compiled
    def __init__(
        self,
        model: torch.nn.Module | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        pp_group: dist.ProcessGroup | None = None,
        sharded_over: Groups | None = None,
        replicated_over: Groups | None = None,
        reproducible: bool = False,
    ) -> None:
        self._group = resolve_group(group)
        self._is_default_group = group is None
        self._reproducible = reproducible
        self._declared = NOTHING_DECLARED
        self._frozen: FrozenReduction | None = None
        self._listed = ParameterList(model if model is not None else [])
        # Parameters with the reaches that are foretold for their gradients.
        self._foretold = GradShards([], [], [])
        with LocalFailure() as failure:
            self._declared = Declarations.resolved(pp_group, sharded_over, replicated_over)
            if model is not None:
                self._foretold = self._declared.place(
                    foretell_grad_shards(self._listed), self._listed
                )
        if self._group is not None and model is not None:
            lanes = self._foretold.lane_keys
            is_complete = failure.error is None
            extend_layout(self._group, self._declared.statement(lanes, is_complete=is_complete))
            raise_if_any_failed(self._group, failure.error)
            self._frozen = FrozenReduction.agreed(self._group, self._foretold, self._declared)
        elif failure.error is not None:
            raise failure.error

    @not_compiled
    def clip_(
        self,
        parameters: Parameters,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        skip_nonfinite: bool = False,
    ) -> ClipResult:
        """Clip as `clip_grad_norm_` does; see there for arguments and errors.

        Ranks: all of the group.
        """
        asked = functools.partial(
            ClipRequest.validated,
            max_norm,
            norm_type,
            error_if_nonfinite,
            reproducible=self._reproducible,
            skip_nonfinite=skip_nonfinite,
        )
        scaling = Scaling(foreach is not False, optimizer)
        scaling.forget()
        listing = functools.partial(ParameterList, parameters, self._listed.names)
        call = Call(listing, asked, lambda: self._declared, scaling)
        needs_host = error_if_nonfinite or skip_nonfinite or self._reproducible
        is_plain = foreach is not False and optimizer is None and norm_type in NORM_TYPES
        if self._frozen is not None and is_plain and not needs_host:
            return self._frozen.clip_(listing, norm_type, asked)
        return clip(self._group, call)

    def explain(self) -> str:
        """Return the layout of the model's gradients as a table, as this rank sees it.

        One row for each lane that this rank adds up: its ranks, the model's parameters with their
        bytes on this rank, and why they are there; before it the group, the buffer, the kernels.

        Ranks: none is asked. Before the first clip of a reducer without a model there are no lanes.
        """
        group, stages = self._group, self._declared.stages
        layout = group.layout if group else None
        lines = [self._explain_group()]
        if stages is not None:
            lines.append(f"pp_group: ranks {describe_ranks(stages)}")
        lane_of = layout.lane_of if layout else {}
        uses = lane_uses(self._foretold, layout, stages)
        if group is not None:
            lines.append(f"buffer:   {describe_buffer(group.size, len(lane_of))}")
            if group.device.type != "cpu":
                lines.append(f"copies:   {self._explain_copies()}")
        lines.append(f"kernels:  {describe_kernels()}")
        lines.append(format_lanes(uses, lane_of))
        if others := len(lane_of) - sum(use.rank_set in lane_of for use in uses):
            lines.append(f"and {others} lanes that this rank does not read")
        return "\n".join(lines)

    def _explain_copies(self) -> str:
        if self._frozen is None or self._reproducible:
            return "one up and one down in each clip, and one wait"
        return "none, and no wait, in clips of p = 2, 1 or inf that do not ask for an error"

    def _explain_group(self) -> str:
        if self._group is None:
            return "group:    this rank alone, no collective"
        why = "the default group, since no group= was given" if self._is_default_group else "group="
        ranks = describe_ranks(self._group.ranks)
        return f"group:    ranks {ranks} ({why}), reduced on {self._group.device}"
