"""HTTP: the ingress and the jobs actor, which share the shapes of OpenAI's API and are actors all the same."""
