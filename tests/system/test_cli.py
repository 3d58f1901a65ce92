"""Wrong inputs, as a user types them: one clear line that names the key, port or file and the remedy, an
exit code of its own, no traceback."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import structlog
from safetensors.numpy import save_file

from atoll.__main__ import main
from node.site import Site
from protocol.errors import (
    AddressInUse,
    AtollError,
    ConfigError,
    PeerUnreachable,
    RunMismatch,
    StateLocked,
)
from protocol.identity import load_or_create
from protocol.layout import TensorLayout
from protocol.messages import Start
from protocol.run_files import RunDirectory, load_run
from protocol.spec import load_spec
from protocol.state_dir import locked
from protocol.wire import encode_signed, encode_start

SPEC = """
name = "tiny"
target_tokens = 2_000
[model]
width = 16
depth = 1
heads = 2
context = 16
[data]
text = ["TEXT"]
[outer]
inner_steps = 5
[sync]
expected_islands = 1
"""

Cli = Callable[..., tuple[int, str]]


@pytest.fixture
def cli(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[Cli]:
    """Runs a command in this process; returns its exit code and what it wrote to stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("node.join._COORDINATOR_PATIENCE_S", 0.0)
    monkeypatch.setattr("node.coordinator_client._CALL_S", 0.5)

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["atoll", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), capfd.readouterr().err

    yield run
    structlog.reset_defaults()


def write_spec(folder: Path, old: str = "", new: str = "") -> Path:
    text = folder / "text.txt"
    text.write_text("all the world's a stage " * 500)
    path = folder / "spec.toml"
    assert old in SPEC
    spec = SPEC.replace(old, new) if old else SPEC
    path.write_text(spec.replace("TEXT", str(text)))
    return path


def one_line(err: str) -> str:
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in err
    assert len(lines) == 1, err
    return lines[0]


GPT_TABLE = """[model]
width = 16
depth = 1
heads = 2
context = 16
"""
OWN_TABLE = '[model]\nrecipe = "own"\n'


def made_run(folder: Path, own: bool = False) -> Path:
    """A run directory without torch: the start state is a handful of zeros."""
    files = RunDirectory(folder / "run")
    files.path.mkdir()
    spec_file = write_spec(folder, GPT_TABLE, OWN_TABLE) if own else write_spec(folder)
    files.spec.write_text(spec_file.read_text())
    spec = load_spec(files.spec)
    save_file({"w": np.zeros(4, np.float32)}, files.start_state)
    layout = (TensorLayout("w", (4,), "float32"),)
    start = Start("tiny-1", spec.digest(), layout, (b"r" * 32,), b"")
    signed = load_or_create(files.owner_key).sign("start", encode_start(start))
    files.start.write_bytes(encode_signed(signed))
    return files.path


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "inner_steps = 5",
            "inner_steps = 0",
            "outer.inner_steps: input should be greater than or equal to 1",
        ),
        (
            "inner_steps = 5",
            "iner_steps = 5",
            "outer.iner_steps: unknown key; did you mean 'inner_steps'?",
        ),
        (
            "width = 16",
            "width = 15",
            "model.width = 15 must be an even multiple of model.heads = 2",
        ),
        ("[sync]", "[sink]", "sink: unknown key; did you mean 'sync'?"),
        ("target_tokens = 2_000", "", "target_tokens: missing"),
        (
            "expected_islands = 1",
            "expected_islands = 1\nquorum = 2",
            "sync.quorum = 2 is more than",
        ),
        ("[model]", "[model", "not valid TOML"),
        ("[model]", '[model]\nrecipe = "gtp"', "model.recipe: must be one of gpt, moe, hf, own"),
        (
            "width = 16",
            "experts = 4",
            'model.experts: unknown key; it belongs to model.recipe = "moe"',
        ),
        ("text = [", "txt = [", "data.txt: unknown key; did you mean 'text'?"),
        ('text = ["TEXT"]', "", "data.text: missing; name the files to train on"),
        (
            '["TEXT"]',
            '["TEXT"]\ntokenizer = "model"',
            'data.tokenizer = "model" belongs to model.recipe = "hf"',
        ),
    ],
)
def test_a_wrong_spec_names_the_key(
    cli: Cli, tmp_path: Path, old: str, new: str, said: str
) -> None:
    code, err = cli("run", "init", "run", "--spec", str(write_spec(tmp_path, old, new)))
    assert code == ConfigError.exit_code
    assert said in one_line(err)
    assert str(tmp_path / "spec.toml") in one_line(err)


