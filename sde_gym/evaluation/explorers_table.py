"""What `sde-gym bench explorers` measured, as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def markdown(results: Mapping[str, Any]) -> str:
    """The results to read."""
    settings, machine = results["settings"], results["hardware"]
    lines = [
        "# Explorers, measured",
        "",
        "| method | processes × threads | tokens/s | over `ar` | same text |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in results["rows"]:
        rate, rates = row["tokens_per_second"], row["tokens_per_second_range"]
        ratio, ratios = row["speedup"], row["speedup_range"]
        shown = [f"`{row['method']}`", f"{row['processes']} × {row['threads']}"]
        shown += ["–", "–"] if rate is None or ratio is None else [
            f"{rate:.1f} ({rates[0]:.1f}–{rates[1]:.1f})", f"{ratio:.2f}× ({ratios[0]:.2f}–{ratios[1]:.2f})"
        ]  # fmt: skip
        lines.append("| " + " | ".join([*shown, f"{row['identical_prompts']} of {row['prompts']}"]) + " |")
    lines += [
        "",
        "| pass | measured | ticks × slowest stage | with all tokens of a stage | busiest stage, together | "
        "beyond the tick model | a tick | predicted over `ar` |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for number, each in enumerate(results["passes"], start=1):
        lines.append(
            f"| {number} | {each['explorers_seconds']:.2f} s | {each['predicted_seconds']:.2f} s | "
            f"{each['predicted_with_width_seconds']:.2f} s | {each['busiest_stage_seconds']:.2f} s | "
            f"{each['overhead_share']:.0%} | {1000 * each['overhead_per_tick']:.2f} ms | "
            f"{each['predicted_speedup']:.2f}× |"
        )
    lines += ["", "| stage | layers | tokens | ticks | alone, ms |", "|---:|---:|---:|---:|---:|"]
    for row in results["stages"]:
        low, high = (1000 * end for end in row["seconds_range"])
        lines.append(
            f"| {row['stage']} | {row['from_depth'] + 1}–{row['depth']} | {row['tokens']} | {row['ticks']} | "
            f"{1000 * row['seconds']:.2f} ({low:.2f}–{high:.2f}) |"
        )
    ticks = results["ticks"]
    lines += [
        "",
        f"{results['prompts']['measured']} prompts, at most {settings['max_new_tokens']} tokens each, "
        f"greedy, {settings['repeats']} passes; model {results['model']['name']}, {machine['dtype']}, "
        f"{machine['cpu']}, {machine['cores']} cores. Exploration set "
        f"{tuple(results['exploration_set'])}: {ticks['ticks_per_token']:.3f} ticks a token, by size of "
        f"layers and heads {ticks['tick_speedup']:.2f}× over plain decoding on one of these devices, "
        f"{ticks['useful_share']:.0%} of the lattice of use. `ar` has the threads of all explorers. In "
        "parentheses: lowest and highest of the passes. Prefill is not in the figures.",
        "",
        f"```bash\n{results['command']}\n```",
    ]
    return "\n".join(lines) + "\n"
