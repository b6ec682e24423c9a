"""Render modes: a snapshot as coloured text, as a picture, or shown to whoever is there.

Nothing here knows a decision problem. `Renderer` is what an environment holds: it feeds a `Scene` and
turns its snapshot into what gymnasium's `render_mode` asks for. `RenderedEnv` is what an environment
inherits to be drawn by it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

import gymnasium
import numpy as np
from numpy.typing import NDArray

from sde_gym.colours import DepthColours
from sde_gym.envs.captions import figures, last_round, quoted, situation, text_rows
from sde_gym.envs.snapshot import Scene, ShownToken, Snapshot
from sde_gym.errors import InputError

RENDER_MODES = ("ansi", "human", "rgb_array")
RENDER_FPS = 4
"""Frames a second of a recorded video: slow enough to read."""

COLUMNS, LINES = 88, 24
"""Size of the text in the `ansi` form; of a longer text the end is shown."""

_BAR = 24  # characters
_DIM, _BOLD, _ITALIC, _UNDERLINE, _REVERSE, _STRUCK = 2, 1, 3, 4, 7, 9


def check_render_mode(render_mode: Any) -> str | None:
    """The mode; InputError if there is no such mode."""
    if render_mode is not None and render_mode not in RENDER_MODES:
        raise InputError(f"render_mode: {render_mode!r} is not one of {', '.join(RENDER_MODES)} or None")
    return None if render_mode is None else str(render_mode)


class Renderer:
    """What an environment holds if it has a render mode.

    Args:
        render_mode: one of `RENDER_MODES`.
        scene: watches the environment.
    """

    def __init__(self, render_mode: str, scene: Scene) -> None:
        self.render_mode = render_mode
        self.scene = scene
        self._window: Any = None  # a pyplot figure; False where there can be none

    def start(self, info: Mapping[str, Any]) -> None:
        """To be called at the end of `reset`; shows the picture in mode "human"."""
        self.scene.start(info)
        if self.render_mode == "human":
            self._show()

    def follow(self, info: Mapping[str, Any], reward: float, over: bool) -> None:
        """To be called at the end of `step`; shows the picture in mode "human"."""
        self.scene.follow(info, reward, over)
        if self.render_mode == "human":
            self._show()

    def frame(self) -> str | NDArray[np.uint8] | None:
        """What `render` returns: a str for "ansi", uint8 (H, W, 3) for "rgb_array", None for "human"."""
        if self.render_mode == "ansi":
            return ansi(self.scene.snapshot())
        if self.render_mode == "rgb_array":
            return picture(self.scene.snapshot())
        self._show()
        return None

    def close(self) -> None:
        """Close the window, if one was opened."""
        if self._window:
            import matplotlib.pyplot as plt

            plt.close(self._window)
        self._window = None

    def __getstate__(self) -> dict[str, Any]:
        """All but the window, which belongs to this process."""
        return {**vars(self), "_window": None}

    def _show(self) -> None:
        """Show the picture in a window, or print the text where there can be none."""
        snapshot = self.scene.snapshot()
        if self._window is None:
            self._window = _open_window() or False
        if self._window:
            _draw_in(self._window, picture(snapshot))
        else:
            text = ansi(snapshot)
            sys.stdout.write((plain(text) if os.environ.get("NO_COLOR") else text) + "\n")
            sys.stdout.flush()


class RenderedEnv(gymnasium.Env[NDArray[np.float32], np.int64]):
    """What environments that hold a `Renderer` share: render modes, `render` and `close`.

    A subclass sets `render_mode` (`check_render_mode`) and, if that is not None, `_renderer`, and tells
    the renderer of each reset and step.
    """

    metadata: ClassVar[dict[str, Any]] = {  # type: ignore[misc]
        "render_modes": list(RENDER_MODES),
        "render_fps": RENDER_FPS,
    }

    _renderer: Renderer | None = None

    def render(self) -> str | NDArray[np.uint8] | None:  # type: ignore[override]
        """What it looks like now, as `render_mode` says; a warning and None without a mode.

        Returns:
            a str with ANSI colours for "ansi", uint8 (H, W, 3) for "rgb_array", None for "human".
        """
        if self._renderer is not None:
            return self._renderer.frame()
        warn_without_mode(self)
        return None

    def close(self) -> None:
        """Close the window, if there is one."""
        if self._renderer is not None:
            self._renderer.close()


def warn_without_mode(environment: gymnasium.Env[Any, Any]) -> None:
    """What `render` does where no mode was chosen: gymnasium's warning."""
    name = environment.spec.id if environment.spec is not None else type(environment).__name__
    gymnasium.logger.warn(
        f"{name}: render() was called without a render mode; give one at the start, for instance "
        f'gymnasium.make("{name}", render_mode="ansi")'
    )


