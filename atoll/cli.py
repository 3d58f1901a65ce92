"""Commands: nouns for organisers (`run`, `coordinator`), verbs for everyone else."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from protocol.errors import ConfigError

if TYPE_CHECKING:
    from atoll.simulator.scenario import Scenario
    from node.island_settings import IslandSettings

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train one model on many islands of accelerators, joined by ordinary internet links.",
)
run_app = typer.Typer(no_args_is_help=True, help="Make and start a run.")
coordinator_app = typer.Typer(no_args_is_help=True, help="The coordinator alone.")
app.add_typer(run_app, name="run")
app.add_typer(coordinator_app, name="coordinator")


def _in_a_folder(path: Path | None) -> Path | None:
    """Refused before anything starts, not after hours of training."""
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"{path}: its folder does not exist: make it, or choose another")
    return path


JsonPath = Annotated[
    Path | None,
    typer.Option("--json", help="Write the result here as JSON.", callback=_in_a_folder),
]
HtmlPath = Annotated[
    Path | None,
    typer.Option("--html", help="Write the report here as one page.", callback=_in_a_folder),
]
Folder = Annotated[
    Path | None,
    typer.Option("--folder", help="Keep state and logs here; default: a temporary one."),
]
Baselines = Annotated[
    bool, typer.Option("--baselines", help="Also train data parallel and one island alone.")
]
Listen = Annotated[
    str, typer.Option("--listen", help="host:port to listen at; port 0 takes a free one.")
]
State = Annotated[Path | None, typer.Option("--state", help="State directory.")]


def cache_directory() -> Path:
    """Token caches, shared by all islands of this user on this machine."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "atoll"


@app.command()
def demo(
    json: JsonPath = None, html: HtmlPath = Path("atoll-demo.html"), baselines: Baselines = False
) -> None:
    """Four islands over slow links train a small model on this machine, in about two minutes."""
    from atoll.quickstart import quickstart_files

    with quickstart_files() as folder:
        _simulate(folder / "scenario.toml", json, html, None, baselines)


@app.command()
def simulate(
    scenario: Annotated[Path, typer.Argument(help="SCENARIO.toml")],
    json: JsonPath = None,
    html: HtmlPath = None,
    folder: Folder = None,
    baselines: Baselines = False,
) -> None:
    """Run a scenario: a coordinator and its islands as local processes behind slow links."""
    _simulate(scenario, json, html, folder, baselines)


def _simulate(
    path: Path, json: Path | None, html: Path | None, folder: Path | None, baselines: bool
) -> None:
    from rich.console import Console

    from atoll.process import run_to_end
    from atoll.simulator.scenario import load_scenario
    from atoll.simulator.simulate import Outputs, simulate
    from atoll.simulator.summary import print_summary

    console = Console()
    scenario: Scenario = load_scenario(path)
    outputs = Outputs(json, html, folder, cache_directory())
    report = run_to_end(simulate(scenario, outputs, console, baselines))
    print_summary(console, report, outputs)


@app.command()
def join(
    address: Annotated[str, typer.Argument(help="host:port that `atoll run start` printed")],
    command: Annotated[
        list[str] | None,
        typer.Argument(help="After --: your own training command; default: the built-in trainer."),
    ] = None,
    name: Annotated[str, typer.Option(help="This island's name; must be unique in the run.")] = "",
    state: State = None,
    listen: Listen = "127.0.0.1:0",
    advertise: Annotated[
        str | None,
        typer.Option(help="Address other islands can reach, if not the one listened at."),
    ] = None,
    spec: Annotated[
        Path | None, typer.Option(help="Your own copy of the run spec; refused if it differs.")
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(help="Paths or globs of the text here, in place of the spec's."),
    ] = None,
    island: Annotated[
        Path | None, typer.Option(help="TOML file with this island's own settings.")
    ] = None,
    mesh: Annotated[
        str, typer.Option(help="How the ranks share the model, as in shard=4,tensor=2.")
    ] = "",
    threads: Annotated[
        int | None, typer.Option(min=1, help="torch threads of each rank; default: 1")
    ] = None,
    json: JsonPath = None,
) -> None:
    """Take part in a run until it is finished; the final model is left in the state directory."""
    from atoll.join_run import join_run
    from atoll.process import run_to_end
    from node.site import Site

    name = name or socket.gethostname()
    site = Site(
        name=name,
        coordinator=address,
        state=(state or Path("runs") / name).absolute(),  # a script may change its directory
        cache=cache_directory(),
        listen=listen,
        advertise=advertise,
        spec=spec,
        text=tuple(text or ()),
        island=_island_settings(island, mesh, threads),
        command=tuple(command or ()),
    )
    run_to_end(join_run(site, json))


