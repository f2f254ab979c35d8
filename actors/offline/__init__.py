"""``LLM`` and ``SamplingParams``: a whole system inside a Python program, with vLLM's outputs."""