def picture(snapshot: Snapshot) -> NDArray[np.uint8]:
    """A snapshot as a picture, uint8 (H, W, 3), of the same shape for all snapshots."""
    from sde_gym.envs.picture import draw  # matplotlib is slow to import

    return draw(snapshot)


def ansi(snapshot: Snapshot) -> str:
    """A snapshot as text with ANSI colours, without a newline at the end.

    Above the text so far, each token in the colour of its depth and the style of its fate; below it
    the depths that the newest token has visited, with what each of them proposes.
    """
    colours = DepthColours(snapshot.depths, snapshot.num_layers)
    rule = _styled("─" * COLUMNS, _DIM)
    lines = [_styled(snapshot.title, _BOLD), rule]
    for row in text_rows(snapshot, COLUMNS, LINES):
        lines.append("".join(_styled_token(part, token, colours) for part, token in row))
    lines += [rule, _legend(snapshot, colours), "", *_ladder(snapshot, colours), ""]
    lines.append(_styled(situation(snapshot), _BOLD))
    lines += [last_round(snapshot), figures(snapshot)]
    return "\n".join(lines)


def plain(text: str) -> str:
    """Text without its ANSI styles."""
    parts = text.split("\x1b[")
    return parts[0] + "".join(part.partition("m")[2] for part in parts[1:])


def _styled_token(text: str, token: ShownToken | None, colours: DepthColours) -> str:
    if token is None:
        return _styled(text, _DIM)
    if token.fate == "prefill":
        return _styled(text, _ITALIC)
    underline = (_UNDERLINE,) if token.fate == "proposal" else ()
    return _styled(text, *underline, *_depth_codes(token.depth, colours))


def _legend(snapshot: Snapshot, colours: DepthColours) -> str:
    """What the styles mean."""
    deepest = snapshot.depths[-1]
    parts = [_styled("prompt", _DIM), _styled("prefill", _ITALIC), "accepted draft of depth"]
    parts += [_styled(f" {depth} ", *_depth_codes(depth, colours)) for depth in snapshot.depths]
    parts += [_styled("pending", _UNDERLINE, *_depth_codes(deepest, colours)), "final layer"]
    return "  ".join(parts)


def _ladder(snapshot: Snapshot, colours: DepthColours) -> list[str]:
    """One line a depth: what it proposes and with which probability, if the token was there."""
    said = {rung.depth: rung for rung in snapshot.rungs}
    deepest = max(said, default=None)
    lines = [_styled(f"  depth  {'probability':{_BAR + 6}}proposal", _DIM)]
    for depth in snapshot.depths:
        mark = "▸" if depth == deepest else " "
        if depth not in said:
            lines.append(_styled(f"{mark} {depth:5}  ·", _DIM))
            continue
        rung = said[depth]
        full, part = divmod(round(rung.probability * _BAR * 8), 8)
        bar = "█" * full + (" ▏▎▍▌▋▊▉"[part] if part else "")
        label = _styled(f"{depth:5}", *_depth_codes(depth, colours))
        lines.append(f"{mark} {label}  {rung.probability:.2f} {bar:{_BAR}} {quoted(rung.text)}")
    lines.append(_styled(f"  {snapshot.num_layers:5}  verifies", _DIM))
    return lines


def _depth_codes(depth: int, colours: DepthColours) -> tuple[int, ...]:
    """ANSI codes of a depth's colours, none for the final layer."""
    background, ink = colours.background(depth), colours.ink(depth)
    if background is None or ink is None:
        return ()
    return (48, 2, *_channels(background), 38, 2, *_channels(ink))


def _channels(colour: str) -> tuple[int, int, int]:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return red, green, blue


def _styled(text: str, *codes: int) -> str:
    """The text between ANSI codes; as it is without codes."""
    return f"\x1b[{';'.join(map(str, codes))}m{text}\x1b[0m" if codes and text else text


def _open_window() -> Any:
    """A pyplot figure with a window of its own, or None where nobody can see one."""
    try:
        import matplotlib.pyplot as plt

        before = plt.gcf() if plt.get_fignums() else None
        figure = plt.figure(num=f"sde_gym {len(plt.get_fignums()) + 1}", facecolor="white")
        interactive = figure.canvas.required_interactive_framework is not None
        if not interactive:
            plt.close(figure)
        if before is not None:
            plt.figure(before)  # the user's own figure stays the current one
    except Exception:  # each backend fails in its own way where there is no screen
        return None
    return figure if interactive else None


def _draw_in(figure: Any, image: NDArray[np.uint8]) -> None:
    """Put an image into a window."""
    height, width = image.shape[:2]
    if not figure.axes:
        figure.set_size_inches(width / figure.dpi, height / figure.dpi)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.axis("off")
        axes.imshow(image)
        figure.show()
    figure.axes[0].images[0].set_data(image)
    figure.canvas.draw_idle()
    figure.canvas.flush_events()
