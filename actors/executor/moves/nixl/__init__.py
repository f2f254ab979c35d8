"""Pulls through NVIDIA's NIXL, where it is installed: over whatever links its UCX finds, RDMA among them."""
