"""One GPU as an island: FLOP utilisation with and without Atoll attached, and how fast a snapshot can leave.

    python benchmarks/island_gpu.py --json result.json
    python benchmarks/island_gpu.py --device cpu --small        # the same path where there is no GPU

A GPT under FSDP2, forward and backward in bf16, trains twice: alone, and attached to a daemon that applies
an anchor every --every steps. MFU is that of the whole loop, edges included; the time at edges also counts
what the device had still to do on arrival. A copy rate is that of one large tensor, device to host. The
daemon is a thread that answers by a script.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from island_edge import ScriptedDaemon
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from node.accounting import flops_per_token, peak_flops
from node.attach import attach
from node.gpt import Gpt, cross_entropy
from node.shared_buffer import SharedBuffer
from protocol.spec import GptModel
from protocol.state_dir import write_atomically

SMALL = GptModel(width=64, depth=2, heads=2, context=64, vocab_size=256)
LARGE = GptModel(width=1_024, depth=24, heads=16, context=1_024, vocab_size=50_304)
COPY_VALUES, SMALL_COPY_VALUES = 1 << 28, 1 << 20  # 1 GiB, 4 MiB
COPIES = 10

Json = dict[str, Any]


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- training ----------------------------------------------------------------------------------


def sharded(shape: GptModel, device: torch.device) -> Gpt:
    torch.manual_seed(1)
    model = Gpt(shape).to(device)
    mesh = init_device_mesh(device.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


class Trained:
    """`steps` timed steps, after `warmup` steps that are not, all on one batch."""

    def __init__(self, shape: GptModel, device: torch.device, batch: int) -> None:
        self._device, self.tokens = device, batch * shape.context
        self._model = sharded(shape, device)
        self.values = sum(parameter.numel() for parameter in self._model.parameters())
        fused = device.type == "cuda"
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=fused)
        samples = torch.randint(shape.vocab_size, (batch, shape.context + 1), device=device)
        self._x, self._y = samples[:, :-1].contiguous(), samples[:, 1:].contiguous()

    def run(self, warmup: int, steps: int) -> Json:
        """With a daemon to attach to, where ATOLL_SOCKET names one."""
        island = attach(self._model, self._optimizer)
        for _ in range(warmup):
            island.step(tokens=self.tokens, loss=self._step())
        wait_for(self._device)
        before = island.seconds.get("outer", 0.0)
        started_s = time.perf_counter()
        for _ in range(steps):
            island.step(tokens=self.tokens, loss=self._step())
        wait_for(self._device)
        seconds = time.perf_counter() - started_s
        island.close()
        return {
            "tokens_per_s": round(steps * self.tokens / seconds, 1),
            "step_ms": round(1e3 * seconds / steps, 2),
            "edges_s": round(island.seconds.get("outer", 0.0) - before, 4),
        }

    def _step(self) -> Tensor:
        loss = cross_entropy(self._model(self._x), self._y)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()


def train(attached: bool, shape: GptModel, device: torch.device, options: Any) -> Json:
    trained = Trained(shape, device, options.batch)
    # The warm-up reaches one edge, so that all memory has been touched before.
    daemon = ScriptedDaemon(options.every, applies=True) if attached else nullcontext()
    with daemon:
        result = trained.run(options.every, options.steps)
    flops = flops_per_token(shape, trained.values)
    peak = options.peak_flops or peak_flops(device)
    result["mfu"] = round(result["tokens_per_s"] * flops / peak, 4) if peak else None
    result["parameters"] = trained.values
    result["edges"] = options.steps // options.every if attached else 0
    return result


# --- device to host ----------------------------------------------------------------------------


def copy_rates(values: int, device: torch.device) -> Json:
    """GB/s (1e9 bytes) of one large tensor, device to host; pinned memory is CUDA's alone."""
    source = torch.rand(values, device=device)
    buffer = SharedBuffer.create("bench", values)
    shared = torch.from_numpy(buffer.values)
    rates = {"shared memory": copy_rate(source, shared)}
    if device.type == "cuda":
        rates["pinned"] = copy_rate(source, torch.empty(values, pin_memory=True))
        check(torch.cuda.cudart().cudaHostRegister(shared.data_ptr(), shared.nbytes, 0))
        try:
            if not shared.is_pinned():
                raise RuntimeError("CUDA does not take the registered memory for pinned")
            rates["shared memory, registered"] = copy_rate(source, shared)
        finally:
            torch.cuda.synchronize(device)
            check(torch.cuda.cudart().cudaHostUnregister(shared.data_ptr()))
    buffer.close()
    return rates


