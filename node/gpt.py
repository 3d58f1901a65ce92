"""The recipe "gpt": a decoder-only transformer, small enough to read at a glance.

RMSNorm before each part, rotary positions, causal attention, squared-ReLU MLP, no biases, a head of its
own (not tied to the embedding). Weights start normal with standard deviation 0.02; what writes into the
residual stream is scaled by 1/sqrt(2 * depth), so its variance does not grow with depth (GPT-2, 2.3).

Shapes: B sequences, T tokens, W width, H heads, D = W / H. The fused projection is laid out head by
head, and H is inferred from its width, so a rank that holds some of the heads runs the same code. A
pipeline cuts the model by taking parts away: without embedding `forward` takes hidden states, without head
it returns them. Blocks are a dict, so that names stay what they are in the whole model.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from node.ulysses import Context
from protocol.spec import GptModel

INIT_STD = 0.02
ROTARY_BASE = 10_000.0


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over all tokens, in nats; logits (B, T, vocabulary), targets (B, T) int64."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def rotary_table(context: int, head_width: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, each (context, D / 2)."""
    frequencies = ROTARY_BASE ** (-torch.arange(0, head_width, 2).float() / head_width)
    angles = torch.outer(torch.arange(context).float(), frequencies)
    return angles.cos(), angles.sin()


def rotate(x_BHTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # noqa: N803
    a, b = x_BHTD.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x_BHTD)


class Attention(nn.Module):
    """`context`, where it is set, is the axis that the sequences are cut along."""

    context: Context | None = None

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, 3, self.head_width)).transpose(1, 2)
        q, k, v = heads.unbind(3)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.context is None:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = self.context.attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.relu(self.up(x)).square())  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, width: int, heads: int, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = mlp

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    """`context`, where it is set, says which slice of the sequences this rank sees; of that slice it holds
    one in `token_shards` between blocks."""

    cos: Tensor
    sin: Tensor
    context: Context | None = None
    token_shards: int = 1

    def __init__(self, shape: GptModel) -> None:
        super().__init__()
        self.shape = shape
        self.embedding: nn.Module | None = nn.Embedding(shape.vocab_size, shape.width)
        self.blocks = nn.ModuleDict(
            {str(i): Block(shape.width, shape.heads, self.make_mlp()) for i in range(shape.depth)}
        )
        self.norm: nn.Module | None = nn.RMSNorm(shape.width)
        self.head: nn.Module | None = nn.Linear(shape.width, shape.vocab_size, bias=False)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(0), persistent=False)
        self.reset_buffers()
        self._start(shape.depth)

    def make_mlp(self) -> nn.Module:
        return Mlp(self.shape.width)

    def reset_buffers(self, device: torch.device | None = None) -> None:
        """Makes the rotary table, on `device` or where the old one is."""
        cos, sin = rotary_table(self.shape.context, self.shape.width // self.shape.heads)
        self.cos, self.sin = (x.to(device or self.cos.device) for x in (cos, sin))

    def _start(self, depth: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            residual = name.endswith(("attention.out.weight", "mlp.down.weight", "experts.down"))
            nn.init.normal_(
                parameter, std=INIT_STD / math.sqrt(2 * depth) if residual else INIT_STD
            )

    def forward(self, x: Tensor) -> Tensor:
        """(B, T) tokens -> (B, T, vocabulary) logits; T counts this rank's slice."""
        length = x.shape[1] if self.embedding is not None else x.shape[1] * self.token_shards
        first = 0 if self.context is None else self.context.rank * length
        cos, sin = self.cos[first : first + length], self.sin[first : first + length]
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x, cos, sin)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x
