"""The jobs actor: queued work from a stream, in OpenAI's batch format, through the same schemas as HTTP."""
