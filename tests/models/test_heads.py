"""Exit heads: compact vocabulary, adapters, and the summary of a row of logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sde_gym.errors import InputError
from sde_gym.models.heads import ExitHeads, row_summary, summarise, summarise_row


def heads(**options: object) -> ExitHeads:
    torch.manual_seed(0)
    return ExitHeads(lambda x: x, torch.randn(20, 6), None, 4, (7,), **options)  # type: ignore[arg-type]


def test_a_compact_head_is_the_full_head_at_its_ids() -> None:
    hidden = torch.randn(3, 6)
    compact = heads(compact_vocabulary=[3, 1, 12])
    ids = compact.vocabulary(2)
    assert ids is not None
    assert ids.tolist() == [1, 3, 7, 12]  # end of text joins by itself
    torch.testing.assert_close(compact.logits(hidden, 2), heads().logits(hidden, 2)[:, ids])
    assert compact.logits(hidden, 2, compact=False).shape == (3, 20)
    assert compact.vocabulary(4) is None
    assert compact.logits(hidden, 4).shape == (3, 20)  # the last layer always has all tokens


def test_an_adapter_acts_at_its_depth_only() -> None:
    hidden = torch.randn(2, 6)
    adapted = heads(adapters={2: lambda x: -x})
    torch.testing.assert_close(adapted.logits(hidden, 2), -heads().logits(hidden, 2))
    torch.testing.assert_close(adapted.logits(hidden, 3), heads().logits(hidden, 3))


def test_soft_capping_bounds_the_logits() -> None:
    assert heads(softcap=0.5).logits(100 * torch.randn(2, 6), 4).abs().max() <= 0.5


@pytest.mark.parametrize("ids", [[-1, 2], [3, 20], []])
def test_bad_vocabularies_are_refused(ids: list[int]) -> None:
    with pytest.raises(InputError, match="compact vocabulary"):
        heads(compact_vocabulary=ids)


@pytest.mark.parametrize("depth", [0, 4])
def test_adapters_at_the_last_layer_are_refused(depth: int) -> None:
    with pytest.raises(InputError, match=r"1\.\.3"):
        heads(adapters={depth: lambda x: x})


def test_summarise_against_numpy() -> None:
    logits = torch.randn(5, 30) * 4
    vocabulary = torch.arange(100, 130)
    ids, best, entropy = summarise(logits, 4, vocabulary)
    wide = logits.double().numpy()
    p = np.exp(wide) / np.exp(wide).sum(-1, keepdims=True)
    order = np.argsort(-p, -1)[:, :4]
    np.testing.assert_array_equal(ids.numpy(), order + 100)
    np.testing.assert_allclose(best.numpy(), np.log(np.take_along_axis(p, order, -1)), atol=1e-5)
    np.testing.assert_allclose(entropy.numpy(), -(p * np.log(p)).sum(-1), atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True], ids=["numpy", "numba"])
def test_one_row_alone_says_the_same(compiled: bool) -> None:
    if compiled:
        pytest.importorskip("numba")
    summarise_one = row_summary() if compiled else summarise_row
    logits = torch.randn(50, 40) * 5
    logits[3, 7] = -torch.inf
    logits[4, :] = 0.0
    ids, best, entropy = summarise(logits, 6)
    for n, row in enumerate(logits.numpy()):
        column, values, spread = summarise_one(row, 6)
        if n != 4:  # a tie of all has no order
            assert column == ids[n, 0]
        np.testing.assert_allclose(values, best[n].numpy(), atol=1e-5)
        assert values == sorted(values, reverse=True)
        assert spread == pytest.approx(entropy[n].item(), abs=1e-5)


def test_summarise_survives_impossible_tokens() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0]])
    _, best, entropy = summarise(logits, 2)
    assert torch.isfinite(best).all()
    assert entropy.item() == pytest.approx(np.log(2), abs=1e-6)
