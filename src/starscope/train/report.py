"""A run as one page, report.html: what was learned, how, what it writes and what the microscope sees of it.

The page is made of the run's log and settings alone, loads nothing and runs no script: it can be sent to somebody.

    write_report(Path("out"))                 # out/log.jsonl, out/settings.json -> out/report.html
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from starscope.checkpoint.files import read_text
from starscope.train.charts import Series, chart
from starscope.train.log import LOG, Line, read_log, unwritable
from starscope.train.settings import FILE as SETTINGS

REPORT = "report.html"
CONTROLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | {0x7F: "\u2421"}
CONTROLS |= {code: f"\\x{code:x}" for code in range(0x80, 0xA0)}
MOST_SAMPLES = 12  # evaluations whose samples are shown, the last ones


def write_report(folder: Path) -> Path:
    """Make the page of the run in a folder. InputError without a log.

    DoesNotFitError or OutputError when it cannot be written. What is no text, such as half of the name of a file,
    stands there by its number.
    """
    log = read_log(folder / LOG)
    settings = json.loads(read_text(folder / SETTINGS))
    path, temporary = folder / REPORT, folder / f"{REPORT}.tmp"
    try:
        temporary.write_text(page(log, settings), encoding="utf-8", errors="backslashreplace")
        temporary.replace(path)
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)
    return path


def page(log: Sequence[Line], settings: Mapping[str, Any]) -> str:
    """The HTML text."""
    name = settings.get("name") or "A model in training"
    return PAGE.format(
        title=visible(name),
        summary=summary(log, settings),
        charts="".join(charts(log)),
        microscope=microscope(log),
        samples=samples(log),
        settings=settings_table(settings),
    )


def points(log: Sequence[Line], key: str) -> list[tuple[float, float]]:
    """(step, value) of a key."""
    return [(line["step"], float(line[key])) for line in log if line.get(key) is not None]


def last(log: Sequence[Line], key: str) -> Any:
    """The newest value of a key, None when there is none."""
    return next((line[key] for line in reversed(log) if key in line), None)


def last_measured(path: Path) -> float | None:
    """The newest bits per byte in a log, None when there are none."""
    return last(read_log(path), "bits_per_byte") if path.exists() else None


def charts(log: Sequence[Line]) -> Iterable[str]:
    """How the run went, a figure for each quantity that was measured."""
    marks = [line["step"] for line in log if "run" in line and line["step"]]
    rows = (
        ("Loss", "loss", "nats a token, training", False),
        ("Held-out text", "bits_per_byte", "bits per byte", False),
        ("Learning rate", "learning_rate", "", True),
        ("Gradient norm", "gradient_norm", "before clipping", True),
        ("Speed", "tokens_per_second", "tokens a second", True),
    )
    for title, key, unit, zero in rows:
        yield chart(title, [Series(title, points(log, key))], unit=unit, marks=marks, zero=zero)


def microscope(log: Sequence[Line]) -> str:
    """Induction scores and lens losses over training, a line for each block, with what they are."""
    figures = []
    for title, key, unit, zero in (
        ("Induction score", "induction", "the strongest head of each block; 1 is all of its attention", True),
        ("Lens loss", "lens_loss", "nats a token, when a block's output is read as the last one's", False),
    ):
        lines = [line for line in log if line.get(key)]
        blocks = max((len(line[key]) for line in lines), default=0)
        series = [Series(f"block {i}", [(line["step"], line[key][i]) for line in lines]) for i in range(blocks)]
        figures.append(chart(title, series, unit=unit, zero=zero))
    if not any(figures):
        return ""
    return f"<h2>Under the microscope</h2><p>{LOOKS}</p><div class=charts>{''.join(figures)}</div>"


def samples(log: Sequence[Line]) -> str:
    """What it wrote at the last evaluations, the newest first and open."""
    lines = [line for line in log if line.get("samples")][-MOST_SAMPLES:]
    if not lines:
        return ""
    made = []
    for number, line in enumerate(reversed(lines)):
        texts = "".join(f"<pre>{sample_text(sample)}</pre>" for sample in line["samples"])
        made.append(f"<details{' open' if number == 0 else ''}><summary>step {line['step']}</summary>{texts}</details>")
    return f"<h2>What it writes</h2><p>{WRITES}</p>{''.join(made)}"


def sample_text(sample: Mapping[str, Any]) -> str:
    """One sample: what was given, what the model made of it, and what stood there."""
    before, new, after = (visible(sample.get(part) or "") for part in ("before", "text", "after"))
    text = f"{before}<ins>{new}</ins>{after}"
    truth = sample.get("truth")
    return text + (f"\n<small>there stood: {visible(json.dumps(truth, ensure_ascii=False))}</small>" if truth else "")


def visible(text: str) -> str:
    """A text for the page: control characters, which HTML may not hold, as their pictures or numbers."""
    return escape(text.translate(CONTROLS))


def summary(log: Sequence[Line], settings: Mapping[str, Any]) -> str:
    """The numbers that matter, in a row."""
    facts = {
        "updates": last(log, "step"),
        "parameters": (last(log, "run") or {}).get("parameters"),
        "tokens seen": last(log, "tokens"),
        "loss, nats a token": last(log, "loss"),
        "bits per byte, held out, in windows that do not overlap": last(log, "bits_per_byte"),
        "file": str(settings.get("to", "")).upper() or None,
    }
    cells = [f"<div><b>{shown(value)}</b>{escape(name)}</div>" for name, value in facts.items() if value is not None]
    return "".join(cells)


def shown(value: Any) -> str:
    """A number with thousands apart; anything else as it is."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else escape(str(value))


