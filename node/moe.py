"""The recipe "moe": the transformer of "gpt" with a mixture of experts in place of each MLP.

A router gives every token its `experts_per_token` best experts, with weights that sum to one (Mixtral). No
expert has a capacity: no token is ever dropped. With an expert axis each rank holds some of the experts of
every layer, and tokens travel to them and back by all-to-all; the experts' weights are stacked, so that the
rank's part of them is a slice of the whole tensor.

Balance loss (Switch Transformer, equation 4): E * sum over experts of f * p, f = fraction of the choices that
fell on the expert, p = mean of its probability. f is counted over all ranks that hold different tokens, and
only p has a gradient, so the mean of the ranks' gradients is that of one process. With microbatches f is
counted in each one by itself: the one thing in a step that depends on how the batch is cut.

Shapes: N tokens of this rank, W width, E experts, K experts per token, F expert width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from node.all_to_all import exchange
from node.gpt import Gpt
from node.shards import local_of
from protocol.spec import MoeModel


class AddLoss(torch.autograd.Function):
    """Passes `x` through; the backward also sends gradient 1 into `loss`.

    So a layer adds its own loss wherever the model is cut, and it is averaged over ranks as the gradients are.
    """

    @staticmethod
    def forward(context: Any, x: Tensor, loss: Tensor) -> Tensor:
        context.loss_shape = loss.shape
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_ones(context.loss_shape)


class ScaleGradient(torch.autograd.Function):
    """Passes `x` through; the backward multiplies its gradient by `scale`."""

    @staticmethod
    def forward(context: Any, x: Tensor, scale: float) -> Tensor:
        context.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * context.scale, None


class Experts(nn.Module):
    """Squared-ReLU MLPs of the experts this rank holds, stacked.

    `gradient_scale`: an expert has the gradients of all ranks of its axis, where each rank's loss is a mean
    over its own tokens; it makes a mean of their sum.
    """

    gradient_scale = 1.0

    def __init__(self, experts: int, width: int, inner_width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(experts, width, inner_width))
        self.down = nn.Parameter(torch.empty(experts, inner_width, width))

    def forward(self, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        """`tokens` sorted by expert, `counts` of them for each."""
        up, down = self._weights(self.up), self._weights(self.down)
        done = [
            functional.relu(mine @ up[i]).square() @ down[i]
            for i, mine in enumerate(tokens.split(list(counts)))
        ]
        return torch.cat(done)

    def _weights(self, parameter: Tensor) -> Tensor:
        mine = local_of(parameter)
        if self.gradient_scale == 1.0:
            return mine
        return ScaleGradient.apply(mine, self.gradient_scale)  # type: ignore[no-any-return, no-untyped-call]


class MixtureOfExperts(nn.Module):
    """`axis` = expert axis of the mesh, `data_group` = all ranks with tokens of their own, `share` = what the
    tokens of the next forward count for in this rank's mean loss."""

    axis: DeviceMesh | None = None
    data_group: Any = None
    share = 1.0

    def __init__(self, shape: MoeModel) -> None:
        super().__init__()
        self.shape = shape
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        self.experts = Experts(shape.experts, shape.width, shape.expert_width)
        self.balance = torch.zeros(())  # the last forward's balance loss, for reports

    def split_over(self, axis: DeviceMesh) -> None:
        """Keeps this rank's experts: afterwards the weights are slices of the whole, stacked ones."""
        self.axis = axis
        self.experts.gradient_scale = 1.0 / axis.size()
        for name, whole in list(self.experts.named_parameters()):
            mine = distribute_tensor(whole, axis, [Shard(0)])
            self.experts.register_parameter(name, nn.Parameter(mine))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        probabilities = self.router(tokens).float().softmax(-1)
        weights, chosen = probabilities.topk(self.shape.experts_per_token, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.shape.experts)
        sent = tokens[order // self.shape.experts_per_token]
        done = self._at_experts(sent, counts)
        back = torch.zeros_like(done).index_copy(0, order, done)
        mixed = back.unflatten(0, chosen.shape) * weights.unsqueeze(-1).to(back.dtype)
        out = mixed.sum(1).view_as(x)
        loss = self._balance_loss(probabilities, counts)
        return AddLoss.apply(out, loss * (self.shape.balance * self.share))  # type: ignore[no-any-return, no-untyped-call]

    def _balance_loss(self, probabilities: Tensor, counts: Tensor) -> Tensor:
        everywhere = counts.float()
        if self.data_group is not None:
            dist.all_reduce(everywhere, group=self.data_group)
        fraction = everywhere / everywhere.sum()
        loss = self.shape.experts * (fraction * probabilities.mean(0)).sum()
        self.balance = loss.detach()
        return loss

    def _at_experts(self, sent: Tensor, counts: Tensor) -> Tensor:
        """`sent` sorted by expert -> the experts' answers in the same order."""
        if self.axis is None:
            return self.experts(sent, counts.tolist())  # type: ignore[no-any-return]
        group, ranks = self.axis.get_group(), self.axis.size()
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=group)
        outgoing = counts.view(ranks, -1).sum(1).tolist()
        per_source = received.view(ranks, -1)  # [source, my expert]
        incoming = per_source.sum(1).tolist()
        arrived = exchange(sent, incoming, outgoing, group)
        regroup = _by_expert(per_source)
        done = self.experts(arrived[regroup], per_source.sum(0).tolist())
        home = torch.empty_like(done).index_copy(0, regroup, done)
        return exchange(home, outgoing, incoming, group)


def _by_expert(per_source: Tensor) -> Tensor:
    """The order that takes tokens from (source, expert) to (expert, source)."""
    sources, experts = per_source.shape
    expert_of = torch.arange(experts).repeat(sources).repeat_interleave(per_source.flatten().cpu())
    return expert_of.to(per_source.device).argsort(stable=True)


class Moe(Gpt):
    shape: MoeModel

    def __init__(self, shape: MoeModel) -> None:
        super().__init__(shape)

    def make_mlp(self) -> nn.Module:
        return MixtureOfExperts(self.shape)
