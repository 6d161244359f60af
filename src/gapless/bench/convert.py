"""The model in the formats that peers read. Writes into the benchmark's temporary folder, once for each format."""

from __future__ import annotations

import subprocess
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

from gapless.bench.job import Form
from gapless.errors import ModelError, UnsupportedModel
from gapless.models.source import ModelSource

_TO_DIRECTORY = """
import sys, torch
from transformers import AutoModelForCausalLM
folder, file, target = sys.argv[1:]
read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.bfloat16)
weights, config = read.state_dict(), read.config
del config.quantization_config  # else it counts as quantized, and cannot be saved
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
model.load_state_dict(weights)
model.save_pretrained(target)
"""


class Forms:
    """Finds or makes each format of one model."""

    def __init__(self, source: ModelSource, folder: Path) -> None:
        self._source = source
        self._folder = folder
        self._made: dict[Form, Path] = {}

    def path(self, form: Form) -> Path:
        """Where the model is in this format; made on first use. Raises ModelError."""
        source = self._source
        if form == "given" or form == {"gguf": "gguf", "hf": "directory"}[source.kind]:
            return source.path
        if source.kind != "gguf":
            raise UnsupportedModel(f"needs a GGUF file, and {source.name} is a directory")
        if form not in self._made:
            self._made[form] = self._make(form)
        return self._made[form]

    def weights(self, name: str) -> str:
        """The table's name for these weights."""
        return self._shipped_type if name == "shipped" and self._source.kind == "gguf" else name

    @cached_property
    def _shipped_type(self) -> str:
        return shipped_type(self._source.path)

    def _make(self, form: Form) -> Path:
        target = self._folder / form
        if form == "directory":
            write_directory(self._source.path, target)
        else:
            target = target.with_suffix(".gguf")
            write_gguf(self._source.path, target, form.removeprefix("gguf-"))
        return target


def shipped_type(path: Path) -> str:
    """Type of most weights of a GGUF file, such as Q4_1."""
    import gguf

    sizes: dict[str, int] = {}
    for tensor in gguf.GGUFReader(path).tensors:
        name = tensor.tensor_type.name
        sizes[name] = sizes.get(name, 0) + int(tensor.n_elements)
    return max(sizes, key=lambda name: sizes[name])


def write_gguf(path: Path, target: Path, type_name: str) -> None:
    """A copy of a GGUF file whose matrices have a plain type (BF16, F16). Vectors become F32, as llama.cpp needs."""
    import gguf

    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    wanted = gguf.GGMLQuantizationType[type_name]
    for field in reader.fields.values():
        _copy_field(gguf, writer, field, gguf.LlamaFileType[f"MOSTLY_{type_name}"])
    for tensor in reader.tensors:
        kind = wanted if len(tensor.shape) > 1 else gguf.GGMLQuantizationType.F32
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _copy_field(gguf: Any, writer: Any, field: Any, file_type: int) -> None:
    if field.name.startswith("GGUF.") or field.name == "general.architecture":
        return
    value = int(file_type) if field.name == "general.file_type" else field.contents()
    kind = field.types[0]
    element = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
    writer.add_key_value(field.name, value, kind, sub_type=element)


def write_directory(path: Path, target: Path) -> None:
    """A Hugging Face directory in bfloat16, made by transformers in a process of its own. Raises ModelError."""
    command = [sys.executable, "-c", _TO_DIRECTORY, str(path.parent), path.name, str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise ModelError(f"conversion by transformers failed: {lines[-1] if lines else done.returncode}")
