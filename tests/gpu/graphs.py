#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Measures the cost of CUDA graphs, as in figures 13 and 14 of the paper on multi-path copies by graphs (2026): the times of creation,
construction, instantiation and launch by the number of nodes, and their fractions of the time of a copy. Also measures one copy between two
GPUs by streams and by graphs, by size. Runs `mpgpu bench` on two GPUs for about a minute.

    python3 tests/gpu/graphs.py MPGPU FOLDER
    python3 tests/gpu/graphs.py --read FOLDER

MPGPU is the path of the command `mpgpu`. Its JSON output and the picture graphs.svg are written to FOLDER. --read creates the tables and
the picture again from that output. Exits with 77 if there are fewer than two GPUs.
"""

from __future__ import annotations

import json
import math
import pathlib
import subprocess
import sys
from typing import Any

PHASES = ("creation", "construction", "instantiation", "first launch", "later launch")
COLOURS = ("#4c78a8", "#f58518", "#e45756", "#72b7b2", "#54a24b")
# Cases of `mpgpu bench` to run, each with its options.
RUNS = {
    "graph_phases": ["--case", "graph_phases", "--sizes", "2M,16M,64M,256M"],
    "stream": ["--case", "d2d", "--engine", "stream", "--sizes", "1M,2M,4M,8M,16M,32M,64M,128M,256M,512M"],
    "graph": ["--case", "d2d", "--engine", "graph", "--sizes", "1M,2M,4M,8M,16M,32M,64M,128M,256M,512M"],
}

Phases = dict[int, dict[int, tuple[dict[str, float], float, float]]]


def run(mpgpu: str, folder: pathlib.Path) -> None:
    for name, arguments in RUNS.items():
        command = [mpgpu, "bench", *arguments, "--output", str(folder / f"{name}.json")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        (folder / f"{name}.txt").write_text(done.stdout + done.stderr)
        if done.returncode != 0:
            sys.exit(f"gpu graphs: {' '.join(command)} failed: {done.stderr.strip()}")


def results(folder: pathlib.Path, name: str) -> list[dict[str, Any]]:
    report = json.loads((folder / f"{name}.json").read_text())
    found: list[dict[str, Any]] = report["results"]
    if not found:
        print(f"gpu graphs: skipped: {'; '.join(skipped['why'] for skipped in report.get('skipped', []))}")
        sys.exit(77)
    return found


def manner(result: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Returns the times of the driver calls."""
    times: dict[str, dict[str, float]] = result["plain"][0]["times"]
    return times


def phases_of(found: list[dict[str, Any]]) -> Phases:
    """Returns the time of each phase, of the first copy and of a later copy in microseconds, by bytes and number of nodes."""
    rows: dict[tuple[int, int], dict[str, dict[str, Any]]] = {}
    for result in found:
        rows.setdefault((result["size"], result["transfers"]), {})[result["way"]] = result
    phases: Phases = {}
    for (size, nodes), ways in sorted(rows.items()):
        made = [ways["first"]["figures"][f"{phase} seconds"] for phase in PHASES[:3]]
        first, later = manner(ways["first"]), manner(ways["later"])
        seconds = [*made, max(first["issue"]["median"] - sum(made), 0), later["issue"]["median"]]
        of_phase = {phase: value * 1e6 for phase, value in zip(PHASES, seconds, strict=True)}
        phases.setdefault(size, {})[nodes] = of_phase, first["total"]["median"] * 1e6, later["total"]["median"] * 1e6
    return phases


def size_text(size: int) -> str:
    return f"{size >> 20} MiB"


def tables(phases: Phases, engines: dict[int, tuple[float, float, float]]) -> None:
    largest = max(phases)
    print(f"\nus of the calling thread, the driver's calls, a copy of {size_text(largest)}:\n")
    print(f"copy nodes | {' | '.join(PHASES)}\n---|{'|'.join(['---'] * len(PHASES))}")
    for nodes, (of_phase, _, _) in phases[largest].items():
        print(f"{nodes} | {' | '.join(f'{of_phase[phase]:.1f}' for phase in PHASES)}")
    print("\nshare of a copy's time, made and launched first (later), by copy nodes:\n")
    counts = list(phases[largest])
    print(f"bytes | {' | '.join(map(str, counts))}\n---|{'|'.join(['---'] * len(counts))}")
    for size, by_nodes in phases.items():
        cells = [
            f"{sum(of_phase[phase] for phase in PHASES[:4]) / first:.0%} ({of_phase['later launch'] / later:.1%})"
            for of_phase, first, later in by_nodes.values()
        ]
        print(f"{size_text(size)} | {' | '.join(cells)}")
    print("\none copy between two GPUs, us; graphs over streams above 1: graphs are faster:\n")
    print("bytes | plain copy | streams | graphs | graphs over streams\n---|---|---|---|---")
    for size, (plain, stream, graph) in engines.items():
        print(f"{size_text(size)} | {plain:.1f} | {stream:.1f} | {graph:.1f} | {stream / graph:.3f}")


