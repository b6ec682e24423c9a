"""Adapters: new ones change nothing, files are checked, and training makes shallow states agree more."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch

from sde_gym.decoding import autoregressive, speculative
from sde_gym.errors import InputError
from sde_gym.models.adapter_settings import HELD_OUT, AdapterSettings, OwnTextSettings
from sde_gym.models.adapter_trainer import DepthTrainer, loss_of
from sde_gym.models.adapter_training import _prompts, train_adapters
from sde_gym.models.adapters import (
    KINDS,
    describe_adapters,
    load_adapters,
    new_adapter,
    save_adapters,
)
from sde_gym.models.cost import head_sizes
from sde_gym.models.generation import generate_greedy
from sde_gym.models.layered import LayeredModel
from sde_gym.models.loading import ADAPTERS_FILE, load_model
from sde_gym.models.own_states import load_own_states, write_own_states
from sde_gym.models.text_plan import Frame, TextPlan, frame
from sde_gym.policies.rules import StaticController

SETTINGS = AdapterSettings(
    depths=(2, 3), size=32, vocabulary=280, tokens=6000, opening=4, answer=24, texts=240, lanes=80, top_k=8,
    passes=6.0, batch_tokens=256, checkpoint_every=50,
)  # fmt: skip

GREEDY = OwnTextSettings(tokens=10, draw_answers=False)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a tokenizer of one token a word."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    hf = tiny_models.llama(3)
    LayeredModel(hf)  # what was opened can be saved
    hf.save_pretrained(folder)
    words = {f"w{number}": number for number in range(hf.config.vocab_size)}
    splitter = Tokenizer(WordLevel(words, unk_token="w0"))
    splitter.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=splitter, bos_token="w1")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("adapters")
    train_adapters(model_folder, SETTINGS, out, threads=1)
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_adapter_changes_no_logits(kind: str) -> None:
    model = LayeredModel(tiny_models.llama())
    hidden = torch.randn(5, model.hidden_size, generator=torch.Generator().manual_seed(0)) * 7
    plain = model.heads.logits(hidden, 2)
    model.heads.adapters[2] = new_adapter(kind, model.hidden_size, 8)
    torch.testing.assert_close(model.heads.logits(hidden, 2), plain, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_gives_back_what_was_saved(kind: str, tmp_path: Path) -> None:
    model = LayeredModel(tiny_models.llama(), name="tiny")
    torch.manual_seed(0)
    adapters = {depth: new_adapter(kind, model.hidden_size, 6) for depth in (1, 3)}
    for adapter in adapters.values():
        for parameter in adapter.parameters():
            parameter.data.normal_()
    path = tmp_path / ADAPTERS_FILE
    save_adapters(path, adapters, {"model": "tiny", "model_hash": model.weights_hash()})
    assert describe_adapters(path)["depths"] == [1, 3]
    found = load_adapters(path, model)
    for depth, adapter in adapters.items():
        for name, tensor in adapter.state_dict().items():
            assert torch.equal(found[depth].state_dict()[name], tensor.half().float())


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = LayeredModel(tiny_models.llama(), name="tiny")
    path = tmp_path / ADAPTERS_FILE
    known = {"model": "tiny", "model_hash": model.weights_hash()}
    with pytest.raises(InputError, match="no such file"):
        load_adapters(path, model)
    save_adapters(path, {2: new_adapter("gated", model.hidden_size, 4)}, known)
    load_adapters(path, model)
    with pytest.raises(InputError, match="train adapters for this model"):
        load_adapters(path, LayeredModel(tiny_models.llama(5), name="other"))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="truncated"):
        load_adapters(path, model)
    save_adapters(path, {2: new_adapter("linear", 7, 1)}, known)
    with pytest.raises(InputError, match="does not fit"):
        load_adapters(path, model)
    save_adapters(path, {9: new_adapter("linear", model.hidden_size, 1)}, known)
    with pytest.raises(InputError, match="has 4 layers"):
        load_adapters(path, model)
    with pytest.raises(InputError, match="of one kind"):
        save_adapters(path, {}, known)


def test_the_loss_is_the_cross_entropy_of_what_the_head_offers() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]])
    columns = torch.tensor([[2, 0], [-1, 1]])
    share = torch.tensor([[0.75, 0.25], [0.5, 0.5]])
    logs = logits.log_softmax(-1)
    expected = -(0.75 * logs[0, 2] + 0.25 * logs[0, 0] + 0.5 * logs[1, 1]) / 2
    torch.testing.assert_close(loss_of(logits, columns, share, 0.0), expected)
    torch.testing.assert_close(loss_of(logits, columns, share, 1.0), -logs[0, 2] / 2)


def test_a_text_is_an_opening_and_an_answer(model_folder: Path, tmp_path: Path) -> None:
    settings = OwnTextSettings(
        tokens=200, opening=3, answer=12, texts=14, lanes=4, top_k=5, draw_answers=False, seed=3
    )
    (path,) = write_own_states(load_model(model_folder), (1, 3), settings, tmp_path)
    block = load_own_states(path, (1, 3))
    assert len(block) == len(block.hidden[1]) == len(block.hidden[3]) == 14 * 15
    assert block.text.tolist() == [text for text in range(14) for _ in range(15)]
    assert block.greedy.tolist() == ([False] * 3 + [True] * 12) * 14
    with pytest.raises(InputError, match="no states at depth 2"):
        load_own_states(path, (2,))


def test_states_and_distribution_are_those_of_the_text_alone(model_folder: Path, tmp_path: Path) -> None:
    model = load_model(model_folder)
    settings = OwnTextSettings(
        tokens=10, opening=1, answer=10, texts=6, lanes=3, top_k=4, draw_answers=False, seed=1
    )
    (path,) = write_own_states(model, (2,), settings, tmp_path)
    block = load_own_states(path, (2,))
    (first,) = frame(model).prefix
    sequence = model.sequence()
    sequence.append([first])
    sequence.advance(2)
    # what the model says behind every token that may have been drawn
    written = generate_greedy(model, [[first, token] for token in range(model.vocab_size)], 10)
    for text in range(settings.texts):
        rows = block.text == text
        torch.testing.assert_close(
            block.hidden[2][rows][0].float(), sequence.hidden(2, 1)[0], rtol=0.02, atol=0.02
        )
        assert block.ids[rows][1:, 0].tolist() in written
        assert (block.logits[rows][:, 0] == 0).all()
        assert (block.logits[rows].diff(dim=1) <= 0).all()


def test_the_same_seed_writes_the_same_files_also_after_a_stop(model_folder: Path, tmp_path: Path) -> None:
    model = load_model(model_folder, "bfloat16")
    settings = OwnTextSettings(tokens=300, opening=3, answer=9, texts=14, lanes=4, top_k=5)
    whole = write_own_states(model, (1,), settings, tmp_path / "whole")
    assert len(whole) == 2
    write_own_states(model, (1,), replace(settings, tokens=100), tmp_path / "stopped")
    stopped = write_own_states(model, (1,), settings, tmp_path / "stopped")
    assert [path.read_bytes() for path in stopped] == [path.read_bytes() for path in whole]
    whole[0].write_bytes(whole[0].read_bytes()[:100])
    with pytest.raises(InputError, match="truncated"):
        write_own_states(model, (1,), settings, tmp_path / "whole")
    with pytest.raises(InputError, match="of another model, of other settings or prompts"):
        write_own_states(model, (1,), replace(settings, seed=9), tmp_path / "stopped")
    with pytest.raises(InputError, match=r"holds states at \[1\], not at \[2\]"):
        write_own_states(model, (2,), settings, tmp_path / "stopped")


def test_training_makes_shallow_states_agree(trained: Path) -> None:
    report = describe_adapters(trained / ADAPTERS_FILE)["report"]
    for row in report.values():
        assert row["agreement"] > row["without"] + 0.1
        assert row["agreement"] <= row["offered"] <= 1
    assert "| 3 |" in (trained / "README.md").read_text()


def test_a_model_with_adapters_decodes_as_the_model_alone(model_folder: Path, trained: Path) -> None:
    plain, adapted = load_model(model_folder), load_model(f"{model_folder}+{trained}")
    assert sorted(adapted.heads.adapters) == [2, 3]
    assert adapted.weights_hash() == plain.weights_hash()
    assert adapted.head_hash() != plain.head_hash()
    assert len(adapted.compact_vocabulary) == SETTINGS.vocabulary
    assert head_sizes(adapted)[0] > 280 / 300 * head_sizes(plain)[0]  # fewer columns, and the adapter
    accepted = {}
    for name, model in (("plain", plain), ("adapted", adapted)):
        results = [speculative(model, [1, start], StaticController(2, 3), (2,), 24) for start in range(2, 7)]
        for start, result in zip(range(2, 7), results, strict=True):
            assert result.tokens == autoregressive(plain, [1, start], 24).tokens
        accepted[name] = sum(result.accepted for result in results)
    assert accepted["adapted"] > accepted["plain"]


def test_a_stopped_training_goes_on_to_the_same_adapters(
    model_folder: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(trained / "own-text", tmp_path / "own-text")

    def stop(stage: str, done: int, *_: Any) -> None:
        if stage == "depth 3" and done >= 100:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_adapters(model_folder, SETTINGS, tmp_path, threads=1, progress=stop)
    assert (tmp_path / "trained-2.safetensors").exists()
    assert (tmp_path / "training-3.safetensors").exists()
    steps = count_steps(monkeypatch)
    train_adapters(model_folder, SETTINGS, tmp_path, threads=1)
    assert set(steps) == {3}
    assert len(steps) < 100, "it did not go on from the checkpoint"
    again, first = (torch_tensors(folder / ADAPTERS_FILE) for folder in (tmp_path, trained))
    assert again.keys() == first.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(again[name], tensor, rtol=0.05, atol=0.02)


def count_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets an entry at every step from now on."""
    counted: list[int] = []
    step = DepthTrainer.step

    def counting(self: DepthTrainer) -> float:
        counted.append(self.depth)
        return step(self)

    monkeypatch.setattr(DepthTrainer, "step", counting)
    return counted


