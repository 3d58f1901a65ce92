"""A small Llama, made from a configuration and trained by transformers.Trainer on Python's own library.

    python train.py --steps 100                            alone
    python train.py --save-start start.safetensors         the parameters that a run begins with
    atoll join ADDRESS --name NAME -- python train.py      an island of a run

With torchrun before `train.py` the island has several ranks, and the Trainer wraps the model in DDP.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import atoll
from atoll.huggingface import AtollCallback

CONTEXT, BATCH, HELD_OUT = 64, 16, 32


def make_model() -> LlamaForCausalLM:
    set_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


class Windows(Dataset[dict[str, Tensor]]):
    """Consecutive windows of bytes, every island other ones: it looks up its share when it is asked."""

    def __init__(self, text: Tensor, callback: AtollCallback | None = None) -> None:
        self._windows = text[: len(text) // CONTEXT * CONTEXT].view(-1, CONTEXT)
        self._callback = callback

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        index, islands = self._callback.island.data_shard if self._callback else (0, 1)
        window = self._windows[(number * islands + index) % len(self)].long()
        return {"input_ids": window, "labels": window}


def read_text() -> Tensor:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000, help="at most so many")
    parser.add_argument("--save-start", metavar="FILE")
    options = parser.parse_args()
    model = make_model()
    if options.save_start:
        atoll.save_start(model, options.save_start)
        return
    text = read_text()
    callback = AtollCallback(evaluate="eval_loss", use_run_schedule=True)
    arguments = TrainingArguments(
        max_steps=options.steps,  # the run stops before
        per_device_train_batch_size=BATCH,
        learning_rate=3e-3,
        lr_scheduler_type="constant",  # the run's schedule takes its place
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=Windows(text[HELD_OUT * CONTEXT :], callback),
        eval_dataset=Windows(text[: HELD_OUT * CONTEXT]),
        callbacks=[callback],
    )
    trainer.train()


if __name__ == "__main__":
    main()
