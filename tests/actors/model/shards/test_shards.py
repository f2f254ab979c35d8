"""Which heads, widths and tokens each rank has, and what cannot be divided."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pagebus.actors.model.config import ModelConfig, ModelError, parse_config
from pagebus.actors.model.family import NameMap
from pagebus.actors.model.shards.cuts import Cut, cut_of, is_absent
from pagebus.actors.model.shards.local import local_config
from pagebus.actors.model.shards.shard import Shard, share
from pagebus.actors.model.spec import Moe

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 128,
}  # fmt: skip
MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"], "num_local_experts": 5, "num_experts_per_tok": 2,
}  # fmt: skip
QUERY, KEY = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.bias"
OUT, OUT_BIAS = "model.layers.0.self_attn.o_proj.weight", "model.layers.0.mlp.down_proj.bias"


def config(**fields: Any) -> ModelConfig:
    return parse_config(LLAMA | fields, {})


def shards(whole: ModelConfig, world: int) -> list[Shard]:
    parts = [local_config(whole, rank, world).shard for rank in range(world)]
    return [part for part in parts if part is not None]


@pytest.mark.parametrize(("count", "world"), [(8, 2), (7, 3), (5, 4), (1, 1)])
def test_shares_cover_all_and_differ_by_one_at_most(count: int, world: int) -> None:
    ranges = [share(count, rank, world) for rank in range(world)]
    assert [index for each in ranges for index in each] == list(range(count))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


@pytest.mark.parametrize(
    ("heads", "kv_heads", "world", "expected"),
    [
        (8, 2, 2, [(range(4), range(1)), (range(4, 8), range(1, 2))]),
        (2, 1, 2, [(range(1), range(1)), (range(1, 2), range(1))]),
        (7, 1, 2, [(range(3), range(1)), (range(3, 7), range(1))]),
        (6, 3, 2, [(range(2), range(1)), (range(2, 6), range(1, 3))]),
    ],
)  # fmt: skip
def test_queries_stay_with_their_keys(
    heads: int, kv_heads: int, world: int, expected: list[tuple[range, range]]
) -> None:
    """Each rank's queries read the keys that it has, equally many each."""
    whole = config(num_attention_heads=heads, num_key_value_heads=kv_heads)
    mixer = whole.spec.layers[0].mixer
    assert [(shard.heads(mixer), shard.kv_heads(mixer)) for shard in shards(whole, world)] == expected
    group = heads // kv_heads
    for queries, keys in expected:
        assert {query // group for query in queries} == set(keys)
        assert len(queries) % len(keys) == 0


def test_a_rank_sees_a_smaller_model() -> None:
    """With as many layers, hidden numbers and tokens."""
    whole = config()
    local = local_config(whole, 1, 2)
    assert (local.num_heads, local.num_kv_heads, local.intermediate_size) == (4, 1, 24)
    assert (local.hidden_size, local.vocab_size, local.num_layers) == (64, 100, 2)
    assert local.spec.kv_numbers() * 2 == whole.spec.kv_numbers()
    assert local_config(whole, 0, 1) is whole


def test_cuts() -> None:
    """By columns, by rows, by vocabulary; a bias behind a row-parallel product is added once."""
    first, second = shards(config(mlp_bias=True, attention_bias=True), 2)
    names = NameMap()
    assert cut_of(QUERY, second, names) == Cut(0, 128, (range(64, 128),))
    assert cut_of(KEY, second, names) == Cut(0, 32, (range(16, 32),))
    assert cut_of(OUT, first, names) == Cut(1, 128, (range(64),))
    assert cut_of("lm_head.weight", second, names) == Cut(0, 100, (range(50, 100),))
    assert cut_of(OUT_BIAS, first, names) is None
    zero = cut_of(OUT_BIAS, second, names)
    assert zero is not None
    assert zero.is_zero
    for name in ("model.norm.weight", "model.layers.0.input_layernorm.weight", "score.weight"):
        assert cut_of(name, second, names) is None


def test_fused_tensors_are_cut_in_each_part() -> None:
    names = NameMap(qkv="qkv_proj", gate_up="gate_up_proj")
    [_, second] = shards(config(), 2)
    qkv = cut_of("model.layers.0.self_attn.qkv_proj.weight", second, names)
    assert qkv == Cut(0, 192, (range(64, 128), range(144, 160), range(176, 192)))
    gate_up = cut_of("model.layers.0.mlp.gate_up_proj.weight", second, names)
    assert gate_up == Cut(0, 96, (range(24, 48), range(72, 96)))
    by_head = cut_of("model.layers.0.self_attn.qkv_proj.weight", second, replace(names, qkv_by_head=True))
    assert by_head == Cut(0, 192, (range(96, 160), range(160, 192)))


def test_cuts_of_experts() -> None:
    """Whole ones of a range, with all that is theirs; what is of one expert is on its rank alone. Without the flag
    each is divided by its width."""
    whole = parse_config(LLAMA | MIXTRAL, {})
    [_, second] = [local_config(whole, rank, 2, by_expert=True) for rank in range(2)]
    shard, plain = second.shard, local_config(whole, 1, 2).shard
    assert shard is not None
    assert plain is not None
    feed = second.spec.layers[0].feed
    assert isinstance(feed, Moe)
    assert (feed.own, feed.experts, feed.width) == (range(2, 5), 5, 48)
    each, stacked = "model.layers.0.mlp.experts.{}.w2.weight", "model.layers.1.mlp.experts.down_proj_bias"
    assert [is_absent(each.format(expert), shard) for expert in range(5)] == [True, True, False, False, False]
    assert not any(is_absent(each.format(expert), plain) for expert in range(5))
    assert cut_of(each.format(3), shard, NameMap()) is None
    assert cut_of(each.format(3), plain, NameMap()) == Cut(1, 48, (range(24, 48),))
    assert cut_of(stacked, shard, NameMap()) == Cut(0, 5, (range(2, 5),))
    assert cut_of(QUERY, shard, NameMap()) == cut_of(QUERY, plain, NameMap())
    for name in ("model.layers.0.mlp.gate.weight", "model.norm.weight"):
        assert cut_of(name, shard, NameMap()) is None
        assert not is_absent(name, shard)


def test_weights_of_a_rank_are_those_that_are_chosen_there_in_the_mean() -> None:
    """By which graphs are made for fewer tokens."""
    whole = parse_config(LLAMA | MIXTRAL | {"num_local_experts": 4}, {})
    local = local_config(whole, 0, 2, by_expert=True)
    counts = [
        config.spec.layer_weights() - 2 * config.spec.layers[0].mixer.weights(64) - 2 * 64 * 4
        for config in (whole, local)
    ]
    assert counts == [2 * 3 * 64 * 48 * 2, 2 * 3 * 64 * 48]


def test_a_stored_shape_is_that_of_the_whole() -> None:
    assert Cut(1, 12, (range(4, 8),)).stored_shape((5, 4)) == (5, 12)
    assert Cut(0, 0, ()).stored_shape((5,)) == (5,)


@pytest.mark.parametrize(
    ("fields", "world", "words"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, 4, "6 heads, 3 of them"),
        ({"num_attention_heads": 2, "num_key_value_heads": 2}, 4, "2 heads, 2 of them"),
        ({"intermediate_size": 3}, 4, "only 3 wide"),
        ({"vocab_size": 3, "num_key_value_heads": 8}, 4, "vocabulary of 3"),
    ],
)
def test_what_cannot_be_divided_is_named(fields: dict[str, Any], world: int, words: str) -> None:
    with pytest.raises(ModelError, match=rf"--tensor-parallel-size {world}: .*{words}"):
        local_config(config(**fields), 0, world)
