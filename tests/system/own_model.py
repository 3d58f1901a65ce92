"""A training script as a user has one, for a model no recipe makes. `save FILE` writes its start state."""

from __future__ import annotations

import sys

import torch
from torch import nn

import atoll


def build() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    model[0].bias.requires_grad_(False)
    return model


def train() -> None:
    model = build()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    island = atoll.attach(model, optimizer)
    while not island.should_stop:
        loss = model(torch.randn(4, 6)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        island.step(tokens=32, loss=loss.detach())


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["save"]:
        atoll.save_start(build(), sys.argv[2])
    else:
        train()
