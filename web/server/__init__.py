"""The HTTP server: sockets, connections, middleware, and the context shared by all routes."""
