"""Tables that lose nothing in a narrow terminal: what does not fit beside the rest comes below it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

GAP = 2
Cell = str | Text


class Columns:
    """A table whose columns continue in further lines where the terminal is too narrow.

    Args:
        first: the header of the column that names the rows, and is there in each part; None: there is none.
    """

    def __init__(self, first: str | None, *names: str) -> None:
        self._named = first is not None
        self._columns: list[list[Cell]] = [[name] for name in ([] if first is None else [first]) + list(names)]

    def add_row(self, *cells: Cell) -> None:
        """A row, in the order of the columns."""
        for column, cell in zip(self._columns, cells, strict=True):
            column.append(cell)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        head = self._columns[:1] if self._named else []
        rest = self._columns[len(head) :]
        for part in _parts(rest, options.max_width - sum(map(_width, head))):
            yield _table([*head, *part], named=self._named)


def _width(column: Sequence[Cell]) -> int:
    return max(cell.cell_len if isinstance(cell, Text) else len(cell) for cell in column) + GAP


def _parts(columns: Sequence[list[Cell]], room: int) -> Iterator[list[list[Cell]]]:
    """The columns in as few parts as fit into ``room`` beside each other."""
    part: list[list[Cell]] = []
    for column in columns:
        if part and sum(map(_width, [*part, column])) > room:
            yield part
            part = []
        part.append(column)
    yield part


def _table(columns: Sequence[Sequence[Cell]], *, named: bool) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, GAP, 0, 0))
    for index, (name, *_) in enumerate(columns):
        table.add_column(name, justify="left" if named and not index else "right", no_wrap=True)
    for cells in zip(*(cells for _, *cells in columns), strict=True):
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))
    return table


class Fitting:
    """Renderables, and below them lines of which as many are shown as ``height`` leaves; another one says how many more
    there are. None: all."""

    def __init__(
        self, above: RenderableType, below: Columns, rows: Sequence[tuple[Cell, ...]], height: int | None
    ) -> None:
        self._above = above
        self._below = below
        self._rows = rows
        self._height = height

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = self._height
        lines = console.render_lines(self._above, options, pad=False)
        rows = self._rows
        if height is not None and len(lines) + 1 + len(rows) > height:
            room = max(0, height - len(lines) - 2)
            rows = [*rows[:room], (f"... {len(rows) - room} more", "")]
        for row in rows:
            self._below.add_row(*row)
        yield self._above
        yield self._below
