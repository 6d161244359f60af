"""The table of models in docs/models.md, from the registry: what each family is called, and what runs it where.

`python -m gapless.proof.model_table FILE` writes it into a page, between two marks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from gapless.models.config import ModelConfig
from gapless.models.family import Family
from gapless.models.registry import FAMILIES, hf_config
from gapless.models.spec import FUSED_LAYERS, GENERAL_LAYERS, KERNELS, NATIVE, attention_features, lacking
from gapless.proof.tiny import FAMILIES as TINY
from gapless.proof.tiny import raw_config, tiny_config

BEGIN, END = "<!-- made by gapless.proof.model_table -->", "<!-- end of it -->"
WINDOW = {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0}
HEAD = ("models", "architecture", "GGUF", "windows", "on a CPU", "on a GPU")


def table() -> str:
    """Markdown, a row for each family."""
    rows = [HEAD, ("---",) * len(HEAD), *(_row(family) for family in FAMILIES)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def page_with_table(page: str) -> str:
    """The page, with what stands between its marks replaced."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def _row(family: Family) -> tuple[str, ...]:
    gguf = f"`{family.gguf.architecture if family.gguf is not None else family.gguf_name}`"
    config, windows = tiny_config(family.model_type), "yes" if _has_windows(family) else ""
    return family.models, f"`{family.architecture}`", gguf, windows, _on_cpu(config), _on_gpu(config)


def _has_windows(family: Family) -> bool:
    """Whether a config can give layers a window."""
    config = hf_config(raw_config(**TINY[family.model_type] | WINDOW))
    return any(spec.window is not None for spec in config.attention_specs())


def _on_cpu(config: ModelConfig) -> str:
    missing = lacking((*attention_features(config.attention_specs()), *config.features()), NATIVE)
    return "native step" if missing is None else f"torch ({missing})"


def _on_gpu(config: ModelConfig) -> str:
    missing = next(_refused_by_gpus(config), None)
    if missing is not None:
        return f"no ({missing})"
    slow = lacking(config.features(), FUSED_LAYERS)
    return "fused layers" if slow is None else f"general layers ({slow})"


def _refused_by_gpus(config: ModelConfig) -> Iterator[str]:
    for needed, has in ((attention_features(config.attention_specs()), KERNELS), (config.features(), GENERAL_LAYERS)):
        if (missing := lacking(needed, has)) is not None:
            yield missing


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(page_with_table(path.read_text()))
