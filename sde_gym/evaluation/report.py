"""The report of a run: one HTML page that needs nothing else.

Reads what `results.json` holds and a few generated texts. The page has no script and loads
nothing, so that it can be mailed or kept; its frame is `report.html` beside this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from sde_gym.errors import InputError
from sde_gym.evaluation.picture import picture
from sde_gym.evaluation.samples import DepthColours, Sample
from sde_gym.files import write_text

__all__ = ["Sample", "picture", "write_report"]

#: How the methods of `results.json` are called; others appear under their own name.
METHOD_NAMES = {
    "ar": "Plain decoding (AR)",
    "generate": "Transformers generate",
    "assistant_early_exit": "generate, assistant_early_exit",
    "prompt_lookup": "generate, prompt lookup",
    "static": "Best static setting",
    "draft_verify": "Draft & Verify",
    "lite": "LITE",
    "calm": "CALM",
    "del": "DEL",
    "adadecode": "AdaDecode",
    "dex": "DEX, in one process",
    "lede": "LEDE (learned policy)",
    "lede_no_depth": "LEDE without depth choice",
    "lede_no_length": "LEDE without length choice",
    "lede_speed": "LEDE, reward speed",
    "oracle": "Oracle (hindsight)",
}

COLUMNS = (  # key in a row, heading, format
    ("tokens_per_second", "Tokens/s", "{:.1f}"),
    ("speedup", "Speed-up over AR", "{:.2f}×"),
    ("acceptance_rate", "Acceptance rate", "{:.1%}"),
    ("mean_exit_depth", "Mean exit depth", "{:.2f}"),
    ("mean_draft_length", "Mean draft length", "{:.2f}"),
)

_FATE_WORDS = {
    "prefill": "first token, from the prompt's own pass",
    "accepted": "draft, accepted",
    "final": "from the final layer",
}


def write_report(path: Path, results: Mapping[str, Any], samples: Sequence[Sample] = ()) -> None:
    """Write the HTML report of one run, atomically.

    Args:
        path: the HTML file to write.
        results: what `results.json` holds. `rows`: one mapping per method with `method` and,
            where they apply, `tokens_per_second`, `speedup` (over AR in the same run),
            `acceptance_rate`, `mean_exit_depth`, `mean_draft_length`, `identical_to_ar`; optionally
            `label` (shown instead of the method's name), `exit_depth` and `draft_length` (of a
            static setting), `speedup_range`, `identical_prompts` and `prompts`. `command`: how to
            run it again. `started`, `seconds`, and every entry that is a mapping (`settings`,
            `hardware`, `versions`, ...) are shown as facts.
        samples: generated texts of one model, shown with each token coloured by its depth.

    Raises:
        InputError: there are no rows, or a row has no `method`.
    """
    rows = results.get("rows") or []
    if not rows or any("method" not in row for row in rows):
        raise InputError("a report needs `rows`, each with a `method`; run the benchmark first")
    template = Template(files("sde_gym.evaluation").joinpath("report.html").read_text(encoding="utf-8"))
    page = template.substitute(
        title="sde_gym: measured speed of self-speculative decoding",
        headline=_headline(rows),
        subtitle=_subtitle(rows),
        chart=_chart(rows),
        table=_table(rows),
        samples=_samples(samples),
        facts=_facts(results),
        palette=_palette(DepthColours.of(samples)) if samples else "",
    )
    write_text(path, page)


def method_name(row: Mapping[str, Any]) -> str:
    """What a row is called: its label or its method's name, with the setting (E, d) if it has one."""
    name = str(row.get("label") or METHOD_NAMES.get(row["method"], row["method"]))
    if row.get("exit_depth") is not None and row.get("draft_length") is not None:
        name += f" ({row['exit_depth']}, {row['draft_length']})"
    return name


def row_figures(row: Mapping[str, Any]) -> list[str]:
    """A row's entries for `COLUMNS`, as shown; a dash where a figure does not apply."""
    return [form.format(row[key]) if row.get(key) is not None else "–" for key, _, form in COLUMNS]


