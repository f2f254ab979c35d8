"""The HTTP server: sockets, connections, what lies around every route, and what every route needs."""
