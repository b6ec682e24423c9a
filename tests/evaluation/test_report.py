"""The HTML report, the picture, and the samples they show."""

from __future__ import annotations

import random
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sde_gym.errors import InputError
from sde_gym.evaluation.picture import layout
from sde_gym.evaluation.report import Sample, picture, write_report
from sde_gym.evaluation.samples import DepthColours, luminance, token_pieces

LAYERS = 24
NASTY = "</pre><script>alert('1')</script>&amp; \"quoted\" $headline <b>"
VOID = {"meta", "rect", "line", "br"}


def rows() -> list[dict[str, Any]]:
    plain = {"acceptance_rate": None, "mean_exit_depth": None, "mean_draft_length": None}
    return [
        {"method": "ar", "tokens_per_second": 100.0, "speedup": 1.0, "identical_to_ar": True, **plain},
        {"method": "generate", "tokens_per_second": 60.0, "speedup": 0.6, "identical_to_ar": True, **plain},
        {
            "method": "static", "exit_depth": 3, "draft_length": 4, "tokens_per_second": 160.0,
            "speedup": 1.6, "acceptance_rate": 0.75, "mean_exit_depth": 3.0, "mean_draft_length": 3.5,
            "identical_to_ar": True,
        },
        {
            "method": "lede", "tokens_per_second": 200.0, "speedup": 2.0, "speedup_range": [1.91, 2.07],
            "acceptance_rate": 0.8123, "mean_exit_depth": 2.5, "mean_draft_length": 4.25,
            "identical_to_ar": True,
        },
    ]  # fmt: skip


def results() -> dict[str, Any]:
    return {
        "rows": rows(),
        "settings": {"seed": 7, "depths": [1, 2, 3], "training": {"gamma": 0.95, "note": NASTY}},
        "hardware": {"cores": 2},
        "versions": {"torch": "2.13.0"},
        "seconds": 181.5,
        "command": "sde-gym demo --seed 7 && echo '<done>'",
    }


def sample() -> Sample:
    return Sample(
        prompt=f"def f(x):\n    # {NASTY}\n",
        tokens=["    ", "return", " x", NASTY, "\n", "é"],
        depths=[LAYERS, 1, 2, 4, LAYERS, 12],
        fates=["prefill", "accepted", "accepted", "accepted", "final", "accepted"],
        num_layers=LAYERS,
        title=NASTY,
    )


