"""What a prompt is, and the order in which the shipped sets stand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")

#: The splits of the shipped sets: policies learn on the first and are judged on the second.
SPLITS: tuple[str, str] = ("train", "held-out")


@dataclass(frozen=True)
class Prompt:
    """One text for a model to continue or to answer.

    Attributes:
        id: unique within its set or file.
        task: what kind of text it is; results are reported per task.
        text: the prompt itself, exactly as it is encoded.
        source: where it came from: a reference into the standard library (see
            `sde_gym.prompts.resolve_source`) or the name of a file.
    """

    id: str
    task: str
    text: str
    source: str = ""


def interleave(
    items: Sequence[Item], split_of: Callable[[Item], str], task_of: Callable[[Item], str]
) -> list[Item]:
    """Reorder `items` so that every prefix is balanced over tasks, and as far as possible over splits.

    Within a split the tasks take turns (in the order of their names), each giving its items
    in the order given; such a turn of all tasks is a round. The rounds of the splits are
    then merged in proportion to their number. Selecting one split from the result therefore
    leaves it balanced over tasks, too. A task that has run out is passed over.
    """
    rounds: list[tuple[float, int, list[Item]]] = []
    for number, split in enumerate(sorted({split_of(item) for item in items})):
        queues: dict[str, list[Item]] = {}
        for item in items:
            if split_of(item) == split:
                queues.setdefault(task_of(item), []).append(item)
        count = max(len(queue) for queue in queues.values())
        for turn in range(count):
            members = [queues[task][turn] for task in sorted(queues) if turn < len(queues[task])]
            rounds.append(((turn + 0.5) / count, number, members))
    rounds.sort(key=lambda entry: entry[:2])
    return [item for _, _, members in rounds for item in members]
