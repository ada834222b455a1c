"""Draws step.svg for log.hlo: nested boxes for the loops and branches of an update, each with its
matmuls and collectives, counted as in the plan (cost_model.py).
"""

from collections.abc import Callable
from dataclasses import replace
from html import escape
from typing import NamedTuple

from chips import CHIPS, chip_of
from config import Config
from cost_model import Cost, bodies, count_cost, flatten, trace_step, work_shares

COLOURS = dict(slice="#b07aa1", dp="#4e79a7", pp="#f28e2b", tp="#59a14f")
# Titles for the functions that are bodies of loops in the step; others keep their names.
WORDS = dict(
    per_device="loss and gradient on one device",
    update_parts="Muon on one device",
    accumulate="accumulation step",
    tick="tick of the pipeline",
    work_and_choose="work in lock step",  # with mesh.skip_bubbles False
    block="layers",
    add_chunk="chunk of the logits",
    visit_next="block of attention",
    add_tile="tile of experts",
    step="step of Muon",
) | {"<lambda>": "part"}  # of what lax.map divides
WIDTH, LINE, INDENT = 760, 20, 16  # pixels


class Box(NamedTuple):
    title: str
    own: Cost
    """Its work in an update, without that of the boxes inside."""
    inside: list["Box"]


def boxes_in(jaxpr, cfg: Config, chip, times: float = 1, shares=()) -> tuple[Cost, list[Box]]:
    """(total cost, boxes) of the loops and branches in a jaxpr that an update runs `times` times,
    without those that have no matmuls and collectives.  shares: busy_shares of count_cost."""
    total, boxes, shares = Cost(), [], iter(shares)
    for op in flatten(jaxpr).ops:
        share = next(shares, 1) if op.name == "cond" else 1
        for body, n in bodies(op):
            runs, inner_shares = times * n * share, work_shares(n, cfg)
            own = Cost()
            own.add(count_cost(body, cfg, chip, inner_shares), runs)
            if not own.flops and not own.calls:
                continue
            total.add(own, 1)
            inner, inside = boxes_in(body, cfg, chip, runs, inner_shares)
            own.add(inner, -1)
            boxes.append(Box(title(body, op, runs), own, inside))
    return total, boxes


def title(body, op, runs: float) -> str:
    name = body.debug_info.func_name
    words = WORDS.get(name, name)
    if name == "block":
        is_backward = "transpose" in str(op.eqn.source_info.name_stack)
        words += " backward" if is_backward else " forward"
    return words if runs == 1 else f"{words}, {runs:,.0f} times"


def short(x: float) -> str:
    """x with three digits, or as many as it has before the point."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def with_prefix(x: float, unit: str) -> str:
    for prefix, size in dict(T=1e12, G=1e9, M=1e6, k=1e3).items():
        if x >= size:
            return f"{short(x / size)} {prefix}{unit}"
    return f"{short(x)} {unit}"


def lines(cost: Cost, chip) -> list[tuple[str, str, float]]:
    """(text, axis or "", bytes received) of a box's matmuls and collectives.  chip: None if its
    speeds are unknown."""

    def took(seconds: float) -> str:
        return f", {short(1e3 * seconds)} ms" if chip else ""

    rows = []
    if cost.flops > 0.5:
        rows = [(f"matmuls: {with_prefix(cost.flops, 'FLOP')}{took(cost.matmul_seconds)}", "", 0)]
    for (name, axis), n in sorted(cost.received.items(), key=lambda x: x[0][::-1]):
        if n > 0.5:
            what = f"{axis} {name.removesuffix('_invariant')}: {cost.calls[name, axis]:,.0f} calls"
            seconds = n / chip.speed(axis) if chip else 0
            rows += [(f"{what}, {with_prefix(n, 'B')}{took(seconds)}", axis, n)]
    return rows


def draw(box: Box, chip, most: float, x: int, y: int) -> tuple[list[str], int]:
    """(SVG elements of a box at x, y; the y below it).  most: bytes of the widest bar."""
    width, top, texts = WIDTH - 2 * x, y, []
    y += LINE
    texts += [f'<text x="{x + 8}" y="{y - 5}" font-weight="bold">{escape(box.title)}</text>']
    for text, axis, n in lines(box.own, chip):
        if axis:
            bar = max(2, round(0.6 * width * n / most))
            size, fill = f'width="{bar}" height="{LINE - 4}"', COLOURS[axis]
            texts += [f'<rect x="{x + 8}" y="{y + 2}" {size} fill="{fill}" opacity="0.45"/>']
        y += LINE
        texts += [f'<text x="{x + 14}" y="{y - 5}">{escape(text)}</text>']
    for inner in box.inside:
        elements, y = draw(inner, chip, most, x + INDENT, y + 6)
        texts += elements
    y += 6
    frame = f'<rect x="{x}" y="{top}" width="{width}" height="{y - top}" rx="4"'
    return [f'{frame} fill="white" stroke="#888"/>', *texts], y


def step_svg(step_jaxpr: Callable, cfg: Config, device_kind: str) -> str:
    """The text of the SVG file; with times from the data sheet where the device is one of CHIPS.
    step_jaxpr: as in trace_step."""
    chip = chip_of(device_kind)
    if device_kind == "cpu" and cfg.train.attention == "auto":  # the trace is for an accelerator
        cfg = replace(cfg, train=replace(cfg.train, attention="xla"))
    traced_for = chip or CHIPS["a100" if device_kind.startswith("NVIDIA") else "v5p"]
    jaxpr = trace_step(step_jaxpr, cfg, traced_for)
    _, boxes = boxes_in(jaxpr, cfg, traced_for)

    def received(box: Box) -> float:
        return max([1, *box.own.received.values(), *map(received, box.inside)])

    speeds = f"; times by the data sheet, if nothing overlaps ({chip.kind})" if chip else ""
    note = f"{cfg.mesh}: work and received bytes of a device{speeds}"
    elements, y = [f'<text x="10" y="20">{escape(note)}</text>'], 24
    for box in boxes:
        drawn, y = draw(box, chip, max(map(received, boxes)), 10, y + 6)
        elements += drawn
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 10}"'
    style = 'font-family="sans-serif" font-size="13">'
    back = f'<rect width="{WIDTH}" height="{y + 10}" fill="#f4f4f4"/>'
    return "\n".join([f"{head} {style}", back, *elements, "</svg>"]) + "\n"
