"""The page of models says what the registry says."""

from pathlib import Path

from gapless.models.registry import FAMILIES
from gapless.proof.model_table import BEGIN, END, page_with_table, table

PAGE = Path(__file__).parents[2] / "docs/models.md"


def test_the_page_has_the_table() -> None:
    page = PAGE.read_text()
    assert page_with_table(page) == page, "run python -m gapless.proof.model_table docs/models.md"


def test_every_family_has_a_row_with_names_that_people_know() -> None:
    rows = table().splitlines()[2:]
    assert len(rows) == len(FAMILIES)
    for family, row in zip(FAMILIES, rows, strict=True):
        assert family.models
        assert row.startswith(f"| {family.models} | `{family.architecture}` |")


def test_only_what_stands_between_the_marks_changes() -> None:
    page = page_with_table(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert page == f"before\n{BEGIN}\n\n{table()}\n\n{END}\nafter\n"


def test_what_runs_where() -> None:
    rows = {row.split("`")[1]: row for row in table().splitlines()[2:]}
    assert rows["GraniteForCausalLM"].endswith("| native step | fused layers |")
    assert rows["GPTNeoXForCausalLM"].endswith("| native step | general layers (layer norms) |")
    assert rows["MistralForCausalLM"].endswith("| yes | native step | fused layers |")
    assert rows["Qwen3MoeForCausalLM"].endswith("| native step | fused layers |")
