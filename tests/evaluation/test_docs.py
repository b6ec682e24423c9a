"""docs/evaluation.md explains every column of `results.json`."""

from __future__ import annotations

from sde_gym.evaluation.benchmark import Measurement, summarise_rows
from sde_gym.evaluation.decode_methods import METHODS
from sde_gym.evaluation.decode_tables import Texts, method_rows
from sde_gym.evaluation.report import METHOD_NAMES
from tests.pages import first_column, marked, read_page

PAGE = read_page("evaluation")


def test_the_columns_are_those_computed() -> None:
    row = Measurement("ar", "p", "t", 0, 4, 1.0, 0.1, 0, 0, 4, 4, 0, 0, 0.0, 0.0, (1, 2, 3, 4, 5))
    (computed,) = summarise_rows([row])
    assert first_column(marked(PAGE, "rows")) == list(computed)


def test_the_decoding_benchmark_is_told_in_full() -> None:
    assert first_column(marked(PAGE, "decode-methods")) == list(METHODS)
    row = Measurement("ar", "p", "t", 0, 4, 1.0, 0.1, 0, 0, 4, 4, 0, 0, 0.0, 0.0, (1, 2))
    texts = Texts(WithWords(), {"p": [0]}, {}, None)  # type: ignore[arg-type]
    (computed,), _ = method_rows([row], texts, {}, {})
    assert first_column(marked(PAGE, "decode-rows")) == [
        name for name in computed if name not in summarise_rows([row])[0]
    ]


class WithWords:
    """A model that only decodes."""

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def test_every_method_is_named() -> None:
    for method in METHOD_NAMES:
        assert f"| `{method}` |" in PAGE
