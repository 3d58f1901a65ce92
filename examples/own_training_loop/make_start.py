"""Writes start.safetensors: the parameters that every island of the run begins with.

Only the run's creator needs it; the islands fetch the start state from the run.
"""

from __future__ import annotations

import torch
from train import Model

import atoll

torch.manual_seed(0)
atoll.save_start(Model(), "start.safetensors")
