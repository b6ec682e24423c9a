"""Record once what every depth of a model would have said along its own greedy text.

First the text is generated, several prompts at a time; then every text is run through the
model once more in a single pass, and each candidate depth is scored at all its positions. While the
text is at a depth, what that depth drafts behind its own mistakes is recorded too (`overrun`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sde_gym.errors import InputError
from sde_gym.models.cost import head_sizes
from sde_gym.models.generation import generate_greedy
from sde_gym.models.heads import summarise
from sde_gym.models.layered import LayeredModel
from sde_gym.models.probe import ExitProbe
from sde_gym.models.sequence import Sequence as TokenSequence
from sde_gym.prompts import Prompt, resolve_source
from sde_gym.settings import DEFAULT_MAX_DRAFT, DEFAULT_NEW_TOKENS
from sde_gym.traces.overrun import Overrun, joined, most_rows, no_overrun
from sde_gym.traces.schema import TraceSettings
from sde_gym.traces.store import TraceSet, TraceWriter, load_traces

#: Progress callback: texts done, texts in all, tokens recorded in this run.
Progress = Callable[[int, int, int], None]


_BRANCHES = 256
"""Branches drafted side by side: attention spans the slots of all of them, whoever may see them."""


@torch.inference_mode()
def record(
    model: LayeredModel,
    prompts: Sequence[Prompt],
    out: Path | str,
    depths: Sequence[int],
    *,
    max_new_tokens: int = DEFAULT_NEW_TOKENS,
    k: int = 8,
    overrun: int = DEFAULT_MAX_DRAFT - 1,
    batch_size: int = 8,
    compact: bool = True,
    progress: Progress | None = None,
) -> TraceSet:
    """Record greedy continuations of `prompts`, resuming if `out` already holds some.

    What the model's exit probe says is recorded, too, if it has one for these depths and heads.

    Args:
        model: the model to record.
        prompts: with unique ids.
        out: folder of the trace set.
        depths: candidate exit depths, increasing, below L.
        max_new_tokens: tokens per text, at least 2.
        k: most probable tokens stored per depth (8 serves DECS for up to 9 explorers).
        overrun: rows recorded behind each wrong proposal: replay is exact for drafts of up to
            overrun + 1 tokens. 0 records none; a round of replay then ends at its first mistake.
        batch_size: prompts generated at once.
        compact: score depths below L over the model's compact vocabulary, if it has one.
        progress: called after every batch.

    Returns:
        The texts of these prompts as read back from `out`, in the order of recording; prompts
        whose text has fewer than two tokens are left out.

    Raises:
        InputError: no prompts, an id given twice, depths out of range, a prompt that fills the
            context, or a folder recorded with other settings or other prompts under these ids.
    """
    if not prompts:
        raise InputError("there are no prompts to record")
    if max_new_tokens < 2 or k < 2 or batch_size < 1:
        raise InputError(
            f"max_new_tokens {max_new_tokens} and k {k} must be at least 2, "
            f"batch_size {batch_size} at least 1"
        )
    candidates = model.check_depths(depths)
    narrowest = model.vocab_size
    if compact and model.compact_vocabulary is not None:
        narrowest = len(model.compact_vocabulary)
    if k > narrowest:
        raise InputError(f"k {k} exceeds the {narrowest} tokens of the exit heads' vocabulary")
    if len({prompt.id for prompt in prompts}) != len(prompts):
        raise InputError("two prompts have the same id; every text of a trace set needs its own")
    encoded = {prompt.id: _encode(model, prompt) for prompt in prompts}
    exit_head, final_head = head_sizes(model, compact)
    probe = usable_probe(model, candidates, compact)
    settings = TraceSettings(
        model=model.name,
        model_hash=model.weights_hash(),
        num_layers=model.num_layers,
        depths=candidates,
        head=model.head_hash() if compact else "full",
        dtype=str(model.dtype).removeprefix("torch."),
        eos_token_ids=model.eos_token_ids,
        k=k,
        max_new_tokens=max_new_tokens,
        context_limit=model.context_limit,
        overrun=overrun,
        probe=None if probe is None else probe.identity,
        exit_head=exit_head,
        final_head=final_head,
    )
    writer = TraceWriter(Path(out), settings)
    if writer.done:
        _check_known(load_traces(Path(out)), prompts)
    with writer:
        waiting = [p for p in prompts if p.id not in writer.done]
        done, tokens = len(prompts) - len(waiting), 0
        for start in range(0, len(waiting), batch_size):
            batch = waiting[start : start + batch_size]
            ids = [encoded[prompt.id] for prompt in batch]
            for prompt, text in zip(batch, generate_greedy(model, ids, max_new_tokens), strict=True):
                _record_text(writer, model, probe, prompt, encoded[prompt.id], text, compact)
                tokens += len(text)
            done += len(batch)
            if progress is not None:
                progress(done, len(prompts), tokens)
    traces = load_traces(Path(out))
    wanted = {prompt.id for prompt in prompts}
    return traces.subset([n for n, text_id in enumerate(traces.text_ids) if text_id in wanted])


def _encode(model: LayeredModel, prompt: Prompt) -> list[int]:
    """Token ids; an error names the prompt."""
    try:
        return model.encode(prompt.text)
    except InputError as error:
        raise InputError(f"prompt {prompt.id!r}: {error}") from None


def _check_known(traces: TraceSet, prompts: Sequence[Prompt]) -> None:
    """Refuse a prompt that is stored under its id with another text."""
    stored = {text_id: n for n, text_id in enumerate(traces.text_ids)}
    for prompt in prompts:
        n = stored.get(prompt.id)
        if n is None:
            continue
        text = traces.prompts[n]
        same = traces.sources[n] == prompt.source if text is None else text == prompt.text
        if not same:
            raise InputError(
                f"prompt {prompt.id!r} was recorded with another text; give it another id, or record "
                "into another folder"
            )


def usable_probe(model: LayeredModel, depths: Sequence[int], compact: bool = True) -> ExitProbe | None:
    """The model's exit probe, if there is one that knows all of these depths and these exit heads."""
    probe = model.probe
    if probe is None or not set(depths) <= set(probe.depths):
        return None
    head = model.head_hash() if compact else "full"
    return probe if probe.head == head else None


