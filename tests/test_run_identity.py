"""Which runs are the same, and what is said of those that are not."""

from __future__ import annotations

from pathlib import Path

from gapless.run_identity import RunIdentity, digest_of_model

WAS = {"model": "a", "input": "1", "model_files": None, "stop": ["x"], "top_k": 3}


def test_the_same_settings_are_the_same_run_in_any_order() -> None:
    assert RunIdentity(WAS).fingerprint == RunIdentity(dict(reversed(WAS.items()))).fingerprint
    assert RunIdentity(WAS).fingerprint != RunIdentity(WAS | {"top_k": 4}).fingerprint


def test_everything_that_differs_is_told() -> None:
    now = RunIdentity({"model": "b", "input": "2", "model_files": "5", "stop": ("x",), "seed": 1})
    assert now.differences(WAS) == (
        "model was 'a', now 'b'; the prompts have changed; the files of the model have changed; "
        "seed was not set, now 1; top_k was 3, now not set"
    )
    assert RunIdentity({"stop": "y" * 100}).differences({"stop": "x"}).endswith("...")
    assert RunIdentity({}).differences(None) == "other prompts, model or parameters"


def test_a_model_is_known_by_its_files(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(300_000))
    before = digest_of_model(str(tmp_path))
    (tmp_path / "README.md").write_text("words")
    assert digest_of_model(str(tmp_path)) == before
    for place in (0, 150_000, 299_999):
        data = bytearray(300_000)
        data[place] = 1
        weights.write_bytes(data)
        assert digest_of_model(str(tmp_path)) != before
    alone = digest_of_model(str(weights))
    assert digest_of_model(str(weights.rename(tmp_path / "other.safetensors"))) == alone
    assert digest_of_model("org/name") is None
