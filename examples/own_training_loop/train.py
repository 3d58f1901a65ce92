"""A plain PyTorch training loop: a small byte model on Python's own library, on one rank or on many.

    python train.py --steps 200                                       alone
    torchrun --standalone --nproc-per-node 2 train.py --steps 200     two ranks, sharded by FSDP2
    atoll join ADDRESS --name NAME -- torchrun --standalone --nproc-per-node 2 train.py

The five lines marked `atoll` are all that the last one takes; the fourth was `for step in range(steps):`.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import atoll  # atoll

CONTEXT, BATCH, WIDTH, DEPTH = 64, 16, 64, 2


class Model(nn.Module):
    """Predicts each next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(DEPTH)
        )
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, windows: Tensor) -> Tensor:
        inputs, targets = windows[:, :-1], windows[:, 1:]
        x = self.bytes(inputs) + self.places.weight
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, x.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def read_text() -> Tensor:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def batch(text: Tensor, number: int, rank: int, ranks: int) -> Tensor:
    """This rank's windows of batch `number`, the same whoever draws it."""
    draw = torch.Generator().manual_seed(number)
    starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=draw)[rank::ranks]
    return torch.stack([text[start : start + CONTEXT + 1] for start in starts]).long()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000, help="at most so many")
    steps = parser.parse_args().steps

    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))

    torch.manual_seed(0)
    model = Model().to(device)
    if ranks > 1:
        mesh = init_device_mesh(device.type, (ranks,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = read_text()

    island = atoll.attach(model, optimizer)  # atoll
    text = text.tensor_split(island.data_shard[1])[island.data_shard[0]]  # atoll
    while not island.should_stop and (step := island.steps) < steps:  # atoll
        windows = batch(text, step, rank, ranks).to(device)
        loss = model(windows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        island.step(tokens=BATCH * CONTEXT, loss=loss.detach())  # atoll
        if rank == 0 and step % 20 == 19:
            print(f"step {step + 1}  loss {loss.item():.3f}", flush=True)

    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
