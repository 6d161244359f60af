"""`gapless check` on a real GPU: delays instead of chosen orders, poison on the device, graphs under the checker."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from gapless.cli import main
from gapless.device import open_device
from gapless.device.checker import POISON, CheckedDevice
from gapless.pipeline.executor import LocalExecutor
from tiny import write_dummy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
    return write_dummy(tmp_path_factory.mktemp("dummy"), **sizes, head_dim=32, num_hidden_layers=3)


def command(model: Path, *more: str) -> list[str]:
    return ["check", "--model", str(model), "--load-format", "dummy", "--device", "cuda", "--seeds", "6", *more]


@pytest.mark.parametrize(
    ("more", "compared"),
    [((), "while the batches are the same"), (("--batch-invariant",), "the same request alone")],
    ids=["same batches", "batch-invariant"],
)
def test_a_pass(model: Path, more: tuple[str, ...], compared: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(model, *more)) == 0, capsys.readouterr().out
    assert compared in capsys.readouterr().out


def test_a_race_is_found(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "failure.json"
    original = LocalExecutor.launch

    def launch(self, plan):
        ticket = original(self, plan)
        self._device.touch("clear", writes=(ticket.slot.host_in,))
        return ticket

    with patch.object(LocalExecutor, "launch", launch):
        assert main(command(model, "--save", str(path))) == 1
    assert "writes 'slot0.host_in' with no event after" in capsys.readouterr().out
    assert path.exists()


def test_released_buffers_hold_poison() -> None:
    device = open_device("cuda", check=True)
    assert isinstance(device, CheckedDevice)
    for host in (True, False):
        buffer = device.buffer("x", (4,), torch.int32, host=host)
        device.release("collect", (buffer,))
        assert buffer.tensor.tolist() == [POISON] * 4
    device.close()
