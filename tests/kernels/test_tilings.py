"""How products are cut: every tiling is one that the kernels can run."""

from __future__ import annotations

import pytest

from gapless.kernels.tilings import (
    ALONE_BYTES,
    MAX_ROWS,
    NUM_CORES,
    SHARED_MEMORY_BYTES,
    VECTOR_BYTES,
    Tiling,
    choose_tiling,
)

# hidden, intermediate, queries' size, keys' size, vocabulary
MODELS = {
    "8B": (4096, 14336, 4096, 1024, 128256),
    "0.6B": (1024, 3072, 2048, 1024, 151936),
    "1B": (2048, 8192, 2048, 512, 128256),
}
MIDDLE = {  # sizes that are no powers of two
    "SmolLM2-135M": (576, 1536, 576, 192, 49152),
    "Qwen2.5-0.5B": (896, 4864, 896, 128, 151936),
    "Gemma 3 1B": (1152, 6912, 1024, 256, 262144),
    "Qwen2.5-1.5B": (1536, 8960, 1536, 256, 151936),
    "Qwen3-4B": (2560, 9728, 4096, 1024, 151936),
    "Qwen2.5-7B": (3584, 18944, 3584, 512, 152064),
    "Qwen3-14B": (5120, 17408, 5120, 1024, 151936),
}
OTHERS = {  # some of whose products have no tiling
    "TinyLlama-1.1B": (2048, 5632, 2048, 256, 32000),
    "Llama-3.2-3B": (3072, 8192, 3072, 1024, 128256),
    "OpenLLaMA-3B": (3200, 8640, 3200, 3200, 32000),
    "Llama-2-13B": (5120, 13824, 5120, 5120, 32000),
    "Qwen2.5-72B": (8192, 29568, 8192, 1024, 152064),
    "Llama-3.1-405B": (16384, 53248, 16384, 1024, 128256),
}
SMALL_BYTES = 90_000  # of shared memory for stages, on a GPU with 99 KiB
ROWS = [1, 2, 8, 16, 17, 32, 33, 64, 65, 128, 129, MAX_ROWS]


def products(model: str) -> dict[str, tuple[int, int, bool, bool]]:
    """Columns, inner size, gated, adds."""
    hidden, intermediate, q_size, kv_size, vocab = (MODELS | MIDDLE | OTHERS)[model]
    return {
        "qkv": (q_size + 2 * kv_size, hidden, False, False),
        "out": (hidden, q_size, False, True),
        "gate_up": (intermediate, hidden, True, False),
        "down": (hidden, intermediate, False, True),
        "head": (vocab, hidden, False, False),
    }


def stage_bytes(tiling: Tiling, *, gated: bool) -> int:
    """Of x and of one or two weights, in bfloat16."""
    return 2 * tiling.block_k * (tiling.block_m + tiling.block_n * (2 if gated else 1))