def test_empty_text_names_the_key_and_the_remedy(cli: Cli, tmp_path: Path) -> None:
    spec = write_spec(tmp_path)
    (tmp_path / "text.txt").write_text("")
    code, err = cli("run", "init", "run", "--spec", str(spec))
    assert code == ConfigError.exit_code
    assert "data.text" in one_line(err)


def test_a_directory_that_holds_a_run_is_not_overwritten(cli: Cli, tmp_path: Path) -> None:
    directory = made_run(tmp_path)
    before = (directory / "start.signed").read_bytes()
    code, err = cli("run", "init", str(directory))
    assert code == ConfigError.exit_code
    assert "already holds a run" in one_line(err)
    assert (directory / "start.signed").read_bytes() == before


# --- weights and models of others --------------------------------------------------------------


def weights_file(folder: Path, **tensors: object) -> Path:
    save_file({name: np.asarray(values) for name, values in tensors.items()}, folder / "w.st")
    return folder / "w.st"


def test_an_own_model_without_weights_says_where_to_get_them(cli: Cli, tmp_path: Path) -> None:
    spec = write_spec(tmp_path, GPT_TABLE, OWN_TABLE)
    code, err = cli("run", "init", "run", "--spec", str(spec))
    assert code == ConfigError.exit_code
    assert "atoll.save_start(model, FILE) and give it as --weights FILE" in one_line(err)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (np.ones(3), "w is F64: parameters of a run are F32 or BF16"),
        (np.ones(3, np.int64), "w is I64: parameters of a run are F32 or BF16"),
        (np.array([1, np.nan], np.float32), "w holds values that are not finite"),
    ],
)
def test_own_weights_that_cannot_be_trained_are_refused_by_name(
    cli: Cli, tmp_path: Path, values: np.ndarray, said: str
) -> None:
    spec, weights = write_spec(tmp_path, GPT_TABLE, OWN_TABLE), weights_file(tmp_path, w=values)
    code, err = cli("run", "init", "run", "--spec", str(spec), "--weights", str(weights))
    assert code == ConfigError.exit_code
    assert said in one_line(err)
    assert str(weights) in one_line(err)
    assert not (tmp_path / "run" / "start.signed").exists()


def test_an_own_model_needs_no_torch_and_no_text(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.torch_extra.find_spec", lambda name: None)
    spec = tmp_path / "own.toml"
    spec.write_text(f'name = "own"\ntarget_tokens = 10\n{OWN_TABLE}')
    weights = weights_file(tmp_path, w=np.ones((2, 3), np.float32))
    code, _ = cli("run", "init", "run", "--spec", str(spec), "--weights", str(weights))
    assert code == 0
    run = load_run(tmp_path / "run")
    assert run.start.layout == (TensorLayout("w", (2, 3), "float32"),)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "owner.key",
        "run.toml",
        "start.safetensors",
        "start.signed",
    ]


def test_weights_of_another_model_name_the_first_parameter_that_differs(
    cli: Cli, tmp_path: Path
) -> None:
    spec = write_spec(tmp_path)
    weights = weights_file(tmp_path, wte=np.ones((2, 3), np.float32))
    code, err = cli("run", "init", "run", "--spec", str(spec), "--weights", str(weights))
    assert code == ConfigError.exit_code
    assert one_line(err).endswith(
        f"--weights {weights}: parameter 0: they have wte [2, 3] float32, "
        "the model has embedding.weight [256, 16] float32"
    )


def test_weights_that_are_not_there_are_named(cli: Cli, tmp_path: Path) -> None:
    spec = write_spec(tmp_path)
    code, err = cli("run", "init", "run", "--spec", str(spec), "--weights", "nothing")
    assert code == ConfigError.exit_code
    assert "--weights nothing: no such file or directory" in one_line(err)


