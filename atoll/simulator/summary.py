"""The few lines after a simulation."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from atoll.simulator.simulate import Outputs


def print_summary(console: Console, report: dict[str, Any], outputs: Outputs) -> None:
    loss, traffic = report["loss"], report["traffic"]
    table = Table(show_header=False, box=None)
    table.add_row("held-out loss", f"{loss['initial']:.3f} → [b]{loss['final']:.3f}[/b]")
    for arm, result in report["baselines"].items():
        if result:
            ratio = loss["final"] / result["final"]
            table.add_row(
                arm.replace("_", " "), f"{result['final']:.3f} (Atoll: {ratio:.3f} × of it)"
            )
    agree = "the same on all islands" if report["digests_agree"] else "[red]NOT the same[/red]"
    table.add_row("rounds", f"{len(report['rounds'])}, digests {agree}")
    share = f"{traffic['ratio']:.1%}" if traffic["ratio"] is not None else "-"
    sent_mb = traffic["outer_bytes"] / 1e6
    table.add_row("bytes sent", f"{sent_mb:.1f} MB, {share} of data parallel")
    if report["utilisation"] is not None:
        table.add_row("computing", f"{report['utilisation']:.0%} of the islands' time")
    table.add_row("wall clock", f"{report['wall_s']:.0f} s")
    console.print(table)
    for path in (outputs.json, outputs.html):
        if path is not None:
            console.print(f"report: {path}")
