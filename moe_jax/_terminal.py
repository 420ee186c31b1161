"""Text for a terminal: aligned columns, sizes in binary units, nothing that the terminal would obey."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Columns aligned to the left, those in ``right`` to the right, two blanks between them."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, range(len(row)), strict=True)
        lines.append("  ".join(c.rjust(width) if at in right else c.ljust(width) for c, width, at in cells).rstrip())
    return lines


def size(nbytes: int) -> str:
    """1536 -> "1.5 KiB"."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"


def cut(text: str, most: int = 4000) -> str:
    """``text`` without its middle where it is longer than anybody reads, as when a config holds a list of millions."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def printable(text: str, keep: str = "") -> str:
    """``text`` with all that is not printable written as an escape, but for the characters of ``keep``.

    Names and texts of a checkpoint are anybody's: they may hold codes that move the cursor or set the clipboard.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode("ascii") for c in text)
