"""From raw rows to the tables of the decoding benchmark: per method, per task, as Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from sde_gym.decoding.result import NEAR_TIE
from sde_gym.evaluation.benchmark import Measurement, differing, speedups, summarise_rows
from sde_gym.models.layered import LayeredModel

#: Similarity of two texts, 0..1.
Similarity = Callable[[str, str], float]

#: Simulated speed-ups: by task, None for all of them, then by method.
Simulated = Mapping[str | None, Mapping[str, float]]

MARKDOWN_COLUMNS = (  # key in a row, heading, format
    ("tokens_per_second", "tokens/s", "{:.1f}"),
    ("prefill_seconds", "prefill, s", "{:.3f}"),
    ("speedup", "over `ar`", "{:.2f}×"),
    ("speedup_over_generate", "over `generate`", "{:.2f}×"),
    ("simulated_speedup", "simulated", "{:.2f}×"),
    ("acceptance_rate", "accepted", "{:.1%}"),
    ("mean_exit_depth", "exit depth", "{:.2f}"),
    ("mean_draft_length", "draft", "{:.2f}"),
    ("tokens_per_round", "tokens/round", "{:.2f}"),
    ("controller_share", "controller", "{:.1%}"),
    ("idle_head_share", "idle heads", "{:.1%}"),
    ("rouge_l_ar", "ROUGE-L to `ar`", "{:.3f}"),
    ("rouge_l_reference", "ROUGE-L to reference", "{:.3f}"),
)

#: The range that is shown in parentheses behind a figure.
_RANGES = {"tokens_per_second": "tokens_per_second_range", "speedup": "speedup_range"}


class Texts:
    """Generated texts: what they say, how alike they are, and where they part.

    Args:
        model: that generated them.
        prompts: token ids by prompt id.
        references: reference texts by prompt id, for some or none.
        similarity: see `rouge_l`; None leaves texts uncompared.
    """

    def __init__(
        self,
        model: LayeredModel,
        prompts: Mapping[str, list[int]],
        references: Mapping[str, str],
        similarity: Similarity | None,
    ) -> None:
        self._model = model
        self._prompts = prompts
        self._references = references
        self._similarity = similarity
        self._compared: dict[tuple[str, str], float] = {}
        self._gaps: dict[tuple[int, ...], float] = {}

    def likeness(self, rows: Iterable[Measurement], others: Mapping[tuple[str, int], str]) -> float | None:
        """Mean similarity of rows' texts to the others, by (prompt, repeat); None if there is none."""
        if self._similarity is None:
            return None
        found = []
        for row in rows:
            other = others.get((row.prompt, row.repeat))
            if other is not None:
                pair = (self._model.decode(list(row.output)), other)
                if pair not in self._compared:
                    self._compared[pair] = 1.0 if pair[0] == pair[1] else self._similarity(*pair)
                found.append(self._compared[pair])
        return float(np.mean(found)) if found else None

    def of_method(self, rows: Iterable[Measurement], method: str) -> dict[tuple[str, int], str]:
        """A method's texts by (prompt, repeat)."""
        return {(r.prompt, r.repeat): self._model.decode(list(r.output)) for r in rows if r.method == method}

    def references(self, rows: Iterable[Measurement]) -> dict[tuple[str, int], str]:
        """The reference texts by (prompt, repeat)."""
        return {
            (r.prompt, r.repeat): self._references[r.prompt] for r in rows if r.prompt in self._references
        }

    def differences(self, rows: Sequence[Measurement], baseline: str = "ar") -> list[dict[str, Any]]:
        """Where texts part from the baseline's, and whether the final layer nearly ties there.

        Returns:
            For each method and prompt with another text: `method`, `prompt`, `task`, `position` (of the
            first token that differs, from 0), `gap` (between the two best final logits there) and
            `near_tie` (a gap below `NEAR_TIE`, which another order of summation may turn).
        """
        expected = {(row.prompt, row.repeat): row.output for row in rows if row.method == baseline}
        found = []
        for (method, prompt), row in differing(rows, baseline).items():
            other = expected[prompt, row.repeat]
            position = parting(row.output, other)
            gap = self.gap((*self._prompts[prompt], *other[:position]))
            found.append(
                {"method": method, "prompt": prompt, "task": row.task, "position": position, "gap": gap,
                 "near_tie": gap < NEAR_TIE}
            )  # fmt: skip
        return found

    def gap(self, ids: tuple[int, ...]) -> float:
        """Between the two best logits of the final layer after these tokens."""
        if ids not in self._gaps:
            sequence = self._model.sequence(len(ids))
            sequence.append(list(ids))
            sequence.advance(self._model.num_layers)
            best = sequence.score(self._model.num_layers)[0].float().topk(2).values
            self._gaps[ids] = float(best[0] - best[1])
        return self._gaps[ids]


