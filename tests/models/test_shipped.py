"""The models and traces that ship: exact on the real models, and made for each other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import sde_gym
from sde_gym.decoding import autoregressive, speculative
from sde_gym.models import LayeredModel, load_model
from sde_gym.models.loading import available_models
from sde_gym.models.vocabulary import count_output_tokens
from sde_gym.policies.rules import StaticController, ThresholdController
from sde_gym.prompts import load_prompts
from sde_gym.traces import load_traces

DATA = Path(sde_gym.__file__).parent / "models" / "data"


@pytest.fixture(scope="module")
def embedded() -> LayeredModel:
    return load_model("stdlib-20m")


def check_exact(model: LayeredModel, prompts: list[list[int]], tokens: int, depth: int) -> None:
    """AR equals `generate`, and speculation equals AR; a near-tie of the logits is reported."""
    for ids in prompts:
        expected = autoregressive(model, ids, tokens).tokens
        batch = torch.tensor([ids])
        generated = model.hf.generate(
            batch, attention_mask=torch.ones_like(batch), do_sample=False, max_new_tokens=tokens,
            pad_token_id=model.eos_token_ids[0],
        )  # fmt: skip
        assert generated[0, len(ids) :].tolist() == expected
        depths = (depth, depth + 1)
        for controller in (StaticController(depth, 4), ThresholdController(0.4)):
            assert speculative(model, ids, controller, depths, tokens).tokens == expected


def test_the_embedded_model_is_exact(embedded: LayeredModel) -> None:
    prompts = [embedded.encode(p.text) for p in load_prompts("stdlib:held-out")[:6]]
    check_exact(embedded, prompts, 48, 3)


def test_smollm2_is_exact() -> None:
    found = {m.name: m for m in available_models()}["smollm2-135m"]
    if not found.present:
        pytest.skip(f"SmolLM2 is not on this machine: {found.remedy}")
    model = load_model("smollm2-135m")
    check_exact(model, [model.encode(p.text) for p in load_prompts("chat:held-out")[:2]], 24, 20)


def test_advance_in_two_steps_equals_one(embedded: LayeredModel) -> None:
    ids = embedded.encode("def read(path):\n    with open(path) as stream:\n")
    whole, parts = embedded.sequence(), embedded.sequence()
    for sequence in (whole, parts):
        sequence.append(ids)
    whole.advance(24)
    for depth in (3, 4, 17, 24):
        parts.advance(depth)
    torch.testing.assert_close(whole.hidden(24, len(ids)), parts.hidden(24, len(ids)), rtol=1e-4, atol=1e-4)


def test_what_ships_with_the_embedded_model(embedded: LayeredModel) -> None:
    folder = DATA / "stdlib-20m"
    assert (folder / "model.safetensors").stat().st_size < 45e6
    card = (folder / "README.md").read_text()
    for word in ("bits per byte", "seed", "agrees with the final layer", "Samples"):
        assert word in card
    assert embedded.num_layers == 24
    assert embedded.context_limit == 2048
    assert embedded.compact_vocabulary is not None
    assert set(embedded.eos_token_ids) <= set(embedded.compact_vocabulary.tolist())


def test_the_compact_vocabulary_covers_what_the_model_writes_behind_held_out_prompts(
    embedded: LayeredModel,
) -> None:
    """A token outside the list can never be drafted."""
    prompts = [embedded.encode(prompt.text) for prompt in load_prompts("stdlib:held-out")[::25]]
    counts = count_output_tokens(embedded, prompts, 32)
    kept = embedded.compact_vocabulary.tolist()
    assert counts[kept].sum() > 0.95 * counts.sum() > 100


def test_the_compact_vocabulary_of_smollm2_ships() -> None:
    from sde_gym.models.vocabulary import load_compact_vocabulary

    ids = load_compact_vocabulary(DATA / "smollm2-135m" / "compact_vocabulary.json", 49152)
    assert 2 in ids  # <|im_end|>
    assert 2000 <= len(ids) <= 8192


def test_the_adapters_of_smollm2_ship_with_their_card() -> None:
    from sde_gym.models.adapters import describe_adapters
    from sde_gym.models.vocabulary import load_compact_vocabulary

    folder = DATA / "smollm2-135m-adapters"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 12e6
    described = describe_adapters(folder / "adapters.safetensors")
    card = (folder / "README.md").read_text()
    for depth in described["depths"]:
        row = described["report"][str(depth)]
        assert row["agreement"] > row["without"]
        assert f"| {depth} | {row['without']:.1%} | {row['agreement']:.1%} |" in card
    assert 2 in load_compact_vocabulary(folder / "compact_vocabulary.json", 49152)  # <|im_end|>
    for found in available_models():
        if found.name == "smollm2-135m-adapters" and found.present:
            assert sorted(load_model(found.name).heads.adapters) == described["depths"]


def test_the_shipped_traces_are_of_the_shipped_model(embedded: LayeredModel) -> None:
    traces = load_traces("stdlib-20m")
    assert traces.manifest["model_hash"] == embedded.weights_hash()
    assert traces.manifest["head"] == embedded.head_hash()
    assert len(set(traces.tasks)) >= 5
    agreement = traces.match.mean(0)
    assert agreement[0] < agreement[-1]
    # On another interpreter some references name a text that differs there.
    sources = {prompt.source: prompt.text for prompt in load_prompts("stdlib:train")}
    known = [n for n, source in enumerate(traces.sources) if source in sources]
    if len(known) < 2:
        pytest.skip("this interpreter's library differs from the one that the traces were cut from")
    for text in known[:2]:
        recorded = traces.tokens_of(text)
        assert traces.prompts[text] is None  # the library's source is named, not copied
        assert traces.prompt_tokens[text] is None
        ids = embedded.encode(sources[traces.sources[text]])
        assert len(ids) == traces.prompt_lengths[text]
        fresh = autoregressive(embedded, ids, len(recorded)).tokens
        same = np.array(fresh) == recorded
        if not same.all():  # a batch may round a near-tie the other way
            first = int(np.argmin(same))
            assert traces.final_gap[traces.start[text] + first] < 1e-3