def picture(phases: Phases, engines: dict[int, tuple[float, float, float]]) -> str:
    """Draws two panels: the times of the phases by number of nodes on logarithmic axes, and the speed of graphs relative to streams by
    size.
    """
    width, height, left, top = 380, 260, 60, 40
    parts: list[str] = []

    def text(x: float, y: float, words: str, anchor: str = "middle", fill: str = "#222") -> None:
        parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}">{words}</text>')

    def panel(at: float, title: str, x_title: str, xs: dict[int, str], ys: dict[float, str]) -> tuple[Any, Any]:
        low, high = math.log(min(xs)), math.log(max(xs))
        bottom, ceiling = min(ys), max(ys)

        def x_of(x: float) -> float:
            return at + left + (math.log(x) - low) / (high - low) * width

        def y_of(y: float) -> float:
            return top + height - (y - bottom) / (ceiling - bottom) * height

        text(at + left + width / 2, top - 16, title)
        text(at + left + width / 2, top + height + 40, x_title)
        for x, name in xs.items():
            text(x_of(x), top + height + 18, name)
        for y, name in ys.items():
            line = f'x1="{at + left}" x2="{at + left + width}" y1="{y_of(y):.1f}" y2="{y_of(y):.1f}"'
            parts.append(f'<line {line} stroke="#ddd"/>')
            text(at + left - 6, y_of(y) + 4, name, "end")
        return x_of, y_of

    def line(points: list[tuple[float, float]], colour: str) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.extend(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points)

    by_nodes = phases[max(phases)]
    values = [value for of_phase, _, _ in by_nodes.values() for value in of_phase.values() if value > 0]
    decades = range(math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))) + 1)
    marks = {float(decade): f"{10.0**decade:g} us" for decade in decades}
    x_of, y_of = panel(0, f"A graph's phases, copy of {size_text(max(phases))}", "copy nodes", {n: str(n) for n in by_nodes}, marks)
    for phase, colour in zip(PHASES, COLOURS, strict=True):
        shown = [(nodes, of_phase[phase]) for nodes, (of_phase, _, _) in by_nodes.items() if of_phase[phase] > 0]
        line([(x_of(nodes), y_of(math.log10(value))) for nodes, value in shown], colour)
        text(left + 6, top + 16 + 16 * PHASES.index(phase), phase, "start", colour)

    ratios = {size: stream / graph for size, (_, stream, graph) in engines.items()}
    ends = [math.floor(min(0.95, *ratios.values()) * 20), math.ceil(max(1.05, *ratios.values()) * 20)]
    marks = {step / 20: f"{step / 20:.2f}" for step in range(ends[0], ends[1] + 1)}
    x_of, y_of = panel(
        width + 2 * left, "Graphs over streams: above 1 graphs are faster", "MiB", {size: str(size >> 20) for size in ratios}, marks
    )
    line([(x_of(size), y_of(ratio)) for size, ratio in ratios.items()], COLOURS[0])
    whole = f'width="{2 * width + 4 * left}" height="{top + height + 56}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {whole} font-family="sans-serif" font-size="12">\n'
        '<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    folder = pathlib.Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    if sys.argv[1] != "--read":
        run(sys.argv[1], folder)
    phases = phases_of(results(folder, "graph_phases"))
    engines = {}
    for stream, graph in zip(results(folder, "stream"), results(folder, "graph"), strict=True):
        totals = [*(result["mpgpu"]["total"]["median"] for result in (stream, graph))]
        engines[stream["size"]] = (manner(stream)["total"]["median"] * 1e6, totals[0] * 1e6, totals[1] * 1e6)
    tables(phases, engines)
    (folder / "graphs.svg").write_text(picture(phases, engines))
    print(f"\n{folder / 'graphs.svg'}")


if __name__ == "__main__":
    main()