def check(error: Any) -> None:
    if int(error):
        raise RuntimeError(f"CUDA: error {int(error)}")


def copy_rate(source: Tensor, target: Tensor) -> float:
    target.copy_(source)
    wait_for(source.device)
    started_s = time.perf_counter()
    for _ in range(COPIES):
        target.copy_(source, non_blocking=True)
    wait_for(source.device)
    seconds = time.perf_counter() - started_s
    return round(COPIES * source.nbytes / seconds / 1e9, 2)


# --- the report --------------------------------------------------------------------------------


def report(results: Json) -> str:
    lines = [f"{results['device']}, {results['alone']['parameters'] / 1e6:.1f} M parameters"]
    for name in ("alone", "attached"):
        result = results[name]
        mfu = "unknown" if result["mfu"] is None else f"{result['mfu']:.2%}"
        lines.append(
            f"{name:10} MFU {mfu}   {result['step_ms']:.1f} ms a step   "
            f"{result['tokens_per_s']:.0f} tokens/s   {result['edges']} edges, "
            f"{result['edges_s']:.3f} s"
        )
    attached, alone = results["attached"]["tokens_per_s"], results["alone"]["tokens_per_s"]
    lines.append(f"attached trains at {attached / alone:.2%} of the rate alone")
    lines += [f"device -> {name}: {rate:.1f} GB/s" for name, rate in results["copies"].items()]
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One GPU as an island.")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="a model and copies to try it with")
    parser.add_argument("--width", type=int)
    parser.add_argument("--depth", type=int)
    parser.add_argument("--batch", type=int, help="sequences per step")
    parser.add_argument("--steps", type=int, help="that are timed")
    parser.add_argument("--every", type=int, help="steps between two edges")
    parser.add_argument("--peak-flops", type=float, help="of the device, where it is not known")
    parser.add_argument("--json", type=Path, help="results, as JSON")
    options = parser.parse_args()
    usual = {"batch": 2, "steps": 12, "every": 4} if options.small else {}
    for key, value in ({"batch": 8, "steps": 120, "every": 40} | usual).items():
        if getattr(options, key) is None:
            setattr(options, key, value)
    return options


def shape_of(options: argparse.Namespace) -> GptModel:
    shape = (SMALL if options.small else LARGE).model_dump()
    asked = {"width": options.width, "depth": options.depth}
    return GptModel.model_validate(shape | {k: v for k, v in asked.items() if v is not None})


def main() -> None:
    options = parse()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here: nothing is measured (--device cpu --small tries the code path)")
        return
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    name = "CPU"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
        name = torch.cuda.get_device_name(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    shape = shape_of(options)
    results: Json = {"device": name, "shape": shape.model_dump(), "every": options.every}
    for attached in (False, True):
        key = "attached" if attached else "alone"
        results[key] = train(attached, shape, device, options)
        gc.collect()  # a model under FSDP2 is full of cycles
        if device.type == "cuda":
            torch.cuda.empty_cache()
    results["copies"] = copy_rates(SMALL_COPY_VALUES if options.small else COPY_VALUES, device)
    dist.destroy_process_group()
    if options.json:
        write_atomically(options.json, json.dumps(results, indent=1).encode())
    print(report(results))


if __name__ == "__main__":
    main()
