"""Context parallelism: a rank holds a slice of every sequence, and for attention some heads of all of it.

Heads and tokens change places by one all-to-all before attention and one after (DeepSpeed Ulysses), so the
attention itself is the ordinary causal one over whole sequences, on CPU and GPU alike. Heads must be divisible
by the axis. PyTorch's ring form needs CUDA kernels and is not built.

Shapes: B sequences, H heads, T tokens of the whole sequence, C ranks on the axis, D head width.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as functional
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from node.all_to_all import exchange


class Context:
    """This rank's place on the context axis."""

    def __init__(self, axis: DeviceMesh) -> None:
        self._group: Any = axis.get_group()
        self.size, self.rank = axis.size(), axis.get_local_rank()

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention; all (B, H, T / C, D), in this rank's slice."""
        q, k, v = (self._gather_tokens(x) for x in (q, k, v))
        return self._gather_heads(functional.scaled_dot_product_attention(q, k, v, is_causal=True))

    def _gather_tokens(self, x: Tensor) -> Tensor:
        """(B, H, T / C, D) -> (B, H / C, T, D)"""
        b, _, _, d = x.shape
        outgoing = x.unflatten(1, (self.size, -1)).movedim(1, 0)
        return self._exchange(outgoing).permute(1, 2, 0, 3, 4).reshape(b, -1, self._tokens(x), d)

    def _gather_heads(self, x: Tensor) -> Tensor:
        """(B, H / C, T, D) -> (B, H, T / C, D)"""
        outgoing = x.unflatten(2, (self.size, -1)).movedim(2, 0)
        return self._exchange(outgoing).movedim(0, 1).flatten(1, 2)

    def _tokens(self, x: Tensor) -> int:
        return x.shape[2] * self.size

    def _exchange(self, x: Tensor) -> Tensor:
        """x[c] goes to rank c; out[c] came from rank c."""
        split = [x.shape[1]] * self.size
        return exchange(x.flatten(0, 1), split, split, self._group).view(x.shape)