HF_TABLE = '[model]\nrecipe = "hf"\n'


def hf_source(folder: Path, config: str = '{"vocab_size": 300}') -> Path:
    source = folder / "model"
    source.mkdir()
    (source / "config.json").write_text(config)
    return source


@pytest.mark.parametrize(
    ("table", "config", "said"),
    [
        (HF_TABLE, "{", "config.json is not valid JSON"),
        (HF_TABLE, "{}", "model.config: its vocab_size must be an integer"),
        (HF_TABLE, '{"vocab_size": 16}', "model.config: its vocab_size = 16 must be at least 256"),
        (HF_TABLE + "contxt = 8\n", None, "model.contxt: unknown key; did you mean 'context'?"),
        ('[model]\nrecipe = "gpt"\n', None, 'model.recipe = "gpt" is not what --hf makes'),
        (GPT_TABLE, None, 'model.width: unknown key; it belongs to model.recipe = "gpt"'),
    ],
)
def test_a_model_that_does_not_fit_the_spec_is_refused_before_anything_is_made(
    cli: Cli, tmp_path: Path, table: str, config: str | None, said: str
) -> None:
    spec = write_spec(tmp_path, GPT_TABLE, table)
    source = hf_source(tmp_path, config or '{"vocab_size": 300}')
    code, err = cli("run", "init", "run", "--spec", str(spec), "--hf", str(source))
    assert code == ConfigError.exit_code
    assert said in err
    assert "Traceback" not in err
    assert all(str(tmp_path) in line for line in err.splitlines() if line.startswith("error: "))
    assert not (tmp_path / "run").exists()


def test_a_source_that_is_nowhere_is_named(cli: Cli) -> None:
    code, err = cli("run", "init", "run", "--hf", "/no/such/model")
    assert code == ConfigError.exit_code
    assert "--hf /no/such/model: no such file or directory" in one_line(err)


def test_a_spec_that_waits_for_its_config_names_the_option(cli: Cli, tmp_path: Path) -> None:
    spec = write_spec(tmp_path, GPT_TABLE, HF_TABLE)
    code, err = cli("run", "init", "run", "--spec", str(spec))
    assert code == ConfigError.exit_code
    assert "model.config: missing; `atoll run init --hf SOURCE` fills it in" in one_line(err)


def test_a_models_tokenizer_that_is_missing_is_asked_for(cli: Cli, tmp_path: Path) -> None:
    table = HF_TABLE + "config = '{\"vocab_size\": 300}'\n" + '[data]\ntokenizer = "model"\n'
    spec = write_spec(tmp_path, GPT_TABLE + "[data]\n", table)
    code, err = cli("run", "init", "run", "--spec", str(spec))
    assert code == ConfigError.exit_code
    assert 'data.tokenizer = "model": its tokenizer is missing: give --hf SOURCE' in one_line(err)
    code, err = cli("run", "init", "run", "--hf", str(hf_source(tmp_path)))
    assert code == ConfigError.exit_code
    assert "has no tokenizer.json" in one_line(err)


