"""Renders the report as one HTML file: styles, scripts and data inline, nothing from the network.

`writing.py` calls it. Data is JSON in a block that no browser runs, in plain ASCII without angle brackets or
ampersands, so that no model output can close the block. The page's security policy admits exactly the two scripts
below, by hash: even if text ever became HTML, it could not become a program.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
from pathlib import Path

from paceline.report.charts import DARK, ChartData
from paceline.report.texts import all_visible, visible

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ("uPlot.iife.min.js", "page.js")
STYLES = ("uPlot.min.css", "page.css")


def render(title: str, data: ChartData) -> str:
    """The HTML of a report."""
    scripts, style = [asset(name) for name in SCRIPTS], "".join(asset(name) for name in STYLES)
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {_hash(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{html.escape(visible(title), quote=True).encode('ascii', 'xmlcharrefreplace').decode()}</title>",
        f"<style>{style}</style></head>",
        '<body><main id="page"></main>',
        f'<script type="application/json" id="data">{to_json(all_visible(data | {"dark": DARK}))}</script>',
        *(f"<script>{script}</script>" for script in scripts),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def to_json(data: ChartData) -> str:
    """JSON that is safe anywhere in a page."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@functools.cache
def asset(name: str) -> str:
    """A file of the page; it must not contain the end tag of its element."""
    text = (ASSETS / name).read_text(encoding="utf-8")
    assert "</script" not in text and "</style" not in text, name
    return text


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
