"""One island of four ranks, its model cut in every way: one torchrun plays all cases, one after another."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CHILD = Path(__file__).with_name("edge_child.py")
ROOT = Path(__file__).parents[2]
PATIENCE_S = 240

MESHES = [
    "replicated",
    "shard_4",
    "shard_2",
    "replicate_shard",
    "half_precision",
    "mixed_precision",
    "tensor_parallel",
    "shard_tensor",
    "experts",
    "sharded_experts",
    "pipeline",
    "pipeline_of_shards",
]
REMOTE = [
    ("shard_4", (2, 3)),
    ("half_precision", (1, 2, 3)),
    ("shard_tensor", (1, 3)),
    ("experts", (2, 3)),
    ("pipeline", (2, 3)),
    ("pipeline_of_shards", (2, 3)),
    ("placements", (2, 3)),
]
ENDS = ["daemon_vanishes", "daemon_refuses"]
TRAPS = ["after_evaluation", "without_reshard"]

SHAPES = [(), (1,), (5,), (202,), (3, 5), (1, 7), (8, 0), (2, 3, 4)]
SIZES = [(4,), (2, 2)]


def every_placement() -> dict[str, Any]:
    """Name -> shape, mesh, and per axis of the mesh the dim that it cuts: all there are."""
    tensors: dict[str, Any] = {}
    for shape, sizes in itertools.product(SHAPES, SIZES):
        for dims in itertools.product([None, *range(len(shape))], repeat=len(sizes)):
            tensors[f"w{len(tensors)}"] = (shape, sizes, dims)
    return tensors


def case(name: str, remote: tuple[int, ...] = ()) -> dict[str, Any]:
    extra = {"tensors": every_placement()} if name == "placements" else {}
    return {"id": named(name, remote), "name": name, "remote": remote, **extra}


def named(name: str, remote: tuple[int, ...]) -> str:
    return f"{name}, remote {','.join(map(str, remote))}" if remote else name


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Case -> what was not as it should be, as far as the ranks have got."""
    folder = tmp_path_factory.mktemp("meshes")
    cases = [case(name) for name in (*MESHES, "placements", *TRAPS)]
    cases += [case(*remote) for remote in (*REMOTE, *((end, (3,)) for end in ENDS))]
    cases.append(case("frozen", (3,)))  # the last: its process group has another time-out
    (folder / "cases.json").write_text(json.dumps(cases))
    launch = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--local-addr=127.0.0.1", "--nproc-per-node=4", "--monitor-interval=0.1"),
    ]
    out = folder / "results.jsonl"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, str(CHILD), str(folder / "cases.json"), str(out)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
    )
    lines = out.read_text().splitlines() if out.exists() else []
    found = {told["id"]: told["faults"] for told in map(json.loads, lines)}
    if done.returncode:
        print(done.stdout[-20_000:])
    return found


def check(results: dict[str, list[str]], name: str, remote: tuple[int, ...] = ()) -> None:
    assert results.get(named(name, remote), "the ranks did not get that far") == []


@pytest.mark.parametrize("mesh", MESHES)
def test_parameters_go_through_the_edge_bit_for_bit(
    mesh: str, results: dict[str, list[str]]
) -> None:
    check(results, mesh)


def test_every_placement_goes_through_the_edge_bit_for_bit(results: dict[str, list[str]]) -> None:
    check(results, "placements")


@pytest.mark.parametrize(("mesh", "remote"), REMOTE)
def test_ranks_on_other_hosts_change_nothing(
    mesh: str, remote: tuple[int, ...], results: dict[str, list[str]]
) -> None:
    check(results, mesh, remote)


@pytest.mark.parametrize("trap", TRAPS)
def test_a_gathered_fsdp2_model_computes_with_what_was_applied(
    trap: str, results: dict[str, list[str]]
) -> None:
    check(results, trap)


@pytest.mark.parametrize("end", ENDS)
def test_a_daemon_that_is_lost_or_refuses_is_an_error_on_every_rank(
    end: str, results: dict[str, list[str]]
) -> None:
    check(results, end, (3,))


def test_ranks_whose_process_group_is_impatient_survive_a_frozen_daemon(
    results: dict[str, list[str]],
) -> None:
    check(results, "frozen", (3,))
