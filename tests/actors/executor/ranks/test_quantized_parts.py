"""The parts of quantized weights that ranks have: put together they are the whole, or the model is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.loading.weights import load_weights
from pagebus.actors.executor.models import Model, build_model
from pagebus.actors.model.config import ModelConfig, ModelError
from pagebus.actors.model.quantization.asked import ONLINE, with_quantization
from pagebus.actors.model.shards.local import local_config
from pagebus.actors.model.shards.quantized import module_cut
from pagebus.actors.settings import Settings
from tests.actors.executor.loading.formats.test_gpt_oss import small_gpt_oss
from tests.actors.executor.ranks.test_ranks import SMALL, answers
from tests.helpers.engine_driver import Driver
from tests.helpers.model_factory import make_golden
from tests.helpers.quantized.checkpoints import PRODUCTS, quantize
from tests.helpers.quantized.gguf_files import uniform, write_gguf
from tests.helpers.quantized.packers import PACKERS
from tests.helpers.ranks.rank_driver import RankDriver

pytestmark = pytest.mark.share(6)

FIELDS = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
FORMATS = (
    "fp8", "fp8-blocks", "fbgemm", "modelopt-nvfp4", "ct-int4-zeros", "ct-int6", "ct-int8", "ct-mxfp4", "gptq-3",
    "gptq-4-rows", "gptq-8-zeros", "awq", "bnb-nf4-nested", "bnb-int8", "torchao-int4", "torchao-fp8-blocks",
)  # fmt: skip
"""One of each way to lay out numbers, scales and zero points; others differ in the number of bits."""


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_golden(tmp_path_factory.mktemp("dense"), "qwen3", FIELDS)


def loaded(folder: Path, rank: int, world: int, quantization: str | None = None, load_format: str = "auto") -> Model:
    whole = with_quantization(Settings(quantization=quantization), ModelConfig.load(folder))
    local = local_config(whole, rank, world)
    model = build_model(local, torch.device("cpu"), torch.float32, Ops.reference(), max_model_len=32)
    load_weights(model, folder, load_format, 0, lambda _: None)
    return model


def check_parts(folder: Path, quantization: str | None = None) -> None:
    """Every weight of two ranks means what the same rows or columns of the whole mean, to the bit."""
    whole = loaded(folder, 0, 1, quantization)
    wanted = {part.module: part.weight.dense() for ways in whole.parameters.parts for part in ways[-1]}
    assert wanted
    for rank in range(2):
        model = loaded(folder, rank, 2, quantization)
        for ways in model.parameters.parts:
            for part in ways[-1]:
                expected, cut = (
                    wanted[part.module],
                    module_cut(part.module, False, model.config.shard, model.config.names),
                )
                if cut is not None:
                    index = torch.cat([torch.arange(each.start, each.stop) for each in cut.ranges])
                    expected = expected.index_select(cut.dim, index)
                assert torch.equal(part.weight.dense(), expected), part.module


@pytest.mark.parametrize("name", FORMATS)
def test_parts_of_every_format(name: str, dense: Path, tmp_path: Path) -> None:
    check_parts(quantize(dense, tmp_path, PACKERS[name])[0])


@pytest.mark.parametrize("name", ONLINE)
def test_parts_of_what_is_quantized_at_load(name: str, dense: Path) -> None:
    """By the scales of whole rows: as one rank has them."""
    check_parts(dense, name)


@pytest.mark.parametrize("name", ["fp8-blocks", "awq", "ct-nvfp4"])
def test_parts_of_experts(name: str, tmp_path: Path) -> None:
    """Each is divided by its width."""
    fields = {**FIELDS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    check_parts(quantize(make_golden(tmp_path / "model", "qwen3_moe", fields), tmp_path, PACKERS[name])[0])


def test_groups_that_lie_on_two_ranks_are_refused_by_name(dense: Path, tmp_path: Path) -> None:
    """With what a share has to be a multiple of; so are blocks of rows, and columns in an order of their own."""
    wide = make_golden(tmp_path / "wide", "qwen3", {**FIELDS, "intermediate_size": 320})
    (tmp_path / "groups").mkdir()
    folder, _ = quantize(wide, tmp_path / "groups", PACKERS["bnb-fp4"])
    with pytest.raises(ModelError) as caught:
        loaded(folder, 1, 2)
    assert str(caught.value) == (
        "--tensor-parallel-size 2: model.layers.0.mlp.down_proj has 320 columns with a scale for every 64 of them: "
        "the share of each rank has to be a multiple of 64 (bnb_4bit, fp4, groups of 64)"
    )
    for name, why in (
        ("fp8-blocks-partial", "q_proj has 256 rows with a scale for every 48"),
        ("gptq-4-act-order", r"o_proj has columns in an order of their own \(act-order\), which ranks cannot divide"),
    ):
        (tmp_path / name).mkdir()
        folder, _ = quantize(dense, tmp_path / name, PACKERS[name])
        with pytest.raises(ModelError, match=why):
            loaded(folder, 0, 2)


def test_a_weight_with_its_columns_in_order_may_be_divided_by_rows(dense: Path, tmp_path: Path) -> None:
    """Act-order is refused only where ranks would divide columns."""

    def in_front(name: str) -> object:
        return PRODUCTS.search(name) and "o_proj" not in name and "down_proj" not in name

    packer = PACKERS["gptq-4-act-order"]
    rules = {"dynamic": {r"-:.*\.(o|down)_proj": {}}}
    folder, _ = quantize(dense, tmp_path, type(packer)({**packer.config, **rules}, packer.pack), in_front)
    check_parts(folder)


def test_parts_of_a_gguf_file(tmp_path: Path) -> None:
    """Rows of queries and keys are put into another order, head by head."""
    fields = {**FIELDS, "head_dim": 32}
    check_parts(write_gguf(make_golden(tmp_path / "model", "llama", fields), tmp_path / "m.gguf", uniform(Type.Q8_0)))


@pytest.mark.parametrize("name", ["gptq-4-zeros", "gpt-oss"])
def test_ranks_answer_as_one_rank_does(name: str, dense: Path, tmp_path: Path) -> None:
    """Also with all experts in one tensor, whose gates and ups come by turns."""
    folder, _ = small_gpt_oss(tmp_path) if name == "gpt-oss" else quantize(dense, tmp_path, PACKERS[name])
    prompts = [[1, 2, 3], list(range(40))]
    one, two = Driver(folder, **SMALL), RankDriver(folder, 2, **SMALL)
    assert answers(two, prompts) == answers(one, prompts)
    one.close()
    two.close()


def test_dummy_weights_of_ranks(dense: Path, tmp_path: Path) -> None:
    """Each has its own, the same at every start."""
    folder, _ = quantize(dense, tmp_path, PACKERS["awq"])
    models = [loaded(folder, rank, 2, load_format="dummy") for rank in (0, 1, 0)]
    first, second, again = ([each.dense() for each in model.parameters.layouts] for model in models)
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, second))