def tile(num_rows: int, model: str, name: str, *, ring: bool = False) -> Tiling | None:
    columns, inner, gated, adds = products(model)[name]
    return choose_tiling(num_rows, columns, inner, gated=gated, adds=adds, ring=ring)


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_rows", ROWS)
def test_tilings_cover_their_product_and_fit_the_chip(num_rows: int, model: str, ring: bool) -> None:
    for name, (columns, inner, gated, _) in products(model).items():
        tiling = tile(num_rows, model, name, ring=ring)
        if tiling is None:
            assert num_rows > 64, name  # few rows of such a model always have one
            continue
        assert columns % tiling.block_n == 0
        assert inner % (tiling.splits * tiling.block_k) == 0
        assert not (gated and tiling.splits > 1)  # parts of a gated product are not added up
        assert (tiling.kernel == "vector") == (tiling.block_m == 1)
        if tiling.kernel != "vector":
            assert tiling.block_m in (16, 32, 64, 128)
            assert num_rows <= tiling.block_m or num_rows > 64
            assert tiling.kernel == "tiles" or (ring and num_rows <= 32)
            assert tiling.kernel == "ring" or (tiling.triggers != "requested" and not tiling.row_stages)
            assert tiling.row_stages <= tiling.num_stages
            assert 2 <= tiling.num_stages <= SHARED_MEMORY_BYTES // stage_bytes(tiling, gated=gated)
            fitting = tiling.stages_within(SMALL_BYTES, gated=gated)
            assert fitting == min(tiling.num_stages, SMALL_BYTES // stage_bytes(tiling, gated=gated)) >= 1


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("model", [*MODELS, *MIDDLE, *OTHERS])
def test_tilings_stay_within_the_workspace(model: str, ring: bool) -> None:
    launcher = pytest.importorskip("gapless.kernels.products")
    for name, (columns, inner, gated, adds) in products(model).items():
        for num_rows in range(1, MAX_ROWS + 2):
            tiling = tile(num_rows, model, name, ring=ring)
            if tiling is None:
                continue
            num_tiles, row_tiles = columns // tiling.block_n, -(-num_rows // tiling.block_m)
            assert row_tiles * tiling.block_m <= MAX_ROWS  # padding has sums of squares too
            assert not adds or num_tiles <= launcher.SQUARES_TILES
            if tiling.kernel == "vector":
                held = 2 * (2 if gated else 1) * tiling.block_n * inner
                assert held <= (VECTOR_BYTES if num_tiles > NUM_CORES else ALONE_BYTES)
                assert num_tiles <= 2 * NUM_CORES
            if tiling.splits > 1:
                assert num_tiles * row_tiles <= launcher.COUNTERS
                assert tiling.splits * columns * row_tiles * tiling.block_m <= launcher.PARTS
            if tiling.prefetch_bytes:
                least_part = inner // tiling.block_k // tiling.splits * tiling.block_k
                check_prefetches(tiling, least_part, inner, launcher.PREFETCHES)


def check_prefetches(tiling: Tiling, part_size: int, inner: int, num_prefetches: int) -> None:
    """Pieces of whole 16 bytes, as the instruction takes them, within the program's part of each row."""
    prefetches_a_row = num_prefetches // tiling.block_n
    assert prefetches_a_row * tiling.block_n == num_prefetches
    size = min(tiling.prefetch_bytes // num_prefetches, 2 * part_size // prefetches_a_row)
    assert size > 0
    assert all(offset % 16 == 0 for offset in (size, 2 * part_size, 2 * inner))
    assert prefetches_a_row * size <= 2 * part_size


def test_one_row_of_a_small_model_is_in_flight_at_once() -> None:
    """In the largest tiles that leave hardly a core idle."""
    for name, block_n in {"qkv": 32, "out": 8, "gate_up": 16, "down": 8}.items():
        tiling = tile(1, "0.6B", name)
        assert tiling is not None
        assert tiling.kernel == "vector"
        assert tiling.block_n == block_n
    large = tile(1, "8B", "gate_up")
    assert large is not None
    assert large.kernel == "tiles"


RINGS = {  # as measured
    ("8B", 1): {
        "qkv": Tiling(16, 64, 128, num_stages=6, triggers="requested", kernel="ring"),
        "out": Tiling(16, 64, 128, splits=2, num_stages=6, kernel="ring"),
        "gate_up": Tiling(16, 64, 256, num_stages=2, kernel="ring"),
    },
    ("8B", 17): {
        "qkv": Tiling(32, 64, 256, num_stages=3, triggers="requested", kernel="ring"),
        "out": Tiling(32, 64, 128, splits=4, num_stages=4, kernel="ring"),
        "gate_up": Tiling(32, 64, 256, num_stages=2, kernel="ring"),
    },
    ("0.6B", 17): {
        "qkv": Tiling(32, 32, 128, num_stages=4, triggers="at once", kernel="ring"),
        "out": Tiling(32, 32, 256, splits=4, num_stages=2, triggers="at once", kernel="ring"),
        "gate_up": Tiling(32, 32, 256, num_stages=4, row_stages=2, kernel="ring"),
    },
}
RINGS |= {("8B", 16): RINGS["8B", 1], ("8B", 32): RINGS["8B", 17], ("0.6B", 32): RINGS["0.6B", 17]}


@pytest.mark.parametrize(("model", "num_rows"), [*RINGS, ("8B", 33), ("0.6B", 1), ("0.6B", 16), ("0.6B", 33)])
def test_which_products_have_a_ring(model: str, num_rows: int) -> None:
    tilings = {name: tile(num_rows, model, name, ring=True) for name in products(model)}
    found = {name: tiling for name, tiling in tilings.items() if tiling is not None and tiling.kernel == "ring"}
    assert found == RINGS.get((model, num_rows), {})


def test_rings_that_wait_for_each_other_fit_on_one_core() -> None:
    """Gate and up beside out, so that their weights are requested while out still runs."""
    total = 0
    for name in ("out", "gate_up"):
        tiling = tile(32, "0.6B", name, ring=True)
        assert tiling is not None
        columns = tiling.block_n * (2 if name == "gate_up" else 1)
        rows = tiling.block_m * (tiling.row_stages or tiling.num_stages)
        total += 2 * tiling.block_k * (columns * tiling.num_stages + rows) + 2048  # barriers, and what CUDA takes
    assert total <= 228 * 1024


@pytest.mark.parametrize("model", [*MODELS, *MIDDLE, *OTHERS])
@pytest.mark.parametrize("num_rows", ROWS)
def test_a_ring_takes_no_product_from_the_other_kernels(num_rows: int, model: str) -> None:
    """Where its tiles do not divide, theirs are taken as before."""
    for name in products(model):
        with_ring, without = (tile(num_rows, model, name, ring=ring) for ring in (True, False))
        assert without is None or with_ring is not None
        assert with_ring == without or (with_ring is not None and with_ring.kernel == "ring")


def test_products_are_split_in_eight_at_most() -> None:
    for inner, splits in {256: 2, 1024: 8, 2048: 8}.items():
        tiling = choose_tiling(4, 64, inner)
        assert tiling is not None
        assert tiling.splits == splits


def test_many_rows_of_a_large_model_take_the_library() -> None:
    assert all(tile(65, "8B", name) is None for name in products("8B"))
    assert all(tile(MAX_ROWS + 1, "0.6B", name) is None for name in products("0.6B"))


@pytest.mark.parametrize("model", MIDDLE)
@pytest.mark.parametrize("num_rows", [1, 8, 16, 32, 64])
def test_few_rows_of_any_usual_model_have_a_kernel_that_fills_the_chip(num_rows: int, model: str) -> None:
    """Long inner dimensions are cut into many parts, though no power of two divides them."""
    for name, (columns, inner, _, adds) in products(model).items():
        tiling = tile(num_rows, model, name, ring=True)
        assert tiling is not None, name
        if adds and inner > 4096:
            assert columns // tiling.block_n * tiling.splits >= 0.8 * NUM_CORES, name


def test_only_rings_need_equal_parts() -> None:
    assert Tiling(16, 64, 128, splits=8).divides(64, 70 * 128)
    assert not Tiling(16, 64, 128, splits=8, kernel="ring").divides(64, 70 * 128)
    assert not Tiling(16, 64, 128, splits=8).divides(64, 70 * 128 + 64)
    assert not Tiling(16, 64, 64, splits=8).divides(64, 9 * 64), "parts would be too short"


@pytest.mark.parametrize("num_rows", [1, 4, 100])
def test_shapes_that_do_not_divide_have_no_tiling(num_rows: int) -> None:
    assert choose_tiling(num_rows, 100, 128, adds=True) is None
    assert choose_tiling(num_rows, 64, 100, adds=True) is None


@pytest.mark.parametrize(("columns", "inner", "splits"), [(1024, 2048, 4), (4096, 4096, 2)], ids=["0.6B", "8B"])
def test_parts_of_out_are_joined_in_clusters_above_16_rows(columns: int, inner: int, splits: int) -> None:
    for num_rows in (1, 16, 17, 32, 33):
        tiling = choose_tiling(num_rows, columns, inner, adds=True, ring=True, clusters=True)
        assert tiling is not None
        assert tiling.cluster == (16 < num_rows <= 32)
        if tiling.cluster:
            assert tiling.splits == splits
            assert tiling.divides(columns, inner)
            assert columns // tiling.block_n * splits <= 2 * NUM_CORES, "programs of a cluster run at the same time"


@pytest.mark.parametrize(("num_rows", "few"), [(1, "read"), (16, "read"), (32, "at once")])
def test_when_products_of_8_bits_trigger_the_next_launch(num_rows: int, few: str) -> None:
    """QKV, out, gate and down of 8B. Without the ring all trigger at the end."""
    products = {"qkv": (6144, 4096, {}), "out": (4096, 4096, {"adds": True})}
    products |= {"gate": (14336, 4096, {"gated": True}), "down": (4096, 14336, {"adds": True})}
    expected = {"qkv": "requested", "out": "at once", "gate": few, "down": few}
    for name, (columns, inner, kind) in products.items():
        found = choose_tiling(num_rows, columns, inner, **kind, ring=True, narrow=True)
        assert found is not None
        assert found.triggers == expected[name], name
        elsewhere = choose_tiling(num_rows, columns, inner, **kind, narrow=True)
        assert elsewhere is not None
        assert elsewhere.triggers == "read"