def _is_reference(prompt: Prompt) -> bool:
    """Whether the text can be cut again from the interpreter's library by its source."""
    try:
        return resolve_source(prompt.source) == prompt.text
    except InputError:
        return False


def _record_text(
    writer: TraceWriter,
    model: LayeredModel,
    probe: ExitProbe | None,
    prompt: Prompt,
    ids: list[int],
    text: list[int],
    compact: bool,
) -> None:
    """Score every depth at all positions of one text, and store it."""
    settings, count, top = writer.settings, len(text), model.num_layers
    depths, k = settings.depths, settings.k
    token = np.asarray(text, np.int32)
    branches: list[Overrun] = []
    sequence = model.sequence(len(ids) + count)
    sequence.append(ids + text[:-1])
    top_ids = np.empty((count, len(depths), k), np.int32)
    top_logprobs = np.empty((count, len(depths), k), np.float32)
    entropy = np.empty((count, len(depths)), np.float32)
    said = None if probe is None else np.empty((count, len(depths)), np.float32)
    for column, depth in enumerate(depths):
        sequence.advance(depth)
        scored = _score(sequence.hidden(depth, count), model, probe, depth, k, compact)
        top_ids[:, column], top_logprobs[:, column], entropy[:, column] = scored[:3]
        if said is not None:
            said[:, column] = scored[3]
        if settings.overrun:
            most = most_rows(top_ids[:, [column], 0], token, len(ids), settings)[:, 0]
            branches.append(_draft_on(sequence, probe, depth, top_ids[:, column, 0], most, k, compact))
    sequence.advance(top)
    logits = sequence.score(top, count)
    final_ids, final_logprobs, _ = summarise(logits, k)
    gap = final_logprobs[:, 0] - final_logprobs[:, 1]
    if text[-1] in model.eos_token_ids:
        end = "eos"
    else:
        end = "budget" if count == settings.max_new_tokens else "context"
    reference = _is_reference(prompt)
    writer.add_text(
        text_id=prompt.id,
        task=prompt.task,
        source=prompt.source,
        # Text cut from the interpreter's library is named by its reference, not copied.
        prompt=None if reference else prompt.text,
        prompt_tokens=None if reference else np.asarray(ids, np.int32),
        prompt_length=len(ids),
        token=token,
        end=end,
        final_ids=final_ids.cpu().numpy().astype(np.int32),
        final_logprobs=final_logprobs.cpu().numpy(),
        final_gap=gap.cpu().numpy(),
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        entropy=entropy,
        overrun=joined(branches) if settings.overrun else None,
        probe=said,
    )


