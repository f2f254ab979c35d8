"""Measuring products: times of launch shapes, and what `pagebus tune` asks of dense ones."""