def row_identical(row: Mapping[str, Any]) -> str:
    """'yes', 'no' (with the number of prompts if known), or a dash if not compared."""
    identical = row.get("identical_to_ar")
    if identical is None:
        return "–"
    if not identical and row.get("identical_prompts") is not None and row.get("prompts"):
        return f"no, {row['identical_prompts']} of {row['prompts']} are"
    return "yes" if identical else "no"


def _row(rows: Sequence[Mapping[str, Any]], method: str) -> Mapping[str, Any] | None:
    return next((row for row in rows if row["method"] == method), None)


def _headline(rows: Sequence[Mapping[str, Any]]) -> str:
    lede = _row(rows, "lede")
    if lede is None or lede.get("speedup") is None:
        return "Measured speed of decoding"
    text = {True: "the same text", False: "but NOT the same text", None: "texts not compared"}
    return f"LEDE: {lede['speedup']:.2f}× the speed of plain decoding, {text[lede.get('identical_to_ar')]}"


def _subtitle(rows: Sequence[Mapping[str, Any]]) -> str:
    sentences = ["All methods were measured in one run, on one model and the same prompts."]
    lede, static = _row(rows, "lede"), _row(rows, "static")
    if lede and static and lede.get("speedup") and static.get("speedup"):
        ratio = lede["speedup"] / static["speedup"]
        sentences.append(
            f"The best static setting reaches {static['speedup']:.2f}×; LEDE is {ratio:.2f} times that."
        )
    compared = [row for row in rows if row.get("identical_to_ar") is not None]
    wrong = [method_name(row) for row in compared if not row["identical_to_ar"]]
    if wrong:
        sentences.append(f"Different from plain decoding: {', '.join(wrong)}.")
    elif compared:
        sentences.append("Every method compared produced exactly the tokens of plain decoding.")
    return escape(" ".join(sentences))


def _chart(rows: Sequence[Mapping[str, Any]]) -> str:
    """Horizontal bars of tokens per second, with a line at the speed of plain decoding."""
    measured = [row for row in rows if row.get("tokens_per_second")]
    if not measured:
        return ""
    width, step = 900, 40
    left = 20 + 7.4 * max(len(method_name(row)) for row in measured)  # a letter is about 7.4 units wide
    room = 175  # for the figures right of the longest bar
    scale = (width - left - room) / max(row["tokens_per_second"] for row in measured)
    bottom = step * len(measured) + 8
    parts = []
    for index, row in enumerate(measured):
        top, length = 8 + index * step, row["tokens_per_second"] * scale
        kind = {"lede": "bar best", "ar": "bar base"}.get(row["method"], "bar")
        figures = f"{row['tokens_per_second']:.1f} tokens/s"
        if row.get("speedup") is not None:
            figures += f" · {row['speedup']:.2f}×"
        parts.append(
            f'<text x="{left - 12:.1f}" y="{top + 19}" text-anchor="end">{escape(method_name(row))}</text>'
            f'<rect class="{kind}" x="{left:.1f}" y="{top}" width="{length:.1f}" height="28" rx="4"/>'
            f'<text class="figures" x="{left + length + 10:.1f}" y="{top + 19}">{figures}</text>'
        )
    base = _row(measured, "ar")
    if base is not None:
        x = left + base["tokens_per_second"] * scale
        parts.insert(0, f'<line class="rule" x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{bottom}"/>')
    label = escape(
        "; ".join(f"{method_name(row)}: {row['tokens_per_second']:.1f} tokens/s" for row in measured)
    )
    svg = f'<svg viewBox="0 0 {width} {bottom}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    return f'<section><h2>Speed</h2><div class="scroll">{svg}</div></section>'


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    head = "".join(f"<th scope='col'>{heading}</th>" for _, heading, _ in COLUMNS)
    lines = []
    for row in rows:
        cells = "".join(
            f"<td>{escape(figure)}{_range(row, key)}</td>"
            for figure, (key, _, _) in zip(row_figures(row), COLUMNS, strict=True)
        )
        identical = row_identical(row)
        kind = {"y": "yes", "n": "no"}.get(identical[0], "quiet")
        chosen = " class='chosen'" if row["method"] == "lede" else ""
        lines.append(
            f"<tr{chosen}><td>{escape(method_name(row))}</td>{cells}<td class='{kind}'>{identical}</td></tr>"
        )
    return (
        "<section><h2>Measured in this run</h2><div class='scroll'><table>"
        f"<thead><tr><th scope='col'>Method</th>{head}<th scope='col'>Identical to AR</th></tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
        "<p class='quiet'>Tokens/s: after the first token, which the prompt's own pass gives. Acceptance "
        "rate: accepted / proposed drafts. Mean exit depth: layers under the drafts, over the rounds that "
        "drafted. Mean draft length: proposals in such a round. (E, d): always exit depth E, d proposals."
        "</p></section>"
    )