def _score(
    hidden: torch.Tensor, model: LayeredModel, probe: ExitProbe | None, depth: int, k: int, compact: bool
) -> list[NDArray[Any]]:
    """What the head at `depth` says of n states (n, hidden_size).

    Returns:
        ids int32 (n, k), log-probabilities float32 (n, k), entropy float32 (n,); and, with a probe, its
        probability float32 (n,).
    """
    states = model.heads.states(hidden, depth)
    vocabulary = model.heads.vocabulary(depth) if compact else None
    summary = summarise(model.heads.project(states, depth, compact), k, vocabulary)
    ids, logprobs, entropy = (part.cpu().numpy() for part in summary)
    found = [ids.astype(np.int32), logprobs, entropy]
    if probe is not None:
        found.append(probe(depth, states.float().cpu().numpy(), logprobs, entropy))
    return found


def _draft_on(
    sequence: TokenSequence,
    probe: ExitProbe | None,
    depth: int,
    proposals: NDArray[np.int32],
    most: NDArray[np.int64],
    k: int,
    compact: bool,
) -> Overrun:
    """Draft on behind wrong proposals at one depth, many branches side by side.

    Args:
        sequence: prompt and text as a chain, but for the last token; every token is at exactly
            `depth`, and is left so.
        probe: the exit probe, if what it says is recorded.
        depth: l*.
        proposals: int32 (T,), proposals at the T positions of the text.
        most: int64 (T,), most rows behind each of them, 0 for no branch.
        k: log-probabilities stored a row.
        compact: score over the depth's compact vocabulary.

    Returns:
        The branches at this depth alone, m = 1.
    """
    chain = sequence.length
    model = sequence.model
    steps: list[tuple[NDArray[np.int64], list[NDArray[Any]]]] = []
    wrong = np.flatnonzero(most)
    for first in range(0, len(wrong), _BRANCHES):
        active = wrong[first : first + _BRANCHES]  # positions whose branches go on
        newest = proposals[active]
        slots = (chain - len(most) + active).tolist()
        step = 0
        while active.size:
            slots = [
                sequence.append([int(token)], parent=slot)[0]
                for token, slot in zip(newest, slots, strict=True)
            ]
            sequence.advance(depth, slots=slots)
            hidden = sequence.hidden(depth, slots=slots)
            ids, *rest = _score(hidden, model, probe, depth, k, compact)
            newest, step = ids[:, 0], step + 1
            steps.append((active, [newest, *rest]))
            going = ~np.isin(newest, model.eos_token_ids) & (most[active] > step)
            active, newest = active[going], newest[going]
            slots = [slot for slot, goes in zip(slots, going, strict=True) if goes]
        sequence.rollback(chain)
    if not steps:
        return no_overrun(len(most), 1, k, probe is not None)
    position = np.concatenate([positions for positions, _ in steps])
    order = np.argsort(position, kind="stable")
    columns = [np.concatenate(column)[order] for column in zip(*(found for _, found in steps), strict=True)]
    lengths = np.bincount(position, minlength=len(most))[:, None]
    return Overrun(lengths, *columns)
