"""The table of usual models' decode steps: its shapes are models, its limit is theirs. A GPU is not needed."""

from __future__ import annotations

import pytest
import torch

from gapless.bench import model_shapes
from gapless.bench.workload_rows import Rates
from gapless.kernels.tilings import choose_tiling
from gapless.models.registry import hf_config
from gapless.models.shapes import weight_shapes

LAYER_BYTES = 2 * 28 * (1024 * 4096 + 2048 * 1024 + 3 * 1024 * 3072)  # the matrices of Qwen3-0.6B


@pytest.mark.parametrize("name", model_shapes.MODELS)
def test_every_shape_is_a_model_whose_few_rows_have_fused_products(name: str) -> None:
    config = hf_config(model_shapes.MODELS[name], None)
    embedding = weight_shapes(config)[f"{config.names.embedding}.weight"]
    assert choose_tiling(8, *embedding, ring=True) is not None  # its head


def test_the_limit_counts_weights_and_keys() -> None:
    shape = model_shapes.MODELS["Qwen3-0.6B"]
    least = LAYER_BYTES + 2 * 151936 * 1024
    one, two = (model_shapes.step_bytes(shape, count) for count in (1, 2))
    assert two - one == model_shapes.CONTEXT * 28 * 2 * 8 * 128 * 2
    assert least < one - (two - one) < least * 1.001  # norms besides


def test_an_untied_embedding_is_not_read() -> None:
    shape = model_shapes.MODELS["Mistral-7B"]
    tied = shape | {"tie_word_embeddings": True}
    assert model_shapes.step_bytes(shape, 1) == model_shapes.step_bytes(tied, 1)


def test_a_row_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_shapes, "measure", lambda shape, rows: dict.fromkeys(rows, 0.002))
    monkeypatch.setattr(model_shapes, "step_bytes", lambda shape, count: 1e9 * count)
    assert model_shapes.table_row("Qwen3-4B", Rates(1e12, 1.0), [1, 2]) == "| Qwen3-4B | 2.000 (50%) | 2.000 (100%) |"


@pytest.mark.parametrize(
    ("argv", "error"),
    [(["Qwen9"], "unknown model 'Qwen9'; known: SmolLM2"), (["--rows", "0"], "at least 1"), ([], "NVIDIA GPU")],
)
def test_bad_calls_end_with_one_line(argv: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    if not argv and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit) as ended:
        model_shapes.main(argv)
    assert ended.value.code == 2
    assert error in capsys.readouterr().err