def _island_settings(file: Path | None, mesh: str, threads: int | None) -> IslandSettings:
    from node.island_settings import IslandSettings, load_island
    from node.mesh import parse_mesh

    settings = load_island(file) if file is not None else IslandSettings()
    changes = {"mesh": parse_mesh(mesh)} if mesh else {}
    return settings.model_copy(update=changes | ({"threads": threads} if threads else {}))


@run_app.command("init")
def run_init(
    directory: Annotated[Path, typer.Argument(help="New run directory.")] = Path("run"),
    spec: Annotated[
        Path | None, typer.Option(help="Spec to use; default: a commented one.")
    ] = None,
    hf: Annotated[
        str | None,
        typer.Option(
            help="Train this causal language model: directory, config.json or Hugging Face hub name."
        ),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            help="Start from this safetensors file, or directory of them; default: random weights."
        ),
    ] = None,
    json: JsonPath = None,
) -> None:
    """Write the spec, the owner key and the start state."""
    from atoll.run_init import Origin, init_run
    from protocol.state_dir import write_atomically

    start = init_run(directory, spec, cache_directory(), origin=Origin(hf, weights))
    values = sum(tensor.values for tensor in start.layout)
    typer.echo(f"run {start.run_id}: {values:,} parameters, made in {directory}")
    typer.echo(f"next: atoll run start {directory}")
    if json is not None:
        import json as json_module

        fields = {"run_id": start.run_id, "parameters": values, "directory": str(directory)}
        write_atomically(json, json_module.dumps(fields).encode())


@run_app.command("start")
def run_start(
    directory: Annotated[Path, typer.Argument(help="Run directory, or the run.toml in it.")] = Path(
        "run"
    ),
    listen: Listen = "127.0.0.1:7447",
    state: State = None,
    json: JsonPath = None,
) -> None:
    """Start the coordinator and the donor of the start state; print the address to join."""
    from atoll.process import run_to_end
    from atoll.run_start import start_run, write_listening
    from protocol.run_files import run_directory

    def listening(address: str, run_id: str) -> None:
        typer.echo(
            f"run {run_id} waits for its islands. On each:\n\n    atoll join {address} --name NAME\n"
        )
        if json is not None:
            write_listening(json, address, run_id)

    state = state or run_directory(directory).path / "coordinator"
    run_to_end(start_run(directory, state, listen, listening))


@run_app.command("donate")
def run_donate(
    directory: Annotated[Path, typer.Argument(help="Run directory, or the run.toml in it.")] = Path(
        "run"
    ),
    listen: Listen = "127.0.0.1:7448",
) -> None:
    """Serve the start state alone, for a coordinator on another host (its --donor)."""
    from atoll.process import run_to_end
    from atoll.run_start import donate_start

    def listening(address: str, run_id: str) -> None:
        typer.echo(f"start state of run {run_id} at {address}")

    run_to_end(donate_start(directory, listen, listening))


@coordinator_app.command("serve")
def coordinator_serve(
    run: Annotated[Path, typer.Argument(help="run.toml in a run directory")],
    listen: Listen = "127.0.0.1:7447",
    state: State = None,
    donor: Annotated[
        list[str] | None, typer.Option(help="Address of an `atoll run donate`; may be repeated.")
    ] = None,
    json: JsonPath = None,
) -> None:
    """Only the coordinator: needs no torch and never sees a tensor."""
    from atoll.process import run_to_end
    from atoll.run_start import write_listening
    from coordinator.service import serve_run
    from protocol.grpc_transport import GrpcTransport
    from protocol.run_files import run_directory

    def listening(address: str, run_id: str) -> None:
        typer.echo(f"run {run_id}: coordinator at {address}")
        if json is not None:
            write_listening(json, address, run_id)

    state = state or run_directory(run).path / "coordinator"
    run_to_end(serve_run(run, state, listen, GrpcTransport(), listening, donor or ()))
