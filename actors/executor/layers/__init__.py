"""The parts that models are made of. They hold tensors and call the device's
:class:`~pagebus.actors.executor.device.ops.Ops`."""
