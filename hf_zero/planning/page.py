"""A plan as one self-contained HTML page: stacked bars of memory with the limit, and the reasons."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from hf_zero.planning.choose import RankedPlans
from hf_zero.planning.estimate import Estimate, gigabytes
from hf_zero.planning.memory import KINDS
from hf_zero.planning.show import cells, chosen_batch, config_text, reasoning, title, titles

COLOURS = dict(zip(KINDS, ("#0072b2", "#e69f00", "#d55e00", "#56b4e9", "#999999", "#009e73")))
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 0 auto; padding: 1rem; color: #1a1a1a;
  background: #ffffff }
h1 { font-size: 1.4rem; margin: .5rem 0 } h2 { font-size: 1.15rem; margin: 1.6rem 0 .4rem }
.row { display: grid; grid-template-columns: minmax(0, 17rem) minmax(0, 1fr) 6.5rem; gap: .6rem; align-items: center;
  padding: .2rem .3rem }
.row .name { overflow-wrap: anywhere } .row .total { text-align: right; font-variant-numeric: tabular-nums }
.no { color: #6b6b6b } .chosen { background: #e7f5ee; font-weight: 600 }
.bar { position: relative; height: 1.3rem; background: #f2f2f2 }
.bar .part { position: absolute; top: 0; bottom: 0 }
.bar .limit { position: absolute; top: -.25rem; bottom: -.25rem; width: 2px; background: #b00020 }
.bar .cut { position: absolute; top: 0; bottom: 0; right: 0; width: 1.4rem; background: #ffffff; color: #1a1a1a;
  text-align: center; line-height: 1.3rem; border-left: 2px dashed #1a1a1a }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1rem; padding: 0; list-style: none }
.legend i { display: inline-block; width: .9rem; height: .9rem; margin-right: .35rem; vertical-align: -.1rem }
pre { background: #f6f6f6; padding: .8rem; overflow-x: auto } ol { padding-left: 1.4rem }
li { overflow-wrap: anywhere } .scroll { overflow-x: auto }
table { border-collapse: collapse; width: 100% } td, th { padding: .2rem .5rem; text-align: right;
  border-bottom: 1px solid #ddd; vertical-align: top } td { white-space: nowrap }
td:first-child, th:first-child { text-align: left; white-space: normal; min-width: 9rem } code { white-space: nowrap }
@media (max-width: 40rem) { .row { grid-template-columns: 1fr; gap: .1rem } .row .total { text-align: left } }
"""


def as_html(plan: RankedPlans) -> str:
    return "\n".join(_page(plan)) + "\n"


def _page(plan: RankedPlans) -> Iterator[str]:
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{escape(plan.model.name)}: memory and speed</title><style>{_STYLE}</style></head><body>"
    yield f"<h1>{escape(title(plan))}</h1>"
    yield from _answer(plan)
    yield "<h2>Memory of one device at the peak of a step</h2>"
    parts = [f'<li><i style="background:{COLOURS[kind]}"></i>{kind}</li>' for kind in KINDS]
    limit = gigabytes(plan.hardware.limit)
    yield f'<ul class="legend">{"".join(parts)}<li><i style="background:#b00020"></i>limit: {limit}</li></ul>'
    scale = _scale(plan)
    for each in plan.rows:
        yield from _bar(each, plan, scale)
    yield "<h2>Why</h2><ol>"
    yield from (f"<li>{escape(line)}</li>" for line in reasoning(plan))
    yield "</ol><h2>All figures</h2>"
    yield from _table(plan)
    if plan.notes:
        yield "<h2>Assumed</h2><ul>" + "".join(f"<li>{escape(note)}</li>" for note in plan.notes) + "</ul>"
    yield "</body></html>"


def _answer(plan: RankedPlans) -> Iterator[str]:
    chosen = plan.chosen
    if chosen is None:
        yield f"<p><strong>{escape(reasoning(plan)[-1])}</strong></p>"
        return
    yield f"<p>Use <strong>{escape(chosen.candidate.name)}</strong>; start the script with"
    yield f"{_flags(chosen.training.flags(chosen.candidate))} and this ds.json:</p>"
    yield f"<pre>{escape(config_text(chosen.config))}</pre>"
    for words in (*chosen.training.more_words(plan.hardware.ranks), chosen_batch(plan)):
        yield f"<p>{escape(words)}</p>" if words else ""


def _flags(text: str) -> str:
    """Format flags so that lines only break between them."""
    flags = text.removeprefix("--").split(" --")
    return " ".join(f"<code>--{escape(flag)}</code>" for flag in flags)


def _scale(plan: RankedPlans) -> float:
    """Return the bytes of a full bar: enough for all that fit, the limit, and most of the others."""
    sizes = sorted(each.memory.device_total for each in plan.rows)
    middle = sizes[len(sizes) // 2] if sizes else 0
    fitting = [each.memory.device_total for each in plan.rows if each.fits]
    return max(1.0, 1.6 * plan.hardware.limit, middle, *fitting)


def _bar(each: Estimate, plan: RankedPlans, scale: float) -> Iterator[str]:
    yield f'<div class="row {_kind(each, plan)}"><div class="name">{escape(each.candidate.name)}</div><div class="bar">'
    start = 0.0
    for name in KINDS:
        size = each.memory.device.get(name, 0)
        width = min(size, max(0.0, scale - start)) / scale * 100
        if width > 0:
            hint = f"{name}: {gigabytes(size)}"
            place = f"left:{start / scale * 100:.2f}%;width:{width:.2f}%;background:{COLOURS[name]}"
            yield f'<div class="part" title="{hint}" style="{place}"></div>'
        start += size
    if start > scale:
        yield f'<div class="cut" title="{gigabytes(each.memory.device_total)}: longer than drawn">&#8811;</div>'
    yield f'<div class="limit" style="left:{plan.hardware.limit / scale * 100:.2f}%"></div></div>'
    mark = "" if each.fits else " &#10007;"
    yield f'<div class="total">{gigabytes(each.memory.device_total)}{mark}</div></div>'


def _table(plan: RankedPlans) -> Iterator[str]:
    names = ("candidate", *titles(plan), "bound by")
    yield '<div class="scroll"><table><tr>' + "".join(f"<th>{name}</th>" for name in names) + "</tr>"
    for each in plan.rows:
        row = "".join(f"<td>{escape(cell)}</td>" for cell in cells(each, plan))
        yield f'<tr class="{_kind(each, plan)}">{row}</tr>'
    yield "</table></div>"


def _kind(each: Estimate, plan: RankedPlans) -> str:
    """The class of a candidate's bar and row in the style sheet."""
    return "chosen" if each is plan.chosen else "" if each.fits else "no"
