"""Expert parallelism: rows travel to the rank that holds their expert, and back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from hyper_parallel.trainer.model import Dispatch, Experts

__all__ = ["ExpertParallelDispatch"]


class ExpertParallelDispatch(Dispatch):
    """All-to-all over the `ep` axis; ranks of one `tp` axis send different tokens.

    Activations are the same on all ranks of a `tp` axis. Each sends its share of the tokens, so
    that no expert sees a token twice and expert gradients need no correction for `tp`.

    Args:
        ep_mesh: 1-D; axis rank r holds the r-th of axis_size equal runs of experts.
        tp_mesh: 1-D.
    """

    def __init__(self, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        self.ep_group = ep_mesh.get_group()
        self.ep_size = ep_mesh.size()
        self.tp_mesh = tp_mesh

    def split(self, tokens: Tensor) -> Tensor:
        """Return this `tp` rank's share; the gradient is gathered in backward."""
        return self._over_tp(tokens, Replicate(), Shard(0))

    def merge(self, tokens: Tensor) -> Tensor:
        """Gather the shares; backward takes this rank's share of the gradient."""
        return self._over_tp(tokens, Shard(0), Replicate())

    def run_experts(self, experts: Experts, rows: Tensor, counts: Tensor) -> Tensor:
        """Send rows to their experts' ranks, run this rank's experts, send the results back.

        Ranks: all of the `ep` axis; three all-to-alls forward, two backward.
        Sync: one copy to the host, since split sizes are host numbers.
        """
        # Both [ep_size, num_local_experts]: what goes to each rank, what comes from each.
        outgoing = counts.view(self.ep_size, -1)
        incoming = self._exchange_counts(counts, rows.device).view(self.ep_size, -1)
        send, receive = outgoing.sum(1).tolist(), incoming.sum(1).tolist()
        arrived = _exchange_rows(rows, send, receive, self.ep_group)
        # Rows arrive by rank, then by expert; the experts want them by expert alone.
        num_local = incoming.shape[1]
        expert_of_row = torch.arange(num_local).repeat(self.ep_size)
        expert_of_row = expert_of_row.repeat_interleave(incoming.flatten())
        order = torch.argsort(expert_of_row, stable=True)
        by_expert = arrived.index_select(0, order.to(rows.device))
        done: Tensor = experts(by_expert, incoming.sum(0).tolist())
        by_rank = done.index_select(0, torch.argsort(order).to(rows.device))
        return _exchange_rows(by_rank, receive, send, self.ep_group)

    def _exchange_counts(self, counts: Tensor, device: torch.device) -> Tensor:
        sent = counts.to(device)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.ep_group)
        return received.cpu()

    def _over_tp(self, tokens: Tensor, have: Shard | Replicate, want: Shard | Replicate) -> Tensor:
        if self.tp_mesh.size() == 1:
            return tokens
        spread = DTensor.from_local(tokens, self.tp_mesh, [have], run_check=False)
        local: Tensor = spread.redistribute(placements=[want]).to_local()
        return local


class _ExchangeRows(torch.autograd.Function):
    """all_to_all_single whose backward is the same exchange the other way round."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _all_to_all(rows, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grads[0], ctx.receive, ctx.send, ctx.group), None, None, None


def _exchange_rows(
    rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
) -> Tensor:
    exchanged: Tensor = _ExchangeRows.apply(  # type: ignore[no-untyped-call]
        rows, send, receive, group
    )
    return exchanged


def _all_to_all(
    rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
) -> Tensor:
    received = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), receive, send, group=group)
    return received
