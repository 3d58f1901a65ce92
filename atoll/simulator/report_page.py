"""The report as one self-contained HTML page: no network, no build step."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from protocol.state_dir import write_atomically

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }
table { border-collapse: collapse; } td, th { padding: .3rem .8rem; text-align: right; }
td:first-child, th:first-child { text-align: left; } tr { border-bottom: 1px solid #ddd; }
"""


def write_page(path: Path, report: dict[str, Any]) -> None:
    figures = [_loss(report), _time(report), _bytes(report)]
    charts = [
        figure.to_html(full_html=False, include_plotlyjs=number == 0)
        for number, figure in enumerate(figures)
    ]
    page = (
        f"<!doctype html><meta charset=utf-8><title>{html.escape(report['run_id'])}</title>"
        f"<style>{_STYLE}</style><h1>{html.escape(report['run_id'])}</h1>"
        f"{_summary(report)}{_islands(report)}{''.join(charts)}"
    )
    write_atomically(path, page.encode())


def _summary(report: dict[str, Any]) -> str:
    loss, traffic = report["loss"], report["traffic"]
    rows = {
        "held-out loss": f"{_number(loss['initial'])} → {_number(loss['final'])} nats per token",
        "rounds": f"{len(report['rounds'])} committed, {report['lost_rounds']} lost",
        "same digests on all islands": "yes" if report["digests_agree"] else "NO",
        "bytes sent": f"{traffic['outer_bytes']:,} "
        f"({_number(traffic['ratio'])} of data parallel's {traffic['data_parallel_bytes']:,})",
        "utilisation": _number(report["utilisation"]),
        "wall clock": f"{report['wall_s']} s",
    }
    for arm, result in report["baselines"].items():
        if result:
            rows[f"{arm.replace('_', ' ')}, final loss"] = _number(result["final"])
    cells = "".join(f"<tr><td>{k}</td><td>{html.escape(v)}</td></tr>" for k, v in rows.items())
    return f"<table>{cells}</table>"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _islands(report: dict[str, Any]) -> str:
    keys = ["name", "tokens", "inner_steps", "rounds", "sent_bytes", "received_bytes"]
    keys += ["compute_s", "wait_s", "tokens_per_s", "mfu"]
    head = "".join(f"<th>{key.replace('_', ' ')}</th>" for key in keys)
    rows = "".join(
        "<tr>" + "".join(f"<td>{_cell(row[key])}</td>" for key in keys) + "</tr>"
        for row in report["islands"]
    )
    return f"<h2>Islands</h2><table><tr>{head}</tr>{rows}</table>"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return html.escape(f"{value:,}" if isinstance(value, int | float) else str(value))


def _loss(report: dict[str, Any]) -> go.Figure:
    figure = go.Figure(layout={"title": "Held-out loss", "xaxis_title": "tokens of the run"})
    arms = {"atoll": report["loss"], **{k: v for k, v in report["baselines"].items() if v}}
    for name, arm in arms.items():
        tokens, losses = zip(*arm["curve"], strict=True) if arm["curve"] else ((), ())
        figure.add_scatter(x=tokens, y=losses, name=name.replace("_", " "), mode="lines+markers")
    return figure


def _time(report: dict[str, Any]) -> go.Figure:
    names = [row["name"] for row in report["islands"]]
    figure = go.Figure(
        layout={"title": "Where the time went", "barmode": "stack", "yaxis_title": "s"}
    )
    for key, label in (("compute_s", "computing"), ("wait_s", "waiting for the round")):
        figure.add_bar(x=names, y=[row[key] for row in report["islands"]], name=label)
    return figure


def _bytes(report: dict[str, Any]) -> go.Figure:
    rounds = report["rounds"]
    figure = go.Figure(layout={"title": "Bytes sent per round", "xaxis_title": "round"})
    figure.add_bar(x=[r["round"] for r in rounds], y=[r["bytes"] for r in rounds], name="bytes")
    return figure