def torch_tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: tensor.float() for name, tensor in load_file(path).items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "cubic"}, "no 'cubic'"),
        ({"size": 0}, "size must be at least 1"),
        ({"hard": 1.5}, r"hard must lie in \[0, 1\]"),
        ({"passes": 0.0}, "passes must be positive"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"size": 1.5}, "size: 1.5 must be a whole number"),
        ({"hard": "x"}, "hard: 'x' must be a number"),
        ({"min_p": -0.1}, r"min_p must lie in \[0, 1\]"),
        ({"prompt_share": 2}, r"prompt_share must lie in \[0, 1\]"),
        ({"first_temperature": 0.0}, "first_temperature must be positive"),
        ({"texts": 19}, "texts must be at least 20, not 19"),
        ({"drawn": False}, "give draw_answers=False, too"),
    ],
)
def test_settings_out_of_range_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(SETTINGS, **change)


def test_folders_and_models_that_do_not_fit_are_refused(
    model_folder: Path, trained: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="begun with other settings"):
        train_adapters(model_folder, replace(SETTINGS, seed=5), trained, threads=1)
    with pytest.raises(InputError, match="has adapters already"):
        train_adapters(f"{model_folder}+{trained}", SETTINGS, tmp_path, threads=1)
    with pytest.raises(InputError, match=r"must lie in 1\.\.3"):
        train_adapters(model_folder, replace(SETTINGS, depths=(2, 4)), tmp_path, threads=1)
    with pytest.raises(InputError, match="holds no adapters"):
        load_model(f"{model_folder}+{tmp_path}")
    with pytest.raises(InputError, match="no model 'nothing'"):
        load_model(f"nothing+{trained}")


