"""HTTP: the ingress and the jobs actor. Both are actors; they live here because they share the schemas of OpenAI's
API.
"""
