"""Render modes: what is shown is what happened, in the forms that gymnasium expects."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import sde_gym  # noqa: F401, registers the environments
from sde_gym.envs.captions import last_round, quoted, situation, text_rows
from sde_gym.envs.rendering import RENDER_MODES, ansi, check_render_mode, picture, plain
from sde_gym.envs.snapshot import ReplayScene, Rung, ShownRound, ShownToken, Snapshot, drafted_from
from sde_gym.errors import InputError
from sde_gym.models.token_text import token_decoder
from sde_gym.policies.observation import Phase
from sde_gym.traces import TraceSet
from tests.builders import random_traces, written_traces

EXIT, CONTINUE = 1, 0
WRONG = 9


def make(traces: Path | TraceSet, **kwargs: Any) -> gymnasium.Env[Any, Any]:
    return gymnasium.make("sde_gym/LEDE-v0", traces=traces, **kwargs)


def snapshot_of(env: gymnasium.Env[Any, Any]) -> Snapshot:
    return env.unwrapped._renderer.scene.snapshot()  # type: ignore[attr-defined]


def paper_case() -> TraceSet:
    """Depths 2 and 4 of 8; position 3 is proposed wrong at depth 2, where drafting goes on with 5 and 6."""
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    proposals = [[WRONG if t == 3 else token, token] for t, token in enumerate(tokens)]
    return written_traces(
        tokens, proposals, end="budget", depths=(2, 4), num_layers=8, branches={(3, 0): [5, 6, 7]}, overrun=3
    )


def test_a_case_on_paper() -> None:
    """Two proposals, then a third behind a wrong one, step by step."""
    env = make(paper_case(), render_mode="ansi", max_draft=4)
    env.reset(seed=0)
    first = snapshot_of(env)
    assert first.tokens == (ShownToken(" 1", 8, "prefill"),)
    assert first.rungs == (Rung(2, " 2", pytest.approx(np.exp(-0.11))),)
    assert (first.prompt, first.phase, first.last_round, first.over) == ("by hand", Phase.SELECT, None, False)

    env.step(CONTINUE)
    assert [rung.depth for rung in snapshot_of(env).rungs] == [2, 4]
    env.reset(seed=0)
    env.step(EXIT)
    env.step(EXIT)
    drafting = snapshot_of(env)
    assert drafting.tokens[1:] == (ShownToken(" 2", 2, "proposal"), ShownToken(" 3", 2, "proposal"))
    assert drafting.rungs == (Rung(2, f" {WRONG}", pytest.approx(np.exp(-0.31))),)
    assert drafting.phase == Phase.DRAFT

    env.step(EXIT)
    behind = snapshot_of(env)
    assert behind.tokens[-1] == ShownToken(f" {WRONG}", 2, "proposal")
    assert behind.rungs == (Rung(2, " 5", pytest.approx(np.exp(-0.311))),)  # (10 t + i + 1) / 100 + 1 / 1000

    _, reward, _, _, info = env.step(CONTINUE)
    verified = snapshot_of(env)
    assert verified.tokens[1:] == (
        ShownToken(" 2", 2, "accepted"),
        ShownToken(" 3", 2, "accepted"),
        ShownToken(" 4", 8, "final"),
    )
    assert verified.last_round == ShownRound(2, 3, 2, (f" {WRONG}",))
    assert verified.rungs == (Rung(2, " 5", pytest.approx(np.exp(-0.41))),)
    assert verified.reward == reward
    assert verified.total == pytest.approx(1.75 + 1.75 - 1.25 - 0.01 + 1)
    assert verified.counters == {
        name: info[name] for name in ("decisions", "rounds", "tokens", "drafted", "accepted")
    }


def test_every_step_of_every_text_shows_the_text() -> None:
    """Emitted tokens are the recorded ones, proposals are what was recorded, fates add up."""
    traces = random_traces(2, 9, overrun=11, p_match=0.6)
    env = make(traces, render_mode="ansi", order="sequential")
    rng = np.random.default_rng(0)
    seen_behind = 0
    for text in range(len(traces)):
        _, info = env.reset()
        over = False
        while not over:
            shown = snapshot_of(env)
            emitted = [token for token in shown.tokens if token.fate != "proposal"]
            pending = shown.tokens[len(emitted) :]
            assert all(token.fate == "proposal" for token in pending)
            assert len(emitted) == 1 + info["tokens"]
            expected = traces.tokens_of(text)[: len(emitted)]
            assert [int(token.text) for token in emitted] == expected.tolist()
            assert sum(token.fate == "accepted" for token in emitted) == info["accepted"]
            assert len(pending) == info["draft_length"]
            assert {token.depth for token in pending} <= {info["depth"]}
            visited = [rung.depth for rung in shown.rungs]
            depths = list(traces.depths)
            select = info["phase"] == Phase.SELECT
            assert visited == (depths[: depths.index(info["depth"]) + 1] if select else [info["depth"]])
            assert all(0 <= rung.probability <= 1 for rung in shown.rungs)
            proposal, before = shown.rungs[-1].text, info
            _, _, over, _, info = env.step(int(rng.random() < 0.7))
            after = snapshot_of(env)
            if info["draft_length"]:  # the rung's token is now the newest proposal
                assert after.tokens[-1].text == proposal
            if info["rounds"] > before["rounds"]:
                assert after.last_round is not None
                drafted = info["drafted"] - before["drafted"]
                assert (after.last_round.drafted, after.last_round.accepted) == (
                    drafted,
                    info["accepted"] - before["accepted"],
                )
                assert len(after.last_round.rejected) == drafted - after.last_round.accepted
                seen_behind += len(after.last_round.rejected) > 1
                assert after.last_round.depth == (before["depth"] if drafted else 8)
        final = snapshot_of(env)
        assert final.over
        assert not final.rungs
        assert [int(token.text) for token in final.tokens] == traces.tokens_of(text).tolist()
    assert seen_behind > 5


@pytest.mark.parametrize("episode", ["round", "token"])
def test_shorter_episodes_show_the_text_all_the_same(episode: str) -> None:
    traces = random_traces(2, 5, overrun=11, p_match=0.6)
    env = make(traces, render_mode="ansi", order="sequential", episode=episode, observation=["top1"])
    rng = np.random.default_rng(0)
    _, info = env.reset()
    episodes = 0
    while episodes < 60:
        position = 1 + info["tokens"]
        row, over = None, False
        while not over:
            shown = snapshot_of(env)
            emitted = [int(token.text) for token in shown.tokens if token.fate != "proposal"]
            assert emitted == traces.tokens_of(info["text"])[:position].tolist()
            if row is not None:
                assert shown.rungs[-1].probability == pytest.approx(float(row[0]), abs=1e-6)
            row, _, over, _, info = env.step(int(rng.integers(2)))
        assert not snapshot_of(env).rungs
        assert len(snapshot_of(env).tokens) > position
        _, info = env.reset()
        episodes += 1


def test_the_probability_shown_is_the_one_observed(toy_traces: TraceSet) -> None:
    env = make(toy_traces, render_mode="ansi", observation=["top1"])
    rng = np.random.default_rng(1)
    for text in range(len(toy_traces)):
        row, _ = env.reset(options={"text": text})
        over = False
        while not over:
            assert snapshot_of(env).rungs[-1].probability == pytest.approx(float(row[0]), abs=1e-6)
            row, _, over, _, _ = env.step(int(rng.integers(2)))


def test_what_is_drafted_behind_a_wrong_proposal() -> None:
    ids, chances = drafted_from(paper_case(), 0, 1, 0, 5)
    assert ids.tolist() == [2, 3, WRONG, 5, 6]
    np.testing.assert_allclose(-np.log(chances), [0.11, 0.21, 0.31, 0.311, 0.312], atol=1e-6)
    assert drafted_from(paper_case(), 0, 1, 1, 5)[0].tolist() == [2, 3, 4, 5, 6]


def info_of(tokens: int, rounds: int, **changes: Any) -> dict[str, Any]:
    counters = {"decisions": 0, "rounds": rounds, "tokens": tokens, "drafted": 0, "accepted": 0}
    return {**counters, "phase": 0, "depth": 2, "draft_length": 0, "text": 0, **changes}


def test_an_episode_that_is_a_part_of_a_text_goes_on_with_what_was_seen() -> None:
    scene = ReplayScene(paper_case(), (2, 4))
    scene.start(info_of(0, 0))
    scene.follow(info_of(0, 0, phase=1, draft_length=1), 1.75, False)
    scene.follow(info_of(2, 1, drafted=1, accepted=1), 0.99, True)
    assert [token.fate for token in scene.snapshot().tokens] == ["prefill", "accepted", "final"]
    scene.start(info_of(2, 1, drafted=1, accepted=1))
    shown = scene.snapshot()
    assert [token.fate for token in shown.tokens] == ["prefill", "accepted", "final"]
    assert (shown.total, shown.over, shown.rungs[0].text) == (0.0, False, f" {WRONG}")
    scene.start(info_of(0, 0))
    assert [token.fate for token in scene.snapshot().tokens] == ["prefill"]


def test_a_text_watched_from_its_middle_begins_with_plain_tokens() -> None:
    """As where every episode is the walk of one token."""
    scene = ReplayScene(paper_case(), (2, 4))
    scene.start(info_of(2, 2))
    shown = scene.snapshot()
    assert [(token.text, token.fate) for token in shown.tokens[1:]] == [(" 2", "final"), (" 3", "final")]
    assert shown.rungs[0].text == f" {WRONG}"
    scene.follow(info_of(3, 3, drafted=1), -1.25, True)
    shown = scene.snapshot()
    assert shown.last_round == ShownRound(2, 1, 0, (f" {WRONG}",))
    assert [token.text for token in shown.tokens] == [" 1", " 2", " 3", " 4"]


def test_ansi_is_one_text(toy_folder: Path) -> None:
    env = make(toy_folder, render_mode="ansi")
    env.reset(seed=0, options={"text": 0})
    env.step(EXIT)
    text = env.render()
    assert isinstance(text, str)
    assert text.endswith("accepted 0/0")
    assert text.count("\x1b[") == 2 * text.count("\x1b[0m")
    shown = plain(text)
    assert "\x1b" not in shown
    assert shown.startswith("toy/0\n")
    assert "prompt 0" in shown
    for depth in (2, 3, 6, 8):
        assert any(line.split()[:1] in (["▸"], [str(depth)]) for line in shown.splitlines()), depth
    assert "DRAFT at depth 2 of 8: exit proposes" in shown


def test_pictures_have_one_shape(toy_folder: Path) -> None:
    env = make(toy_folder, render_mode="rgb_array")
    env.reset(seed=0)
    frames, over = [env.render()], False
    while not over and len(frames) < 6:
        over = env.step(1)[2]
        frames.append(env.render())
    assert {frame.shape for frame in frames} == {frames[0].shape}
    assert all(frame.dtype == np.uint8 and frame.shape[2] == 3 for frame in frames)
    assert all((one != other).any() for one, other in pairwise(frames))
    frames[0][:] = 0  # its own memory
    assert env.render().any()


def test_pictures_show_what_differs() -> None:
    """Each ingredient of a snapshot changes the picture, and nothing else does."""
    base = SNAPSHOT
    image = picture(base)
    np.testing.assert_array_equal(image, picture(copy.deepcopy(base)))
    changes: list[dict[str, Any]] = [
        {"title": "other"},
        {"prompt": "def g"},
        {"tokens": base.tokens[:-1]},
        {"rungs": base.rungs[:1]},
        {"rungs": (base.rungs[0], Rung(4, " y", 0.1))},
        {"phase": Phase.DRAFT},
        {"last_round": None},
        {"reward": 2.0},
        {"over": True},
    ]
    for change in changes:
        other = Snapshot(**{**vars(base), **change})
        assert (picture(other) != image).any(), change
        assert ansi(other) != ansi(base), change


SNAPSHOT = Snapshot(
    title="text",
    num_layers=8,
    depths=(2, 4),
    prompt="def f",
    tokens=(
        ShownToken("(", 8, "prefill"),
        ShownToken("a", 2, "accepted"),
        ShownToken("):\n", 8, "final"),
        ShownToken("    $x$", 4, "proposal"),
    ),
    rungs=(Rung(2, " x", 0.25), Rung(4, " y", 0.5)),
    phase=Phase.SELECT,
    last_round=ShownRound(2, 2, 1, ("b",)),
    counters={"decisions": 5, "rounds": 1, "tokens": 2, "drafted": 2, "accepted": 1},
    reward=-0.01,
    total=1.5,
    over=False,
)


def test_words() -> None:
    assert (
        situation(SNAPSHOT)
        == "SELECT at depth 4 of 8: exit proposes '·y', continue takes the final layer's token"
    )
    assert last_round(SNAPSHOT) == "last round: 1 of 2 accepted at depth 2, rejected 'b'"
    assert quoted("a b\n\tc") == "'a·b↵→c'"
    assert quoted("x" * 30) == "'" + "x" * 17 + "…'"


def test_text_is_wrapped_and_its_end_is_shown() -> None:
    rows = text_rows(SNAPSHOT, 80, 10)
    assert ["".join(part for part, _ in row) for row in rows] == ["def f(a):↵", "    $x$"]
    assert [token for _, token in rows[0]] == [None, *SNAPSHOT.tokens[:3]]
    narrow = ["".join(part for part, _ in row) for row in text_rows(SNAPSHOT, 4, 10)]
    assert narrow == ["def ", "f(a)", ":↵", "    ", "$x$"]
    assert text_rows(SNAPSHOT, 80, 1) == rows[-1:]


def test_nothing_that_a_model_writes_reaches_the_terminal() -> None:
    """Escape sequences, carriage returns and bells would; characters without a glyph only warn."""
    nasty = ShownToken("\x1b[2J\r\x07\u200b漢😀", 8, "final")
    shown = Snapshot(**{**vars(SNAPSHOT), "tokens": (nasty,), "rungs": (Rung(2, nasty.text, 0.5),)})
    text = plain(ansi(shown))
    assert not set("\x1b\r\x07\u200b") & set(text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        picture(shown)


def test_pictures_leave_matplotlib_alone(toy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    env = make(toy_folder, render_mode="rgb_array")
    env.reset(seed=0)
    expected = env.render()
    before = plt.get_fignums()
    mine = {"font.size": 30, "font.weight": "bold", "text.color": "red", "figure.facecolor": "black"}
    mine |= {"figure.dpi": 33, "savefig.dpi": 17, "lines.linewidth": 9, "patch.linewidth": 5}
    with mpl.rc_context(mine):
        settings = dict(mpl.rcParams)
        np.testing.assert_array_equal(env.render(), expected)
        assert dict(mpl.rcParams) == settings
    assert plt.get_fignums() == before


def test_human_prints_where_there_is_no_screen(
    toy_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.delenv("NO_COLOR", raising=False)
    env = make(toy_folder, render_mode="human")
    text_env = make(toy_folder, render_mode="ansi")
    env.reset(seed=0)
    text_env.reset(seed=0)
    assert capsys.readouterr().out == text_env.render() + "\n"
    for each in (env, text_env):
        each.step(1)
    assert capsys.readouterr().out == text_env.render() + "\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert env.render() is None
    assert capsys.readouterr().out == plain(text_env.render()) + "\n"
    env.close()
    env.close()


@pytest.mark.parametrize("backend", [None, "tkagg", "qtagg"])
def test_human_never_fails_without_a_screen(backend: str | None, toy_folder: Path) -> None:
    """Whatever backend was chosen, in a process of its own without a display."""
    program = (
        "import sys, gymnasium, sde_gym;"
        "env = gymnasium.make('sde_gym/LEDE-v0', traces=sys.argv[1], render_mode='human');"
        "env.reset(seed=0); env.step(1); env.close()"
    )
    hidden = ("DISPLAY", "WAYLAND_DISPLAY", "MPLBACKEND")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    if backend is not None:
        environment["MPLBACKEND"] = backend
    done = subprocess.run(
        [sys.executable, "-c", program, str(toy_folder)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("SELECT at depth 2 of 8") + done.stdout.count("DRAFT at depth 2 of 8") == 2


def test_a_window_is_used_where_there_is_one(toy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a canvas that calls itself interactive: one window, drawn anew, the user's figure untouched."""
    import matplotlib.pyplot as plt
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    plt.switch_backend("agg")
    monkeypatch.setattr(FigureCanvasAgg, "required_interactive_framework", "pretended", raising=False)
    monkeypatch.setattr("matplotlib.figure.Figure.show", lambda figure, warn=True: None)
    mine = plt.figure()
    env, picture_env = (make(toy_folder, render_mode=mode) for mode in ("human", "rgb_array"))
    try:
        for each in (env, picture_env):
            each.reset(seed=0)
            each.step(1)
        (window,) = [plt.figure(number) for number in plt.get_fignums() if number != mine.number]
        np.testing.assert_array_equal(window.axes[0].images[0].get_array(), picture_env.render())
        plt.figure(mine)
        assert not mine.axes
        twin = copy.deepcopy(env)  # without the window
        assert twin.unwrapped._renderer._window is None  # type: ignore[attr-defined]
        env.close()
        assert plt.get_fignums() == [mine.number]
        assert plt.gcf() is mine
    finally:
        plt.close("all")


