"""The recipe "gpt": a decoder-only transformer, small enough to read at a glance.

RMSNorm before each part, rotary positions, causal attention, squared-ReLU MLP, no biases, a head of its
own (not tied to the embedding). Weights start normal with standard deviation 0.02; what writes into the
residual stream is scaled by 1/sqrt(2 * depth), so its variance does not grow with depth (GPT-2, 2.3).

Shapes: B sequences, T tokens, W width, H heads, D = W / H. The fused projection is laid out head by
head, and H is inferred from its width, so a rank that holds some of the heads runs the same code.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from protocol.spec import GptModel

INIT_STD = 0.02
ROTARY_BASE = 10_000.0


def rotary_table(context: int, head_width: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, each (context, D / 2)."""
    frequencies = ROTARY_BASE ** (-torch.arange(0, head_width, 2).float() / head_width)
    angles = torch.outer(torch.arange(context).float(), frequencies)
    return angles.cos(), angles.sin()


def rotate(x_BHTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # noqa: N803
    a, b = x_BHTD.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, 3, self.head_width)).transpose(1, 2)
        q, k, v = heads.unbind(3)
        mixed = functional.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True
        )
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.relu(self.up(x)).square())  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = Mlp(width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, shape: GptModel) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab_size, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.depth))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab_size, bias=False)
        cos, sin = rotary_table(shape.context, shape.width // shape.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._start(shape.depth)

    def _start(self, depth: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
            nn.init.normal_(
                parameter, std=INIT_STD / math.sqrt(2 * depth) if residual else INIT_STD
            )

    def logits(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats; both arguments (B, T) int64."""
        return functional.cross_entropy(self.logits(tokens).flatten(0, 1), targets.flatten())
