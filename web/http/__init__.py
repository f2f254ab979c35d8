"""HTTP basics: typed reading of JSON fields, errors in OpenAI's shape, limits, plain responses."""