def test_render_without_a_mode_warns_and_gives_none(toy_folder: Path) -> None:
    env = make(toy_folder)
    env.reset(seed=0)
    with pytest.warns(UserWarning, match="render\\(\\) was called without a render mode"):
        assert env.unwrapped.render() is None


def test_modes_are_declared(toy_folder: Path) -> None:
    env = make(toy_folder)
    assert tuple(env.metadata["render_modes"]) == RENDER_MODES
    assert env.metadata["render_fps"] > 0
    for mode in (None, *RENDER_MODES):
        assert check_render_mode(mode) == mode
    for wrong in ("video", 3, ["ansi"]):
        with pytest.raises(InputError, match=r"render_mode: .* is not one of ansi, human, rgb_array or None"):
            check_render_mode(wrong)


def test_lists_of_frames_by_gymnasium(toy_folder: Path) -> None:
    env = make(toy_folder, render_mode="rgb_array_list")
    env.reset(seed=0)
    env.step(1)
    frames = env.render()
    assert [frame.ndim for frame in frames] == [3, 3]


def test_before_the_first_reset_there_is_nothing_to_show(toy_traces: TraceSet) -> None:
    with pytest.raises(RuntimeError, match="call reset first"):
        ReplayScene(toy_traces, toy_traces.depths).snapshot()


