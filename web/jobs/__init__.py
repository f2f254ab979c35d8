"""The jobs actor: runs queued work from a stream, in OpenAI's batch format, with the same schemas as HTTP."""