def test_a_tokenizer_too_large_to_hand_out_is_refused(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.run_init.MAX_TOKENIZER_BYTES", 10)
    table = HF_TABLE + '[data]\ntokenizer = "model"\n'
    spec, source = write_spec(tmp_path, GPT_TABLE + "[data]\n", table), hf_source(tmp_path)
    (source / "tokenizer.json").write_text('{"model": {"type": "WordLevel"}}')
    code, err = cli("run", "init", "run", "--spec", str(spec), "--hf", str(source))
    assert code == ConfigError.exit_code
    assert "larger than the 10 bytes that a run hands out" in one_line(err)


# --- start and join ----------------------------------------------------------------------------


def test_a_training_command_that_does_not_exist_is_named_before_anything_is_made(
    cli: Cli, tmp_path: Path
) -> None:
    code, err = cli("join", "127.0.0.1:1", "--name", "a", "--", "no-such-program", "--lr", "3")
    assert code == ConfigError.exit_code
    assert "no-such-program: no such program" in one_line(err)
    assert not (tmp_path / "runs").exists()


def test_a_training_command_is_taken_as_it_stands(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    async def join_run(site: Site, json: Path | None) -> None:
        seen.append((site.name, site.command))

    monkeypatch.setattr("atoll.join_run.join_run", join_run)
    words = ("python", "train.py", "--name", "b", "--", "-x")
    cli("join", "127.0.0.1:1", "--name", "a", "--", *words)
    cli("join", "127.0.0.1:1", "--name", "a")
    assert seen == [("a", words), ("a", ())]


@pytest.mark.parametrize("coordinator", ["own"], indirect=True)
def test_joining_an_own_model_without_a_command_says_how(cli: Cli, coordinator: str) -> None:
    code, err = cli("join", coordinator, "--name", "a")
    assert code == ConfigError.exit_code
    assert 'model.recipe = "own"' in one_line(err)
    assert "`atoll join ADDRESS -- COMMAND`" in one_line(err)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--mesh", "shards=2"), "--mesh 'shards=2': 'shards=2' is not AXIS=SIZE; the axes are"),
        (("--mesh", "shard=0"), "--mesh 'shard=0': every size is 1 to 4096"),
        (("--mesh", "shard=2,shard=2"), "shard stands there twice"),
        (("--island", "none.toml"), "none.toml: cannot be read: No such file"),
        (
            ("--island", "island.toml"),
            "island.toml: island.compue: unknown key; did you mean 'compute'?",
        ),
    ],
)
def test_a_wrong_setting_of_the_island_is_one_line(
    cli: Cli, tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    (tmp_path / "island.toml").write_text('[island]\ncompue = "bf16"\n')
    code, err = cli("join", "127.0.0.1:1", *options)
    assert code == ConfigError.exit_code
    assert said in one_line(err)


def test_starting_what_was_never_made_names_the_command_that_makes_it(
    cli: Cli, tmp_path: Path
) -> None:
    code, err = cli("run", "start", str(tmp_path / "nothing"))
    assert code == ConfigError.exit_code
    assert "nothing" in one_line(err)


def test_a_spec_edited_after_init_is_refused(cli: Cli, tmp_path: Path) -> None:
    directory = made_run(tmp_path)
    spec = directory / "run.toml"
    spec.write_text(spec.read_text().replace("inner_steps = 5", "inner_steps = 6"))
    code, err = cli("run", "start", str(directory))
    assert code == RunMismatch.exit_code
    assert "was changed after `atoll run init`" in one_line(err)


@pytest.mark.parametrize("command", [("run", "start"), ("coordinator", "serve")])
def test_a_port_in_use_is_named(cli: Cli, tmp_path: Path, command: tuple[str, str]) -> None:
    directory = made_run(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, err = cli(*command, str(directory), "--listen", f"127.0.0.1:{port}")
    assert code == AddressInUse.exit_code
    assert f"127.0.0.1:{port}" in one_line(err)
    assert "another" in one_line(err)


def test_a_state_directory_in_use_names_its_holder(cli: Cli, tmp_path: Path) -> None:
    directory = made_run(tmp_path)
    with locked(tmp_path / "held"):
        code, err = cli(
            "run",
            "start",
            str(directory),
            "--listen",
            "127.0.0.1:0",
            "--state",
            str(tmp_path / "held"),
        )
    import os

    assert code == StateLocked.exit_code
    assert f"in use by process {os.getpid()}" in one_line(err)


def test_joining_where_nobody_listens_says_so(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code, err = cli("join", f"127.0.0.1:{port}", "--name", "a")
    assert code == PeerUnreachable.exit_code
    assert f"127.0.0.1:{port}: nobody answers" in one_line(err)


@pytest.fixture
def coordinator(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """A real coordinator process, of an own model if so parametrized; yields its address."""
    directory = made_run(tmp_path, own=getattr(request, "param", "") == "own")
    process = subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-m",
            "atoll",
            "run",
            "start",
            str(directory),
            "--listen",
            "127.0.0.1:0",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={"PATH": "", "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    try:
        line = next(line for line in process.stdout if "atoll join" in line)
        yield line.split()[2]
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()


def test_a_spec_that_differs_from_the_coordinators_names_the_keys(
    cli: Cli, tmp_path: Path, coordinator: str
) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text(
        (tmp_path / "spec.toml").read_text().replace("inner_steps = 5", "inner_steps = 7")
    )
    code, err = cli("join", coordinator, "--name", "a", "--spec", str(mine))
    assert code == RunMismatch.exit_code
    assert "outer.inner_steps is 7 here and 5 in the run" in one_line(err)


def test_a_false_start_state_is_refused_before_anything_starts(cli: Cli, coordinator: str) -> None:
    """The file of this run is not what its owner signed (the root is made up)."""
    code, err = cli("join", coordinator, "--name", "a")
    assert code == RunMismatch.exit_code
    assert "not the one the owner signed" in one_line(err)


def test_a_state_directory_of_another_run_is_refused(
    cli: Cli, tmp_path: Path, coordinator: str
) -> None:
    from node.journal import Journal

    state = tmp_path / "runs" / "a"
    state.mkdir(parents=True)
    journal = Journal(state / "journal.db")
    journal.put("run_id", b"another-run")
    journal.close()
    code, err = cli("join", coordinator, "--name", "a")
    assert code == RunMismatch.exit_code
    assert "belongs to another run" in one_line(err)


def test_a_scenario_with_the_wrong_number_of_islands_names_both(cli: Cli, tmp_path: Path) -> None:
    write_spec(tmp_path)
    scenario = tmp_path / "scenario.toml"
    scenario.write_text('run = "spec.toml"\n[[islands]]\nname = "a"\n[[islands]]\nname = "b"\n')
    code, err = cli("simulate", str(scenario))
    assert code == ConfigError.exit_code
    assert "2 [[islands]]" in one_line(err)
    assert "sync.expected_islands = 1" in one_line(err)


def test_every_error_has_an_exit_code_of_its_own() -> None:
    def tree(kind: type[AtollError]) -> list[type[AtollError]]:
        return [kind, *(below for sub in kind.__subclasses__() for below in tree(sub))]

    direct = [kind for kind in tree(AtollError) if kind.__base__ is AtollError]
    codes = [kind.exit_code for kind in direct]
    assert len(set(codes)) == len(codes)
    assert all(0 < code < 125 for code in codes)


def test_the_coordinator_and_the_daemon_run_without_torch() -> None:
    """What `pip install atoll` without the extra `train` has to be able to do."""
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import atoll.cli, atoll.run_start, coordinator.service, node.join, node.daemon, atoll.join_run\n"
        "print('torch' in sys.modules and sys.modules['torch'] is not None)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("words", [("run", "init", "new"), ("join", "127.0.0.1:1", "--name", "a")])
def test_a_host_without_torch_is_told_which_extra_it_lacks(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setattr("node.torch_extra.find_spec", lambda name: None)
    code, err = cli(*words)
    assert code == ConfigError.exit_code
    assert "pip install 'atoll[train]'" in one_line(err)
    assert not (tmp_path / "new").exists()


def test_an_output_that_cannot_be_written_is_refused_before_anything_starts(
    cli: Cli, tmp_path: Path
) -> None:
    directory = made_run(tmp_path)
    code, err = cli("run", "start", str(directory), "--json", str(tmp_path / "no" / "x.json"))
    assert code == ConfigError.exit_code
    assert "its folder does not exist" in one_line(err)


def test_a_name_that_is_none_is_refused_before_anything_is_made(cli: Cli, tmp_path: Path) -> None:
    code, err = cli("join", "127.0.0.1:1", "--name", "c d")
    assert code == ConfigError.exit_code
    assert "--name 'c d'" in one_line(err)
    assert not (tmp_path / "runs").exists()


def test_help_does_not_load_anything_heavy() -> None:
    program = (
        "import sys, atoll.cli\n"
        "print(sorted({'torch', 'grpc', 'plotly', 'numpy', 'pydantic'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