class Page(HTMLParser):
    """Checks nesting while it reads, and collects what the tests look at."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.code = ""  # text of the samples
        self.cells: list[list[str]] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.cells.append([])
        if tag == "td":
            self.cells[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag in VOID or self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data
        if "article" in self.open and "pre" in self.open:
            self.code += data
        if "td" in self.open:
            self.cells[-1][-1] += data


@pytest.fixture
def page(tmp_path: Path) -> Page:
    path = tmp_path / "new" / "report.html"
    write_report(path, results(), [sample()])
    return Page(path)


def test_page_shows_prompt_and_tokens_exactly(page: Page) -> None:
    shown = sample()
    assert page.code == shown.prompt + "".join(shown.tokens)


def test_page_runs_nothing_and_loads_nothing(page: Page, tmp_path: Path) -> None:
    assert not {"script", "link", "img", "iframe", "b"} & {tag for tag, _ in page.tags}
    attributes = {name for _, given in page.tags for name in given}
    assert not {"src", "href", "onload", "style"} & attributes
    source = (tmp_path / "new" / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|url\(|@import", source)


def test_every_token_has_its_depth_colour_and_tooltip(page: Page) -> None:
    spans = [given for tag, given in page.tags if tag == "span" and "token" in (given["class"] or "")]
    assert [given["class"] for given in spans] == [
        "token final blank", "token d1", "token d2", "token d4", "token final blank", "token d12",
    ]  # fmt: skip
    assert spans[1]["title"] == "depth 1 of 24: draft, accepted"
    assert spans[4]["title"] == "depth 24 of 24: from the final layer"


def test_legend_and_style_name_the_depths_that_occur(page: Page, tmp_path: Path) -> None:
    source = (tmp_path / "new" / "report.html").read_text(encoding="utf-8")
    assert re.findall(r"^\.d(\d+) \{ background: #[0-9a-f]{6}", source, re.MULTILINE) == ["1", "2", "4", "12"]
    legend = [given["class"] for tag, given in page.tags if tag == "span" and given.get("class") != "prompt"]
    assert legend[legend.index("label") :][:6] == ["label", "d1", "d2", "d4", "d12", "final"]


def test_table_holds_the_figures(page: Page) -> None:
    table = [line for line in page.cells if len(line) == 7]
    assert table == [
        ["Plain decoding (AR)", "100.0", "1.00×", "–", "–", "–", "yes"],
        ["Transformers generate", "60.0", "0.60×", "–", "–", "–", "yes"],
        ["Best static setting (3, 4)", "160.0", "1.60×", "75.0%", "3.00", "3.50", "yes"],
        ["LEDE (learned policy)", "200.0", "2.00×1.91 to 2.07", "81.2%", "2.50", "4.25", "yes"],
    ]


def test_bars_are_in_proportion_and_the_line_is_at_plain_decoding(page: Page) -> None:
    bars = [given for tag, given in page.tags if tag == "rect"]
    widths = np.array([float(given["width"] or "") for given in bars])
    np.testing.assert_allclose(widths / widths[0], [1.0, 0.6, 1.6, 2.0], atol=2e-3)
    (line,) = (given for tag, given in page.tags if tag == "line")
    assert float(line["x1"] or "") == pytest.approx(float(bars[0]["x"] or "") + widths[0], abs=0.11)
    assert [given["class"] for given in bars] == ["bar base", "bar", "bar", "bar best"]


def test_headline_and_facts(page: Page) -> None:
    assert "LEDE: 2.00× the speed of plain decoding, the same text" in page.text
    assert "The best static setting reaches 1.60×; LEDE is 1.25 times that." in page.text
    assert "sde-gym demo --seed 7 && echo '<done>'" in page.text
    assert ["1, 2, 3"] in page.cells
    assert [NASTY] in page.cells
    assert "training.gamma" in page.text
    assert ["181.5"] in page.cells


def test_a_difference_from_plain_decoding_is_said_loudly(tmp_path: Path) -> None:
    wrong = results()
    wrong["rows"][3] |= {"identical_to_ar": False, "identical_prompts": 39, "prompts": 40}
    write_report(tmp_path / "r.html", wrong, [])
    page = Page(tmp_path / "r.html")
    assert "but NOT the same text" in page.text
    assert "Different from plain decoding: LEDE (learned policy)." in page.text
    assert [line for line in page.cells if len(line) == 7][3][-1] == "no, 39 of 40 are"


def test_a_report_without_texts_or_lede(tmp_path: Path) -> None:
    write_report(tmp_path / "r.html", {"rows": [{"method": "mine"}]})
    page = Page(tmp_path / "r.html")
    assert "Measured speed of decoding" in page.text
    assert page.cells == [[], ["mine", "–", "–", "–", "–", "–", "–"]]


@pytest.mark.parametrize("bad", [{}, {"rows": []}, {"rows": [{"tokens_per_second": 1.0}]}])
def test_a_report_needs_rows(tmp_path: Path, bad: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="rows"):
        write_report(tmp_path / "r.html", bad)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": ["a"]}, "1 tokens, 2 depths and 2 fates"),
        ({"depths": [1, 25]}, r"depth 25; it must lie in 1\.\.24"),
        ({"depths": [0, 1]}, "depth 0"),
        ({"fates": ["accepted", "guessed"]}, "fate 'guessed'"),
    ],
)
def test_impossible_samples_are_refused(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"tokens": ["a", "b"], "depths": [1, 24], "fates": ["accepted", "final"]}
    Sample("p", **good, num_layers=24)
    with pytest.raises(InputError, match=message):
        Sample("p", **good | change, num_layers=24)


def test_samples_of_several_models_are_refused() -> None:
    one = Sample("p", ["a"], [1], ["final"], 2)
    with pytest.raises(InputError, match=r"\[2, 3\]"):
        DepthColours.of([one, Sample("p", ["a"], [1], ["final"], 3)])


@pytest.mark.parametrize("count", [1, 2, 5, 12, 30])
def test_colours_are_readable_and_fall_in_lightness(count: int) -> None:
    colours = DepthColours(range(1, count + 1), 40)
    backgrounds = [colours.background(depth) for depth in colours.depths]
    assert len(set(backgrounds)) == count
    light = [luminance(background) for background in backgrounds if background is not None]
    assert light == sorted(light, reverse=True)
    for depth, background in zip(colours.depths, light, strict=True):
        ink = luminance(colours.ink(depth) or "")
        contrast = (max(ink, background) + 0.05) / (min(ink, background) + 0.05)
        assert contrast >= 4.5  # WCAG 2, level AA
    assert colours.background(40) is None
    assert colours.ink(40) is None


def test_luminance_of_known_colours() -> None:
    assert luminance("#ffffff") == pytest.approx(1.0)
    assert luminance("#000000") == 0.0
    assert luminance("#ff0000") == pytest.approx(0.2126)
    assert luminance("#808080") == pytest.approx(0.2159, abs=1e-4)


def test_token_pieces_keep_characters_whole() -> None:
    random_ = random.Random(0)
    for _ in range(50):
        data = "".join(random_.choices("aé€😀\n ", k=12)).encode()
        cuts = sorted({0, len(data), *random_.sample(range(len(data)), 4)})
        vocabulary = [data[a:b] for a, b in pairwise(cuts)]

        def decode(ids: list[int], vocabulary: list[bytes] = vocabulary) -> str:
            return b"".join(vocabulary[i] for i in ids).decode("utf-8", "replace")

        pieces = token_pieces(decode, range(len(vocabulary)))
        assert len(pieces) == len(vocabulary)
        assert "".join(pieces) == data.decode()
        assert not any("\ufffd" in piece for piece in pieces)


def test_token_pieces_of_a_text_that_ends_within_a_character() -> None:
    def decode(ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")

    assert token_pieces(decode, [97, 0xE2, 0x82]) == ["a", "", "\ufffd"]
    assert token_pieces(decode, []) == []


def test_layout_wraps_and_cuts() -> None:
    shown = Sample("ab\n", ["cde", "f\n\tg", "h"], [1, 2, 3], ["accepted"] * 3, 3)
    assert layout([shown], columns=4, lines=10) == [
        (0, 0, "ab", None),
        (1, 0, "cde", 1),
        (1, 3, "f", 2),
        (2, 0, "    ", 2),
        (3, 0, "g", 2),
        (3, 1, "h", 3),
    ]
    assert layout([shown, shown], columns=4, lines=2) == layout([shown], columns=4, lines=2)


def test_picture_holds_the_colours_of_all_depths(tmp_path: Path) -> None:
    from matplotlib.image import imread

    path = tmp_path / "demo.png"
    picture([sample()], path)
    pixels = (imread(path)[..., :3] * 255).round().astype(int)
    found = {tuple(pixel) for pixel in pixels.reshape(-1, 3)}
    colours = DepthColours.of([sample()])
    for depth in colours.depths:
        background = colours.background(depth) or ""
        assert tuple(int(background[i : i + 2], 16) for i in (1, 3, 5)) in found
    assert list(tmp_path.iterdir()) == [path]
