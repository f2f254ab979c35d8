"""A model's rows of a user's tables: those that a step reads while it is tuned, and those that are kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from pagebus.actors.executor.tuning.changes import Choices, Measurable
from pagebus.kernels.attention.forms import tables as forms
from pagebus.kernels.common.target import Target
from pagebus.kernels.common.user_tables import Tuned, read_user_tables, user_path
from pagebus.kernels.linear import tables
from pagebus.kernels.linear.shapes import Product
from pagebus.kernels.moe.launch import tables as experts


class ModelTables:
    """In ``folder``, what may be measured of a model."""

    def __init__(self, folder: Path, target: Target, todo: Measurable) -> None:
        self.folder = folder
        self._target, self._todo = target, todo

    def put(self, bucket: int, choices: Choices) -> None:
        """These are the model's for ``bucket``, and no others; what depends on tables chooses anew."""
        products = {each: choices[each] for each in choices if isinstance(each, Product)}
        path = user_path(self._target, self.folder)
        if products or path.exists():
            tables.replace_bucket(path, bucket, self._todo.products, products)
        shape = self._todo.experts
        path = user_path(self._target, self.folder, Tuned.EXPERTS)
        if shape is not None and (shape in choices or path.exists()):
            experts.replace_bucket(path, bucket, shape, choices.get(shape))
        heads = self._todo.heads
        path = user_path(self._target, self.folder, Tuned.ATTENTION)
        if heads is not None and (heads in choices or path.exists()):
            forms.replace_bucket(path, bucket, heads, choices.get(heads))


@contextmanager
def scratch_tables(target: Target, todo: Measurable) -> Iterator[ModelTables]:
    """Tables that this process reads in place of the user's, until the block ends; empty at first."""
    with TemporaryDirectory() as folder:
        read_user_tables(Path(folder))
        try:
            yield ModelTables(Path(folder), target, todo)
        finally:
            read_user_tables(None)
