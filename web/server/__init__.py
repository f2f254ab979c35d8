"""The HTTP server: sockets, connections, middleware, and the context of every route."""
