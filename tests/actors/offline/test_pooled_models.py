"""`LLM` over models that pool: what it returns equals transformers, and what they do not do is an error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pagebus import LLM, PoolingParams
from tests.actors.model.pooling.tiny_models import make_encoder, write_modules

TEXTS = ["the quick fox", "jumps over", "lazy"]


def test_a_reranker(tmp_path: Path) -> None:
    """Scores of pairs and probabilities of texts; it embeds nothing, and reads no tokens in pairs."""
    import transformers

    folder = make_encoder(tmp_path, "bert", classifies=True, num_labels=1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    model = transformers.AutoModelForSequenceClassification.from_pretrained(str(folder), dtype=torch.float32).eval()

    def logit(*texts: str) -> float:
        with torch.inference_mode():
            return float(model(**tokenizer(*texts, return_tensors="pt")).logits[0, 0])

    with LLM(str(folder), device="cpu", threads=1) as llm:
        scores = [each.outputs.score for each in llm.score(TEXTS[0], TEXTS)]
        raw = llm.score(TEXTS[0], TEXTS[1], pooling_params=PoolingParams(use_activation=False))
        classes = llm.classify(TEXTS)
        with pytest.raises(ValueError, match="pairs of texts"):
            llm.score([1, 2], "a")
        with pytest.raises(ValueError, match="does not support Embeddings"):
            llm.embed("a")
    sigmoid = [1 / (1 + np.exp(-logit(TEXTS[0], text))) for text in TEXTS]
    assert scores == pytest.approx(sigmoid, abs=1e-5)
    assert raw[0].outputs.score == pytest.approx(logit(TEXTS[0], TEXTS[1]), abs=1e-5)
    alone = [1 / (1 + np.exp(-logit(text))) for text in TEXTS]
    assert [each.outputs.probs[0] for each in classes] == pytest.approx(alone, abs=1e-5)
    assert [each.outputs.num_classes for each in classes] == [1, 1, 1]
    assert classes[0].prompt_token_ids == tokenizer(TEXTS[0])["input_ids"]


def test_an_embedding_model(tmp_path: Path) -> None:
    """Texts that are cut keep their special tokens; scores are cosines."""
    import transformers

    folder = make_encoder(tmp_path, "xlm-roberta")
    write_modules(folder, "mean")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    model = transformers.AutoModel.from_pretrained(str(folder), dtype=torch.float32).eval()
    with torch.inference_mode():
        inputs = tokenizer(TEXTS[0], return_tensors="pt", truncation=True, max_length=6)
        mean = model(**inputs).last_hidden_state[0].mean(0).double().numpy()
    with LLM(str(folder), device="cpu", threads=1) as llm:
        (cut,) = llm.embed(TEXTS[0], pooling_params=PoolingParams(truncate_prompt_tokens=6))
        one, other = (np.array(each.outputs.embedding) for each in llm.embed(TEXTS[:2]))
        (score,) = llm.score(TEXTS[0], TEXTS[1])
        with pytest.raises(ValueError, match="does not support Completions"):
            llm.generate("a")
    np.testing.assert_allclose(cut.outputs.embedding, mean / np.linalg.norm(mean), atol=1e-5)
    assert score.outputs.score == pytest.approx(float(one @ other), abs=1e-5)
