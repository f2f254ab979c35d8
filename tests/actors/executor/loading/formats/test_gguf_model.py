"""The shipped model as one GGUF file, served with nothing else; and files whose numbers make no sense."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from pagebus import LLM, SamplingParams
from pagebus.actors.commands.cli import main
from pagebus.actors.executor.loading.weights import load_weights
from pagebus.actors.model.config import SHIPPED_MODEL, ModelError
from pagebus.actors.model.gguf.header import read_header
from tests.actors.executor.loading.formats.test_pitfalls import load
from tests.actors.offline.test_llm import ANSWER, QUESTION
from tests.helpers.model_factory import make_golden
from tests.helpers.quantized.gguf_files import uniform, write_gguf
from tests.helpers.quantized.gguf_tokenizers import of_folder


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("shipped") / "shipped-Q8_0.gguf"
    return write_gguf(SHIPPED_MODEL, file, uniform(Type.Q8_0), of_folder(SHIPPED_MODEL, "gpt-2"))


def test_a_conversation(shipped: Path) -> None:
    """Tokenizer, template and end token are the file's."""
    alone = shipped.parent / "alone" / "model.gguf"
    alone.parent.mkdir()
    shutil.copy(shipped, alone)
    with LLM(str(alone), device="cpu", threads=1, max_num_seqs=2) as llm:
        (output,) = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=None))
    assert output.prompt == "<|bos|><|user|>What is water?<|end|><|assistant|>"
    assert output.outputs[0].text == ANSWER
    assert (output.outputs[0].finish_reason, output.finished) == ("stop", True)


def test_inspect(shipped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Formats and layouts by the file's header."""
    assert main(["inspect", str(shipped), "--target", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    down = next(group for group in found["weights"] if group["name"].endswith("down_proj"))
    assert (down["count"], down["format"], down["layout"]) == (6, "gguf_q8_0, 8 bits, groups of 32", "W8Blocks")
    assert (found["quantization"], found["files"], found["unmatched_entries"]) == ("gguf", "complete", [])


def test_absurd_scales_are_named(tmp_path: Path) -> None:
    """An infinite one in the middle of a tensor."""
    source = make_golden(tmp_path / "model", "qwen2", {"intermediate_size": 128})
    file = write_gguf(source, tmp_path / "model.gguf", uniform(Type.Q8_0))
    tensor = read_header(file).tensors["blk.1.ffn_up.weight"]
    data = bytearray(file.read_bytes())
    data[tensor.offset + 34 : tensor.offset + 36] = b"\x00\x7c"
    file.write_bytes(data)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj has scales that are no finite numbers.*q8_0"):
        load(file)


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    """By our names."""
    source = make_golden(tmp_path / "model", "qwen2", {"intermediate_size": 128})
    file = write_gguf(source, tmp_path / "model.gguf", uniform(Type.Q8_0))
    data = file.read_bytes()
    file.write_bytes(data.replace(b"blk.1.ffn_up.weight", b"blk.9.ffn_up.weight"))
    with pytest.raises(ModelError, match="block_count is 2, but the file has tensors of 3 layers"):
        load(file)
    file.write_bytes(data.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_gate.bias"))
    with pytest.raises(ModelError, match=r"mlp\.(up_proj|gate_proj)"):
        load(file)


def test_load_format(shipped: Path) -> None:
    """``gguf`` is one of vLLM's; dummy weights need the header only."""
    model = load(shipped)
    load_weights(model, shipped, "dummy", 0, lambda _: None)
    load_weights(model, shipped, "gguf", 0, lambda _: None)