def settings_table(settings: Mapping[str, Any]) -> str:
    """Every setting that says something."""
    rows = [(name, value) for name, value in settings.items() if value not in (None, "", [], ())]
    texts = {
        name: ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value) for name, value in rows
    }
    cells = "".join(f"<tr><td>{escape(name.replace('_', ' '))}<td>{visible(text)}" for name, text in texts.items())
    return f"<table>{cells}</table>"


LOOKS = (
    "Induction score: over random tokens that are repeated once, how much of its attention a head pays, at each token "
    "of the second half, to what followed that token in the first. Heads that have learned to continue as before score "
    "high. Lens loss: how well the next token can be read from each block's output already; the last block's is the "
    "model's own."
)
WRITES = "The same beginnings and holes at every evaluation; what the model wrote is marked."

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ --bg: #fdfdfc; --fg: #1c1c1a; --soft: #6d6d68; --line: #e3e2dd; --new: #d8f0df }}
@media (prefers-color-scheme: dark) {{
  :root {{ --bg: #171716; --fg: #ebeae6; --soft: #9b9a94; --line: #34332f; --new: #1f4a30 }}
}}
body {{ margin: 2rem auto; max-width: 1180px; padding: 0 1rem; background: var(--bg); color: var(--fg);
  font: 15px/1.5 system-ui, sans-serif }}
h1, h2 {{ line-height: 1.2; margin: 2rem 0 .6rem }}
p {{ max-width: 46rem; color: var(--soft) }}
.facts {{ display: flex; flex-wrap: wrap; gap: 1rem 2.5rem }}
.facts div {{ color: var(--soft); font-size: 13px }}
.facts b {{ display: block; color: var(--fg); font-size: 22px; font-weight: 600 }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 1.2rem }}
figure {{ margin: 0 }}
figcaption {{ font-size: 13px; color: var(--soft) }} figcaption b {{ color: var(--fg) }}
svg {{ width: 100%; height: auto }}
svg text {{ fill: var(--soft); font-size: 11px }}
.grid {{ stroke: var(--line) }} .mark {{ stroke: var(--soft); stroke-dasharray: 3 3 }}
path {{ fill: none; stroke-width: 1.6 }}
.c0 {{ stroke: #2f6fde; fill: #2f6fde; background: #2f6fde }}
.c1 {{ stroke: #d9822b; fill: #d9822b; background: #d9822b }}
.c2 {{ stroke: #2c9a5b; fill: #2c9a5b; background: #2c9a5b }}
.c3 {{ stroke: #b3447f; fill: #b3447f; background: #b3447f }}
.c4 {{ stroke: #7a61c9; fill: #7a61c9; background: #7a61c9 }}
.c5 {{ stroke: #17919b; fill: #17919b; background: #17919b }}
.c6 {{ stroke: #8c7a2b; fill: #8c7a2b; background: #8c7a2b }}
.c7 {{ stroke: #c94b4b; fill: #c94b4b; background: #c94b4b }}
path[class] {{ fill: none }}
.legend {{ display: flex; flex-wrap: wrap; gap: .2rem .9rem; font-size: 12px; color: var(--soft); min-height: 1.2em }}
.legend i {{ display: inline-block; width: .8em; height: .8em; margin-right: .3em; border-radius: 2px }}
pre {{ border: 1px solid var(--line); border-radius: 6px; padding: .7rem; overflow-x: auto; font-size: 13px;
  white-space: pre-wrap }}
ins {{ background: var(--new); text-decoration: none }}
small, td:first-child {{ color: var(--soft) }}
table {{ border-collapse: collapse; font-size: 13px }} td {{ padding: .15rem 1.2rem .15rem 0; vertical-align: top }}
</style>
<h1>{title}</h1>
<div class="facts">{summary}</div>
<h2>How it went</h2>
<div class="charts">{charts}</div>
{microscope}
{samples}
<h2>What was asked for</h2>
{settings}
</html>
"""