def parting(text: Sequence[int], other: Sequence[int]) -> int:
    """Position of the first token that differs; the shorter length where one is the other's beginning."""
    shorter = min(len(text), len(other))
    return next((n for n in range(shorter) if text[n] != other[n]), shorter)


def rouge_l() -> Similarity:
    """ROUGE-L F1 as `rouge-score` computes it, without stemming.

    Raises:
        ModuleNotFoundError: `rouge-score` is not installed.
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"], use_stemmer=False)
    return lambda text, reference: float(scorer.score(reference, text)["rougeL"].fmeasure)


def method_rows(
    rows: Sequence[Measurement],
    texts: Texts,
    simulated: Simulated,
    settings: Mapping[str, Mapping[str, Any]],
    task: str | None = None,
    sampled: bool = False,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The table of one task, or of all together.

    Args:
        rows: raw rows, of all tasks.
        texts: compares and decodes.
        simulated: simulated speed-ups.
        settings: further columns by method, such as `exit_depth` and `draft_length`.
        task: None for all.
        sampled: texts are draws, so that none has to be identical to another.

    Returns:
        `summarise_rows` with the further columns, one row a method; and where texts differ.
    """
    chosen = [row for row in rows if task is None or row.task == task]
    differences = [] if sampled else texts.differences(chosen)
    baseline, references = texts.of_method(chosen, "ar"), texts.references(chosen)
    table = summarise_rows(chosen)
    for entry in table:
        method = entry["method"]
        own = [row for row in chosen if row.method == method]
        ratios = speedups(chosen, method, "generate")
        near = sum(found["near_tie"] for found in differences if found["method"] == method)
        entry |= {
            "near_ties": None if sampled else near,
            "speedup_over_generate": float(np.mean(ratios)) if ratios else None,
            "simulated_speedup": simulated.get(task, {}).get(method),
            "rouge_l_ar": texts.likeness(own, baseline),
            "rouge_l_reference": texts.likeness(own, references),
            **settings.get(method, {}),
        }
        if sampled:
            entry["identical_to_ar"] = entry["identical_prompts"] = None
    return table, differences


def markdown(results: Mapping[str, Any]) -> str:
    """The tables of a run: all prompts together, then task by task, and what was measured where."""
    tables: dict[str, list[dict[str, Any]]] = {"All prompts": results["rows"]}
    if len(results["tasks"]) > 1:
        tables |= {f"Task: {task}": rows for task, rows in results["tasks"].items()}
    shown = [
        column
        for column in MARKDOWN_COLUMNS
        if any(row.get(column[0]) is not None for row in results["rows"])
    ]
    parts = ["# Decoding, measured"]
    for title, rows in tables.items():
        parts += [f"## {title}", _table(rows, shown)]
    machine, settings = results["hardware"], results["settings"]
    drawn = f"temperature {settings['temperature']:g}" if settings["temperature"] > 0 else "greedy"
    parts.append(
        f"{results['prompts']['measured']} prompts, at most {settings['max_new_tokens']} tokens each, "
        f"{drawn}, {settings['repeats']} repeats; model {results['model']['name']}, {machine['dtype']}, "
        f"{machine['cpu']}, {machine['threads']} threads. In parentheses behind a figure: lowest and highest "
        "of the repeats. Prefill is not in the rates."
    )
    parts += list(results["notes"])
    parts.append(f"```bash\n{results['command']}\n```")
    return "\n\n".join(parts) + "\n"


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[tuple[str, str, str]]) -> str:
    headings = ["method", *(heading for _, heading, _ in columns), "same text"]
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)]]
    for row in rows:
        lines.append([_name(row), *(_cell(row, key, form) for key, _, form in columns), _same(row)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _name(row: Mapping[str, Any]) -> str:
    """The method and, where it has one, its setting."""
    setting = row.get("exploration_set") or [row.get("exit_depth"), row.get("draft_length")]
    return f"`{row['method']}`" + (f" ({', '.join(map(str, setting))})" if None not in setting else "")


def _cell(row: Mapping[str, Any], key: str, form: str) -> str:
    value = row.get(key)
    if value is None or not math.isfinite(value):
        return "–"
    ends = row.get(_RANGES.get(key, ""))
    if ends is None or ends[0] == ends[1]:
        return form.format(value)
    number = form.removesuffix("×")
    return f"{form.format(value)} ({number.format(ends[0])}–{number.format(ends[1])})"


def _same(row: Mapping[str, Any]) -> str:
    """How many texts are the baseline's, and how many of the others part from it at a near-tie."""
    if row["identical_to_ar"] is None:
        return "–"
    text = f"{row['identical_prompts']} of {row['prompts']}"
    return text + (f", {row['near_ties']} near-ties" if not row["identical_to_ar"] else "")
