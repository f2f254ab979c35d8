"""What a model serves: to generate, to embed, to classify, to score."""

from __future__ import annotations

from pagebus.web.http.errors import ApiError
from pagebus.web.requests.parsed_request import ParsedRequest
from pagebus.web.requests.served_model import ServedModel


def check_task(parsed: ParsedRequest, model: ServedModel) -> None:
    """Raises ApiError (400): the model does nothing of the kind."""
    details, pooler = parsed.details, model.pooler
    if not parsed.sampling.pooling:
        if pooler is not None:
            raise _absent("Chat Completions" if parsed.prompts[0].messages is not None else "Completions")
    elif details is not None and details.score is not None:
        if pooler is not None and pooler.classifies and len(pooler.labels) != 1:
            text = f"Score API is only enabled for num_labels == 1; the model has {len(pooler.labels)} labels."
            raise ApiError(400, text, code="unsupported_task")
    elif details is not None and details.classes is not None:
        if pooler is None or not pooler.classifies:
            raise _absent("Classification")
    elif pooler is not None and pooler.classifies:
        raise _absent("Embeddings")


def _absent(api: str) -> ApiError:
    return ApiError(400, f"The model does not support {api} API", code="unsupported_task")
