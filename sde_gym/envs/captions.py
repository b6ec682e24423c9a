"""The words that every form of a snapshot shares, and its text in lines."""

from __future__ import annotations

from sde_gym.envs.snapshot import Fate, ShownToken, Snapshot
from sde_gym.policies.observation import Phase

FATE_LABELS: dict[Fate, str] = {
    "prefill": "prefill",
    "accepted": "accepted draft",
    "final": "final layer",
    "proposal": "pending proposal",
}


def situation(snapshot: Snapshot) -> str:
    """Where the newest token stands and what the two actions would do."""
    if snapshot.over:
        return "the episode is over"
    if not snapshot.rungs:
        return ""
    rung = snapshot.rungs[-1]
    at, token = f"depth {rung.depth} of {snapshot.num_layers}", quoted(rung.text)
    if snapshot.phase == Phase.DRAFT:
        return f"DRAFT at {at}: exit proposes {token} too, continue verifies"
    further = next((depth for depth in snapshot.depths if depth > rung.depth), None)
    deeper = f"goes on to depth {further}" if further else "takes the final layer's token"
    return f"SELECT at {at}: exit proposes {token}, continue {deeper}"


def last_round(snapshot: Snapshot) -> str:
    """How the last round went."""
    ended = snapshot.last_round
    if ended is None:
        return "no round has ended yet"
    if not ended.drafted:
        return "last round: nothing drafted, one token of the final layer"
    text = f"last round: {ended.accepted} of {ended.drafted} accepted at depth {ended.depth}"
    if ended.rejected:
        shown = ", ".join(quoted(token) for token in ended.rejected[:3])
        text += f", rejected {shown}" + (", …" if len(ended.rejected) > 3 else "")
    return text


def figures(snapshot: Snapshot) -> str:
    """Counters and rewards."""
    count = snapshot.counters
    return (
        f"reward {snapshot.reward:+.2f}   return {snapshot.total:.2f}   decisions {count['decisions']}   "
        f"rounds {count['rounds']}   tokens {count['tokens']}   "
        f"accepted {count['accepted']}/{count['drafted']}"
    )


def quoted(text: str, longest: int = 18) -> str:
    """A token within quotation marks, its blanks visible, at most `longest` characters of it."""
    shown = _printable(text).replace("\n", "↵").replace("\t", "→").replace(" ", "·")
    return "'" + (shown if len(shown) <= longest else shown[: longest - 1] + "…") + "'"


def text_rows(snapshot: Snapshot, columns: int, lines: int) -> list[list[tuple[str, ShownToken | None]]]:
    """The last lines of prompt and tokens, wrapped: rows of (piece within one line, its token).

    The prompt has no token (None). A line break within a token is shown as ↵ in the token's style.
    """
    rows: list[list[tuple[str, ShownToken | None]]] = [[]]
    column = 0
    pieces: list[tuple[str, ShownToken | None]] = [(snapshot.prompt[-columns * lines :], None)]
    pieces += [(token.text.replace("\n", "↵\n"), token) for token in snapshot.tokens]
    for text, token in pieces:
        for number, line in enumerate(_printable(text).expandtabs(4).split("\n")):
            if number:
                rows.append([])
                column = 0
            while line:
                if column == columns:
                    rows.append([])
                    column = 0
                part, line = line[: columns - column], line[columns - column :]
                rows[-1].append((part, token))
                column += len(part)
    return rows[-lines:]


def _printable(text: str) -> str:
    """The text with the replacement character for what would disturb a terminal."""
    return "".join(c if c in "\n\t" or c.isprintable() else "\ufffd" for c in text.replace("\r\n", "\n"))
