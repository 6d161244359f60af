"""First times after the engine was ready: counted, with names and steps, and bounded."""

from __future__ import annotations

from gapless.device.late import MOST_NAMES, Late


def test_before_the_engine_is_ready_kernels_are_counted_as_built() -> None:
    late = Late()
    late.compiled("product", 1.5, cached=False)
    late.compiled("product", 0.0, cached=True)
    late.loaded("product")
    assert late.built == {"compiled": 1, "found in the cache": 1, "loaded": 1}
    late.ready()
    assert late.ledger() == {}
    assert not late.notes


def test_after_it_they_are_counted_by_name_with_the_step() -> None:
    late = Late()
    late.ready()
    late.where = "compute 17"
    late.compiled("product", 1.5, cached=False)
    late.loaded("product")
    late.compiled("argmax", 0.01, cached=True)
    late.where = "compute 18"
    late.compiled("product", 2.0, cached=False)
    assert late.ledger() == {
        "after ready: compiled product": 2,
        "after ready: loaded product": 1,
        "after ready: found in the cache argmax": 1,
    }
    assert list(late.notes) == [
        "compute 17: compiled product, 1.50 s",
        "compute 17: loaded product",
        "compute 17: found in the cache argmax",
        "compute 18: compiled product, 2.00 s",
    ]
    assert not late.built


def test_allocations_count_from_the_moment_it_was_ready() -> None:
    late, taken = Late(), [40]
    late.watch_allocations(lambda: taken[0])
    taken[0] = 50
    assert not late.note_allocations()
    late.ready()
    assert late.ledger() == {}
    late.where = "compute 3"
    taken[0] = 52
    assert late.note_allocations()
    assert not late.note_allocations()
    assert late.ledger() == {"after ready: device allocation": 2}
    assert list(late.notes) == ["compute 3: device allocation"]


def test_names_that_were_there_before_are_not_new() -> None:
    late, shapes = Late(), ["1x8x8"]
    late.watch_names("first product", shapes)
    shapes.append("2x8x8")
    late.ready()
    shapes.append("3x8x8")
    assert late.ledger() == {"after ready: first product 3x8x8": 1}


def test_the_number_of_names_is_bounded() -> None:
    late, shapes = Late(), list[str]()
    late.watch_names("first product", shapes)
    late.ready()
    shapes += [f"{i}x8x8" for i in range(100)]
    for i in range(100):
        late.compiled(f"kernel{i}", 1.0, cached=False)
    found = late.ledger()
    assert len(found) <= 2 * MOST_NAMES + 2
    assert sum(found.values()) == 200
    assert found["after ready: first product, others"] == 100 - MOST_NAMES
    assert len(late.notes) == 32
