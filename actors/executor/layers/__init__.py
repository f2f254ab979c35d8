"""The layers that models are built from.

They hold tensors and call the device's :class:`~pagebus.actors.executor.device.ops.Ops`.
"""