class ChatTokenizer:
    """One token a character, and a template around a user's turn."""

    chat_template = "given"
    bos_token_id = None

    def __init__(self, template: str) -> None:
        self.template = template

    def apply_chat_template(self, turns: list[dict[str, str]], **_: Any) -> str:
        return self.template.replace("?", turns[0]["content"])

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


def test_a_chat_template_is_taken_apart(tmp_path: Path) -> None:
    model = LayeredModel(tiny_models.llama(), ChatTokenizer("u:?;a:"), "chat")
    found = frame(model)
    assert "".join(map(chr, found.prefix)) == "u:"
    assert "".join(map(chr, found.bridge)) == ";a:"
    settings = replace(GREEDY, opening=4, answer=6, texts=5, lanes=2)
    (path,) = write_own_states(model, (1,), settings, tmp_path)
    block = load_own_states(path, (1,))
    for text in range(5):
        greedy = block.greedy[block.text == text].tolist()
        assert greedy[-6:] == [True] * 6  # the forced bridge is no example of the model's own choice
        assert greedy[:-6] == [False] * (len(greedy) - 6)
        assert 1 <= len(greedy) - 6 <= 5
    with pytest.raises(InputError, match="does not show where the user's words are"):
        frame(LayeredModel(tiny_models.llama(), ChatTokenizer("fixed"), "chat"))
    with pytest.raises(InputError, match="has no tokenizer"):
        frame(LayeredModel(tiny_models.llama()))


