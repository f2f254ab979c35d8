"""The folder of an oracle: a model without weights whose every token follows from a hash (see its class)."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.tokenizer_factory import byte_level, model_folder

END = "</s>"


def make_oracle(folder: Path, *, step_ms: int = 1, max_model_len: int = 1024, vocab_size: int = 0) -> Path:
    """Write the folder; a step takes ``step_ms``. The vocabulary is the tokenizer's, or a larger one. Its text has
    spaces, pieces of words and broken characters."""
    tokenizer = byte_level()
    shape = {"hidden_size": 2, "intermediate_size": 2, "num_attention_heads": 1, "num_key_value_heads": 1}
    return model_folder(
        folder,
        tokenizer,
        architectures=["OracleForCausalLM"],
        vocab_size=max(tokenizer.get_vocab_size(), vocab_size),
        eos_token_id=tokenizer.token_to_id(END),
        num_hidden_layers=step_ms,
        max_position_embeddings=max_model_len,
        head_dim=2,
        **shape,
    )
