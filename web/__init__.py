"""HTTP: the ingress and the jobs actor, two actors that share the schemas of OpenAI's API."""
