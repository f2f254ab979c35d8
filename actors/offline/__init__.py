"""A model for programs: `from actors import LLM, SamplingParams`."""
