"""HTTP basics: JSON objects read field by field, errors in OpenAI's shape, limits, plain responses."""
