"""JSON objects read field by field, errors in OpenAI's shape, bounds, plain responses."""