def _range(row: Mapping[str, Any], key: str) -> str:
    """Lowest and highest speed-up of the repeats, if there were several."""
    low, high = (row.get("speedup_range") or (None, None)) if key == "speedup" else (None, None)
    return f"<br><span class='quiet'>{low:.2f} to {high:.2f}</span>" if low != high else ""


def _palette(colours: DepthColours) -> str:
    return "\n".join(
        f".d{depth} {{ background: {colours.background(depth)}; color: {colours.ink(depth)}; }}"
        for depth in colours.depths
    )


def _samples(samples: Sequence[Sample]) -> str:
    if not samples:
        return ""
    colours = DepthColours.of(samples)
    legend = "".join(f'<span class="d{depth}">{depth}</span>' for depth in colours.depths)
    articles = []
    for sample in samples:
        spans = "".join(
            _token(token, depth, fate, colours)
            for token, depth, fate in zip(sample.tokens, sample.depths, sample.fates, strict=True)
        )
        title = f"<h3>{escape(sample.title)}</h3>" if sample.title else ""
        articles.append(
            f'<article>{title}<pre><span class="prompt">{escape(sample.prompt)}</span>{spans}</pre></article>'
        )
    return (
        "<section><h2>Generated text, each token coloured by its exit depth</h2>"
        f'<div class="legend"><span class="label">Exit depth, of {colours.num_layers} layers</span>{legend}'
        '<span class="final">final layer</span></div>' + "".join(articles) + "</section>"
    )


def _token(token: str, depth: int, fate: str, colours: DepthColours) -> str:
    kind = "final" if depth == colours.num_layers else f"d{depth}"
    blank = "" if token.strip() else " blank"  # indentation is toned down, so that the code stands out
    tooltip = escape(f"depth {depth} of {colours.num_layers}: {_FATE_WORDS[fate]}")
    return f'<span class="token {kind}{blank}" title="{tooltip}">{escape(token)}</span>'


def _facts(results: Mapping[str, Any]) -> str:
    tables = {name: entry for name, entry in results.items() if isinstance(entry, Mapping) and entry}
    run = {key: results[key] for key in ("started", "seconds") if key in results}
    if run:
        tables["run"] = run
    sections = [
        f"<section><h2>{escape(name.replace('_', ' ').capitalize())}</h2><table class='facts'><tbody>"
        + "".join(
            f"<tr><th scope='row'>{escape(key)}</th><td>{escape(_show(value))}</td></tr>"
            for key, value in _flatten(entry)
        )
        + "</tbody></table></section>"
        for name, entry in tables.items()
    ]
    command = str(results.get("command") or "sde-gym demo")
    sections.append(
        f"<section><h2>Run it again</h2><pre class='command'>{escape(command)}</pre>"
        "<p class='quiet'>Tokens, acceptance and depths repeat with the same seed and versions; "
        "seconds depend on the machine.</p></section>"
    )
    return "\n".join(sections)


def _flatten(entry: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested mappings as pairs ('outer.inner', value)."""
    pairs: list[tuple[str, Any]] = []
    for key, value in entry.items():
        if isinstance(value, Mapping) and value:
            pairs += _flatten(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", value))
    return pairs


def _show(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ", ".join(_show(item) for item in value)
    return str(value)