def test_tokens_without_the_weights(tmp_path: Path) -> None:
    """A folder's tokenizer is read alone; one too small, or none, is passed over; a broken one is named."""
    assert token_decoder("no such model", 3) is None
    vocabulary = {"a": 0, "b": 1, "<end>": 2}
    added = {"id": 2, "content": "<end>", "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}  # fmt: skip
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor"))
    tokenizer = {
        "version": "1.0", **parts, "added_tokens": [added], "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "a"},
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    decode = token_decoder(str(tmp_path), 2)
    assert decode is not None
    assert decode([1, 0, 2]) == "ba<end>"
    assert token_decoder(str(tmp_path), 3) is None
    (tmp_path / "tokenizer.json").write_text("{}{")
    with pytest.raises(InputError, match=r"tokenizer\.json: not a tokenizer"):
        token_decoder(str(tmp_path), 2)


def test_the_shipped_tokenizer_needs_no_weights() -> None:
    program = (
        "import sys; from sde_gym.models.token_text import token_decoder;"
        "decode = token_decoder('stdlib-20m', 100); assert isinstance(decode([65, 66]), str);"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_live_and_replay_look_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshot by snapshot, and under a wrapper that takes one decision away."""
    from sde_gym.envs.lede import LEDEEnv
    from sde_gym.envs.live import LEDELiveEnv
    from sde_gym.envs.wrappers import DepthOnly
    from sde_gym.prompts import Prompt
    from sde_gym.traces.recorder import record
    from tests.envs.test_live_parity import DEPTHS, TOKENS, tiny_model

    model, rng = tiny_model(3), np.random.default_rng(0)
    ids = {f"prompt {n}": rng.integers(4, 12, 3 + n).tolist() for n in range(4)}
    monkeypatch.setattr(model, "encode", ids.__getitem__)  # it has no tokenizer
    prompts = [Prompt(id=text, task="toy", text=text) for text in ids]
    traces = record(model, prompts, tmp_path / "set", DEPTHS, max_new_tokens=TOKENS)
    replay = LEDEEnv(traces, render_mode="ansi")
    live = LEDELiveEnv(model, prompts, depths=DEPTHS, max_new_tokens=TOKENS, render_mode="ansi")
    for wrap in (lambda env: env, lambda env: DepthOnly(env, 3)):
        environments: list[Any] = [wrap(replay), wrap(live)]
        for text in traces.text_ids:
            over = False
            for env in environments:
                env.reset(options={"text": text})
            while not over:
                shown, expected = (snapshot_of(env) for env in reversed(environments))
                chances = [[rung.probability for rung in each.rungs] for each in (shown, expected)]
                np.testing.assert_allclose(*chances, atol=1e-5)
                for name in ("title", "depths", "tokens", "phase", "last_round", "counters", "over"):
                    assert getattr(shown, name) == getattr(expected, name), name
                assert shown.total == pytest.approx(expected.total)
                assert (
                    plain(environments[0].render()).splitlines()[-1]
                    == plain(environments[1].render()).splitlines()[-1]
                )
                action = int(rng.random() < 0.7)
                over, _ = (env.step(action)[2] for env in environments)
