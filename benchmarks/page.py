"""A page of headings, paragraphs, tables and charts, as Markdown or as one HTML file; knows nothing of results."""

import html
from collections.abc import Sequence
from typing import Any

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; margin: .8rem 0; font-size: .9rem; } svg { width: 100%; max-width: 46rem; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #ddd; text-align: right; }
td { white-space: nowrap; } th:first-child, td:first-child { text-align: left; }
.verdict { border-left: 4px solid #2f6f9f; padding: .4rem .9rem; background: #f3f6f9; } .mark { color: #a33; }
"""

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
# What a page is made of: (kind, content): "h1", "h2", "p", "mark", "verdict" with text, "table", "svg".
Block = tuple[str, Any]


def as_markdown(blocks: Sequence[Block]) -> str:
    """Charts are left out: their figures stand in the tables."""
    forms = {"h1": "# {}", "h2": "## {}", "p": "{}", "mark": "- mark: {}", "verdict": "**{}**"}
    out = []
    for kind, content in blocks:
        if kind == "table":
            head, rows = content
            cells = [head, ["---"] * len(head), *rows]
            out.append("\n".join("| " + " | ".join(str(c).replace("|", "\\|") for c in row) + " |" for row in cells))
        elif kind in forms:
            out.append(forms[kind].format(content))
    return "\n\n".join(out) + "\n"


def as_html(blocks: Sequence[Block]) -> str:
    """One page; no script, no other file, no network."""
    tags = {"h1": "h1", "h2": "h2", "p": "p", "mark": 'p class="mark"', "verdict": 'p class="verdict"'}
    body = []
    for kind, content in blocks:
        if kind == "svg":
            body.append(f"<div>{content}</div>" if content else "")
        elif kind == "table":
            head, rows = content
            body.append("<table>" + row_of("th", head) + "".join(row_of("td", row) for row in rows) + "</table>")
        else:
            body.append(f"<{tags[kind]}>{html.escape(content)}</{tags[kind].split()[0]}>")
    title = html.escape(next((str(text) for kind, text in blocks if kind == "h1"), "report"))
    head_part = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head_part}<style>{STYLE}</style></head><body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def row_of(tag: str, cells: Sequence[Any]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"
