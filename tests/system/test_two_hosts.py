"""One island over two hosts: the daemon starts a command that starts ranks on both, as `srun torchrun` would.

The second "host" is this machine, but its ranks cannot reach the daemon's socket. Every digest must be that of
the same island on one host.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.simulator.report import read_events

SPEC = f"""
name = "hosts"
target_tokens = {4 * 3 * 4 * 16}
[model]
width = 16
depth = 2
heads = 2
context = 16
[data]
text = ["{{stdlib}}/json/*.py"]
eval_sequences = 4
[inner]
batch_size = 4
[outer]
inner_steps = 3
fragments = 3
optimizer = "nesterov"
[sync]
expected_islands = 1
"""
# Each line starts the ranks of one host; the second one's cannot see the daemon.
TWO_HOSTS = """
run() { "$PYTHON" -P -m torch.distributed.run --nnodes 2 --node-rank $1 --nproc-per-node 1 \
    --master-addr 127.0.0.1 --master-port "$PORT" -m node.trainer; }
ATOLL_SOCKET=/nowhere/trainer.sock run 1 &
run 0
status=$?
wait
exit $status
"""


def atoll(*words: str) -> list[str]:
    return [sys.executable, "-m", "atoll", *words]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def digests(name: str, *command: str) -> list[str]:
    """Trains the run on one island of two ranks; the root of every round."""
    words = ["run", "start", "run", "--listen", "127.0.0.1:0", "--state", f"coordinator-{name}"]
    start = subprocess.Popen(atoll(*words), stdout=subprocess.PIPE, text=True)
    processes = [start]
    assert start.stdout is not None
    try:
        address = next(line for line in start.stdout if "atoll join" in line).split()[2]
        words = ["join", address, "--name", name, "--mesh", "shard=2", *command]
        processes.append(subprocess.Popen(atoll(*words), stderr=subprocess.DEVNULL))
        assert processes[1].wait(150) == 0
        assert start.wait(30) == 0
    finally:
        for process in processes:
            process.kill()
            process.wait()
        start.stdout.close()
    events = read_events(Path("runs", name, "events.jsonl"))
    return [event["new_root"] for event in events if event["event"] == "commit"]


def test_an_island_over_two_hosts_has_the_digests_of_one_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for key, value in (
        ("PYTHONUNBUFFERED", "1"),
        ("XDG_CACHE_HOME", str(tmp_path / "cache")),
        ("PYTHON", sys.executable),
        ("PORT", str(free_port())),
    ):
        monkeypatch.setenv(key, value)
    Path("spec.toml").write_text(SPEC)
    Path("two_hosts.sh").write_text(TWO_HOSTS)
    init = atoll("run", "init", "run", "--spec", "spec.toml")
    subprocess.run(init, check=True, timeout=60, stdout=subprocess.DEVNULL)
    one = digests("one")
    two = digests("two", "--", "sh", "two_hosts.sh")
    assert len(one) >= 4
    assert one == two