def test_given_prompts_are_answered_by_their_share_of_the_texts() -> None:
    prompts = [[1, 7, 8, 9], [1, 5]]
    settings = replace(GREEDY, opening=2, answer=3, texts=40, lanes=5, prompt_share=0.25)
    fed: dict[int, list[int]] = {}
    greedy: dict[int, set[bool]] = {}
    for block in range(2):
        plan = TextPlan(Frame((1, 2), (3, 4)), settings, (0,), prompts, block)
        assert plan.common == (1,)
        while len(plan.text):
            for lane, text in enumerate(plan.text):
                number = block * settings.texts + int(text)
                fed.setdefault(number, []).append(int(plan.fed[lane]))
                if fed[number][-1] >= 10:  # behind the first token of an answer or an opening
                    greedy.setdefault(number, set()).add(bool(plan.is_greedy[lane]))
            _, done = plan.go_on(np.full(len(plan.text), 11), np.full(len(plan.text), 10))
            plan.keep([lane for lane in range(len(plan.text)) if lane not in done])
    answered = {number: (1, *tokens) for number, tokens in fed.items() if tokens[0] != 2}
    assert sorted(fed) == list(range(80))
    assert abs(len(answered) - 20) <= 1
    (first, second, *later) = [answered[number] for number in sorted(answered)]
    assert first == (1, 7, 8, 9, 10, 10)
    assert second == (1, 5, 10, 10)
    turns = [(1, 7, 8, 9, 11, 11), (1, 5, 11, 11)] * 10
    assert later == turns[: len(later)]  # drawn: another greedy answer would be the same
    for number in set(fed) - set(answered):
        assert fed[number] == [2, 11, 11, 3, 4, 10, 10]
    assert [True in greedy[number] for number in sorted(answered)] == [True] * 2 + [False] * len(later)


def test_drawn_answers_leave_greedy_ones_to_judge_on() -> None:
    settings = OwnTextSettings(opening=1, answer=2, texts=60, lanes=60, prompt_share=0.5)
    plan = TextPlan(Frame((1,), ()), settings, (0,), [[6, 5]])
    assert 6 in plan.fed
    assert plan.fed[plan.text % HELD_OUT == HELD_OUT - 1].tolist() == [1] * 3  # texts of the model's own
    plan.go_on(np.full(60, 11), np.full(60, 10))
    assert np.flatnonzero(plan.is_greedy).tolist() == [19, 39, 59]


def test_states_behind_a_given_prompt_are_those_of_the_prompt(model_folder: Path, tmp_path: Path) -> None:
    model = load_model(model_folder)
    prompts = [[1, 2, 3, 4], [5, 6]]
    settings = OwnTextSettings(
        tokens=10, answer=6, texts=4, lanes=4, top_k=2, draw_answers=False, prompt_share=1.0
    )
    (path,) = write_own_states(model, (2,), settings, tmp_path, prompts=prompts)
    block = load_own_states(path, (2,))
    for text, prompt in enumerate(prompts):
        rows = block.text == text
        assert block.greedy[rows].all()
        sequence = model.sequence()
        sequence.append(prompt)
        sequence.advance(2)
        torch.testing.assert_close(
            block.hidden[2][rows][0].float(), sequence.hidden(2, 1)[0], rtol=0.02, atol=0.02
        )
        (written,) = generate_greedy(model, [prompt], 6)
        assert block.ids[rows][:, 0].tolist() == written
    assert not block.greedy[block.text >= 2].any()
    with pytest.raises(InputError, match="of other settings or prompts"):
        write_own_states(model, (2,), settings, tmp_path, prompts=prompts[:1])


def test_prompts_that_are_too_long_are_left_out_or_refused(model_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "w4 w5"}\n{"prompt": "w6 w7 w8"}\n')
    with pytest.raises(InputError, match="every prompt has more than 1 tokens"):
        train_adapters(model_folder, replace(SETTINGS, prompts=str(file), longest_prompt=1), tmp_path / "out")
    told: list[tuple[str, int, int, str]] = []
    assert not list((tmp_path / "out").glob("*")), "nothing is in the way of a better call"
    with file.open("a") as more:
        more.write('{"prompt": "' + "w9 " * 5000 + '"}\n')  # more than the context holds
    settings = replace(SETTINGS, prompts=str(file), longest_prompt=2)
    assert _prompts(load_model(model_folder), settings, lambda *what: told.append(what)) == [[4, 5]]
    assert told == [("prompts", 1, 3, "1 of 3 have at most 2 tokens")]
