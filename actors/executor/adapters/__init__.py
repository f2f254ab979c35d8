"""Adapters of an executor: read beside steps, held in places on the device, and told apart by the slots of a step."""
