"""The search of skip sets: what it predicts is what the decoder does, and it finds what can be found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from sde_gym.cli import app
from sde_gym.decoding import autoregressive
from sde_gym.decoding.skipping import skipping
from sde_gym.errors import InputError
from sde_gym.evaluation.skip_score import SkipEvaluator, play
from sde_gym.evaluation.skip_search import FIRST, Trial, search_skips, trials_path
from sde_gym.models import LayeredModel
from sde_gym.models.cost import head_sizes, unit_cost
from sde_gym.models.loading import load_model
from sde_gym.models.skipping import SkipSet, load_skip_set
from sde_gym.policies.rules import StaticController

pytest.importorskip("optuna")

LAYERS = 6
PROMPTS = [[5, 6, 7], [9, 2, 30, 4], [1], [33, 33, 8]]
IDLE = SkipSet(attention=(0, 2, 3, 5), mlp=(1, 2, 4))
"""Sublayers of `model` that add nothing; its eight others matter."""


@pytest.fixture(scope="module")
def model() -> LayeredModel:
    """Wide random weights, so that every sublayer has its say, but for those that are `IDLE`."""
    generator = torch.Generator().manual_seed(4)
    hf = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=80, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128,
            bos_token_id=None, eos_token_id=None, tie_word_embeddings=False,
        )
    ).eval()  # fmt: skip
    with torch.no_grad():
        for parameter in hf.parameters():
            if parameter.ndim > 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * 1.5 * parameter.shape[-1] ** -0.5)
        for index in IDLE.attention:
            hf.model.layers[index].self_attn.o_proj.weight.zero_()
        for index in IDLE.mlp:
            hf.model.layers[index].mlp.down_proj.weight.zero_()
    return LayeredModel(hf, name="half idle")


@pytest.fixture(scope="module")
def evaluator(model: LayeredModel) -> SkipEvaluator:
    return SkipEvaluator(model, PROMPTS, max_new_tokens=30)


def test_rounds_along_a_text() -> None:
    right = np.array([1, 1, 0, 1, 1, 1, 0, 1], dtype=bool)
    assert play(right, 1) == [(1, 1), (1, 0), (1, 1), (1, 1), (1, 1)]
    assert play(right, 2) == [(2, 2), (2, 2), (2, 0), (1, 1)]
    assert play(right, 8) == [(8, 2), (5, 3), (1, 1)]
    assert play(np.ones(4, dtype=bool), 3) == [(3, 3)]
    assert play(np.zeros(2, dtype=bool), 3) == [(2, 0), (1, 0)]


@pytest.mark.parametrize("skip", [SkipSet((1,), (0, 5)), SkipSet((4, 1), ()), SkipSet((), (3,))], ids=str)
def test_the_first_proposal_of_a_round_is_predicted_exactly(
    model: LayeredModel, evaluator: SkipEvaluator, skip: SkipSet
) -> None:
    """Rounds of one proposal are all first proposals: the decoder must play the predicted ones."""
    seen = set()
    for prompt, right in zip(PROMPTS, evaluator.agreement(skip), strict=True):
        rounds = skipping(model, prompt, skip, StaticController(skip.depth(LAYERS), 1), 30).rounds
        assert [(r.drafted, r.accepted) for r in rounds] == play(right, 1)
        seen.update(r.accepted for r in rounds)
    assert seen == {0, 1}


@pytest.mark.parametrize("length", [2, 5])
def test_drafts_whose_keys_are_exact_are_predicted_exactly(
    model: LayeredModel, evaluator: SkipEvaluator, length: int
) -> None:
    """Where only last layers are skipped, drafts leave the keys and values that verification would."""
    skip = SkipSet((4, 5), (4, 5))
    for prompt, right in zip(PROMPTS, evaluator.agreement(skip), strict=True):
        rounds = skipping(model, prompt, skip, StaticController(4, length), 30).rounds
        assert [(r.drafted, r.accepted) for r in rounds] == play(right, length)


def test_a_score_is_what_a_layer_count_gives(model: LayeredModel, evaluator: SkipEvaluator) -> None:
    head = head_sizes(model)[1]
    layer = model.hf.model.layers[0]
    mlp = sum(p.numel() for p in layer.mlp.parameters()) / sum(p.numel() for p in layer.parameters())
    for skip, share in ((SkipSet(), 1.0), (IDLE, 1 - (4 * (1 - mlp) + 3 * mlp) / LAYERS)):
        assert evaluator.share(skip) == pytest.approx(share)
        score = evaluator(skip)
        assert (score.agreement, score.acceptance_rate) == (1.0, 1.0)
        rounds = play(
            np.ones(29, dtype=bool), score.draft_length
        )  # of each text; 30 tokens, one from prefill
        cost = sum(drafted * (share * LAYERS + head) + LAYERS + head for drafted, _ in rounds)
        assert score.speedup == pytest.approx(29 * (LAYERS + head) / cost)


def test_another_cost_model_is_taken(model: LayeredModel) -> None:
    free_heads = SkipEvaluator(model, PROMPTS, max_new_tokens=30, cost=unit_cost(LAYERS))
    assert free_heads(IDLE).speedup > SkipEvaluator(model, PROMPTS, max_new_tokens=30)(IDLE).speedup
    with pytest.raises(InputError, match="12"):
        SkipEvaluator(model, PROMPTS, cost=unit_cost(LAYERS, max_draft=3))


@pytest.fixture(scope="module")
def searched(
    model: LayeredModel, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Trial, list[Trial]]:
    out = tmp_path_factory.mktemp("search") / "skips.json"
    return out, *search_skips(model, PROMPTS, 150, out, seed=1, max_new_tokens=30)


def test_the_search_finds_the_sublayers_that_do_nothing(
    evaluator: SkipEvaluator, searched: tuple[Path, Trial, list[Trial]]
) -> None:
    _, best, trials = searched
    assert len(trials) == 150
    assert best.skip == IDLE
    assert best.score == evaluator(IDLE)
    assert max(trial.score.speedup for trial in trials[:FIRST]) < best.score.speedup


def test_the_search_beats_random_sets(
    evaluator: SkipEvaluator, searched: tuple[Path, Trial, list[Trial]]
) -> None:
    rng = np.random.default_rng(0)
    found = []
    for _ in range(150):
        bits = rng.random(2 * LAYERS) < rng.uniform(0, 1)
        layers = np.flatnonzero(bits[:LAYERS]), np.flatnonzero(bits[LAYERS:])
        found.append(evaluator(SkipSet(*(tuple(part.tolist()) for part in layers))).speedup)
    assert searched[1].score.speedup > max(found)


def test_the_file_holds_the_best_set_and_how_it_came_about(
    model: LayeredModel, searched: tuple[Path, Trial, list[Trial]]
) -> None:
    out, best, trials = searched
    assert load_skip_set(out, LAYERS) == best.skip
    facts = json.loads(out.read_text())["facts"]
    assert facts["speedup"] == best.score.speedup
    assert facts["weights_hash"] == model.weights_hash()
    rows = [json.loads(line) for line in trials_path(out).read_text().splitlines()]
    assert [Trial.from_json(row) for row in rows[1:]] == trials


def test_a_search_that_was_stopped_ends_as_one_that_was_not(
    model: LayeredModel, searched: tuple[Path, Trial, list[Trial]], tmp_path: Path
) -> None:
    out = tmp_path / "skips.json"

    def stop(done: int, total: int, best: float) -> None:
        if done == FIRST + 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search_skips(model, PROMPTS, 60, out, seed=1, max_new_tokens=30, progress=stop)
    assert not out.exists()
    counted: list[int] = []
    best, trials = search_skips(
        model, PROMPTS, 60, out, seed=1, max_new_tokens=30, progress=lambda done, *_: counted.append(done)
    )
    assert counted == list(range(FIRST + 8, 61))
    assert trials == searched[2][:60]
    assert best == max(trials, key=lambda trial: trial.score.speedup)
    again = search_skips(model, PROMPTS, 60, out, seed=1, max_new_tokens=30)
    assert again == (best, trials)
    other = search_skips(model, PROMPTS, 60, tmp_path / "other.json", seed=2, max_new_tokens=30)
    assert other[1] != trials


def test_a_better_set_is_never_replaced_by_a_worse_one(
    model: LayeredModel, searched: tuple[Path, Trial, list[Trial]], tmp_path: Path
) -> None:
    out = tmp_path / "skips.json"
    out.write_bytes(searched[0].read_bytes())
    with pytest.raises(InputError, match=r"skips\.json: is there, but not the evaluations"):
        search_skips(model, PROMPTS, 2, out, seed=1, max_new_tokens=30)
    trials_path(out).write_bytes(trials_path(searched[0]).read_bytes())
    best, trials = search_skips(model, PROMPTS, 1, out, seed=1, max_new_tokens=30)
    assert (best, trials) == searched[1:]
    assert out.read_bytes() == searched[0].read_bytes()


@pytest.mark.parametrize(
    "row", [{"speedup": "x"}, {"attention": [99]}, {"attention": 5}, {"agreement": None}]
)
def test_a_damaged_evaluation_is_named(model: LayeredModel, tmp_path: Path, row: dict[str, Any]) -> None:
    out = tmp_path / "skips.json"
    search_skips(model, PROMPTS, 2, out, seed=1, max_new_tokens=30)
    log = trials_path(out)
    header, first, second = log.read_text().splitlines()
    log.write_text("\n".join([header, first, json.dumps({**json.loads(second), **row})]) + "\n")
    with pytest.raises(InputError, match=r"trials\.jsonl: not the evaluations of a search"):
        search_skips(model, PROMPTS, 3, out, seed=1, max_new_tokens=30)


def test_a_folder_is_no_skip_set(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a folder; name a file"):
        load_skip_set(tmp_path, LAYERS)


@pytest.mark.parametrize("change", [{"seed": 2}, {"max_new_tokens": 20}, {"max_draft": 5}])
def test_another_searchs_file_is_refused(model: LayeredModel, tmp_path: Path, change: dict[str, Any]) -> None:
    out = tmp_path / "skips.json"
    search_skips(model, PROMPTS, 2, out, seed=1, max_new_tokens=30)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(InputError, match=r"trials\.jsonl.*another search"):
        search_skips(model, PROMPTS, 3, out, **{"seed": 1, "max_new_tokens": 30, **change})
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    trials_path(out).write_text("nonsense\n")
    with pytest.raises(InputError, match="remove it"):
        search_skips(model, PROMPTS, 3, out, seed=1, max_new_tokens=30)


def test_the_command_writes_a_set_that_decodes(
    tiny_model_folder: Path, prompt_files: tuple[Path, Path], tmp_path: Path
) -> None:
    out = tmp_path / "skips.json"
    command = ["search-skips", "--model", str(tiny_model_folder), "--prompts", str(prompt_files[0])]
    command += ["--evaluations", "40", "--limit", "4", "--max-new-tokens", "24", "--out", str(out)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "best of 40 skip sets" in result.output
    loaded = load_model(tiny_model_folder)
    skip = load_skip_set(out, loaded.num_layers)
    ids = loaded.encode("def f_1(total):\n")
    decoded = skipping(loaded, ids, skip, StaticController(skip.depth(loaded.num_layers), 4), 24)
    assert decoded.tokens == autoregressive(loaded, ids, 24).tokens
    refused = CliRunner().invoke(app, [*command, "--seed", "5"])
    assert refused.exit_code == 2
    assert "another search (other seed)" in refused.stderr
    generate = ["generate", "--model", str(tiny_model_folder), "--prompt", "def f_1(total):\n"]
    generate += ["--max-new-tokens", "24"]
    plain = CliRunner().invoke(app, generate)
    for options in ([], ["--draft-length", "1000000000"]):
        by_skips = CliRunner().invoke(app, [*generate, "--skips", str(out), *options])
        assert by_skips.exit_code == 0, by_skips.output
        assert by_skips.stdout == plain.stdout
        assert "drafts accepted" in by_skips.stderr
    missing = CliRunner().invoke(app, [*generate, "--skips", str(tmp_path)])
    assert missing.exit_code == 2
    assert "is a folder" in missing.stderr


def test_what_cannot_be_searched_is_refused(model: LayeredModel, tmp_path: Path) -> None:
    out = tmp_path / "skips.json"
    for evaluations, prompts, options in (
        (0, PROMPTS, {}),
        (5, [], {}),
        (5, PROMPTS, {"seed": -1}),
        (5, PROMPTS, {"max_new_tokens": 1}),
        (5, PROMPTS, {"cost": "none.json"}),
    ):
        with pytest.raises(InputError):
            search_skips(model, prompts, evaluations, out, **options)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
