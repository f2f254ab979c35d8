"""A model for programs: `from pagebus import LLM, SamplingParams`."""
