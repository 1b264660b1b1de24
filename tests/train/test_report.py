"""The page of a run: made of its log alone, whole in itself, safe whatever a model writes."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from starscope.errors import InputError
from starscope.train.charts import Series, chart, number, thinned, ticks
from starscope.train.log import read_log
from starscope.train.report import last_measured, page, write_report

HOSTILE = "</pre><script>alert(1)</script>\x07\x00"
LOG = [
    {"step": 0, "run": {"steps": 20, "parameters": 1234567}},
    {"step": 10, "loss": 5.5, "learning_rate": 1e-3, "gradient_norm": 1.5, "tokens": 1000, "tokens_per_second": 5000},
    {"step": 10, "bits_per_byte": 3.25},
    {"step": 10, "induction": [0.1, 0.8], "lens_loss": [5.2, 4.9]},
    {"step": 10, "samples": [{"before": "def f", "text": HOSTILE, "after": "tail", "truth": "ha\n"}]},
    {"step": 10, "run": {"steps": 20, "parameters": 1234567}},
    {"step": 20, "loss": 4.25, "learning_rate": 5e-4, "gradient_norm": 1.2, "tokens": 2000, "tokens_per_second": 5100},
    {"step": 20, "bits_per_byte": 2.875},
    {"step": 20, "induction": [0.2, 0.9], "lens_loss": [4.8, 4.1]},
]
SETTINGS = {"name": "<b>Mine", "data": ["a.txt"], "to": "q8_0", "seed": 0, "start": ""}


class Tags(HTMLParser):
    """The tags of a page, with what they refer to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.references: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append(tag)
        self.references += [value for name, value in attrs if name in ("src", "href", "action", "data", "xlink:href")]


def figures(text: str) -> list[ET.Element]:
    return [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def test_the_page_loads_nothing_and_runs_nothing():
    text = page(LOG, SETTINGS)
    tags = Tags(text)
    assert not {"script", "link", "img", "iframe", "object", "embed", "form"} & set(tags.found)
    assert tags.references == []
    assert "url(" not in text
    assert "@import" not in text
    assert not re.search(r"https?://", text)
    assert "default-src 'none'" in text


def test_what_a_model_writes_stays_text():
    text = page(LOG, SETTINGS)
    assert "<script>" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert "␇␀" in text
    assert "&lt;b&gt;Mine" in text
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", text)


def test_every_quantity_of_the_log_has_its_figure():
    text = page(LOG, SETTINGS)
    for title in ("Loss", "Held-out text", "Learning rate", "Gradient norm", "Speed", "Induction score", "Lens loss"):
        assert f"<b>{title}</b>" in text
    assert len(figures(text)) == 7
    assert "1,234,567" in text
    assert "2.875" in text
    assert "<ins>&lt;/pre&gt;" in text
    without = page([line for line in LOG if "induction" not in line and "samples" not in line], SETTINGS)
    assert "microscope" not in without.lower()
    assert "What it writes" not in without


def test_a_resumed_run_is_marked_where_it_went_on():
    longer = [*LOG, {"step": 20, "run": {"steps": 30}}, {"step": 30, "loss": 4.0}]
    [mark] = figures(page(longer, SETTINGS))[0].findall("line[@class='mark']")
    assert mark.get("x1") == mark.get("x2")
    assert not figures(page(LOG, SETTINGS))[0].findall("line[@class='mark']")  # at the border


def test_points_lie_where_their_numbers_say():
    svg = figures(chart("T", [Series("a", [(0, 0.0), (50, 5.0), (100, 10.0)])], unit="u"))[0]
    circles = [(float(c.get("cx")), float(c.get("cy"))) for c in svg.findall("circle")]
    (x0, y0), (x1, y1), (x2, y2) = circles
    assert x1 == pytest.approx((x0 + x2) / 2, abs=0.1)
    assert y1 == pytest.approx((y0 + y2) / 2, abs=0.1)
    assert x0 < x2
    assert y0 > y2
    labels = {text.text: float(text.get("y")) - 4 for text in svg.findall("text[@text-anchor='end']")}
    assert labels["0"] == pytest.approx(y0, abs=0.1)
    assert labels["10"] == pytest.approx(y2, abs=0.1)


def test_a_value_that_is_no_number_leaves_a_gap():
    svg = figures(chart("T", [Series("a", [(0, 1.0), (1, math.nan), (2, 2.0), (3, 3.0)])], unit=""))[0]
    assert svg.find("path").get("d").count("M") == 2
    assert "nan" not in ET.tostring(svg).decode()
    assert chart("T", [Series("a", [(0, math.inf)])], unit="") == ""
    assert chart("T", [Series("a", [(5, 2.0)])], unit="") != ""


def test_ticks_are_round_and_inside():
    for low, high in ((0, 1), (0.37, 0.39), (1e-5, 3e-3), (2, 1999), (-3, 8), (5.5, 5.6)):
        found = ticks(low, high)
        assert 2 <= len(found) <= 11
        assert all(low - 1e-9 <= value <= high + 1e-9 for value in found)
        assert all(
            len(f"{value:.10g}".replace("-", "").replace(".", "").lstrip("0").rstrip("0")) <= 4 for value in found
        )
    assert [number(value) for value in (0.002, 12, 41000, 2.5e6)] == ["0.002", "12", "41k", "2.5M"]


def test_a_long_run_is_thinned_and_keeps_its_end():
    points = [(float(i), float(i)) for i in range(100_000)]
    kept = thinned(points, 500)
    assert len(kept) == 500
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert kept == sorted(kept)


def test_a_log_that_was_cut_is_read_up_to_the_cut(tmp_path):
    (tmp_path / "settings.json").write_text(json.dumps(SETTINGS))
    with pytest.raises(InputError):
        write_report(tmp_path)
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LOG) + '{"step": 21, "lo')
    assert read_log(tmp_path / "log.jsonl") == LOG
    path = write_report(tmp_path)
    assert path.read_text(encoding="utf-8") == page(LOG, SETTINGS)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.jsonl", "report.html", "settings.json"]


def test_what_is_no_text_is_written_by_its_number(tmp_path):
    (tmp_path / "settings.json").write_text(json.dumps({**SETTINGS, "data": ["na\udcffme.txt"]}))
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LOG))
    assert r"na\udcffme.txt" in write_report(tmp_path).read_text(encoding="utf-8")


def test_what_was_measured_last_is_read_from_the_log_where_there_is_one(tmp_path):
    assert last_measured(tmp_path / "log.jsonl") is None
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LOG))
    assert last_measured(tmp_path / "log.jsonl") == 2.875


def test_no_control_character_gets_into_the_page():
    hostile = "".join(map(chr, [*range(32), *range(0x7F, 0xA0)])) + "é\u2028"
    sample = {"before": hostile, "text": hostile, "after": hostile, "truth": hostile}
    text = page([{"step": 1, "samples": [sample]}], {"name": hostile, "data": [hostile]})
    assert not [c for c in text if (c < " " and c not in "\n\t") or "\x7f" <= c <= "\x9f"]
    assert r"\x85" in text
    assert "\u2421" in text
