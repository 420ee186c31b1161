"""Tokens to text while they are made: only what no later token can change is told, and stop strings end it."""

from collections.abc import Callable, Collection, Sequence

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer makes of bytes that are not a whole character yet


class Detokenizer:
    """Text of tokens that come one by one: together the pieces are ``decode`` of all of them.

    Only a window of tokens is decoded for each new one: those of the last piece, which decide about blanks between
    words, and what came since. A piece is held back while it ends in half a character.

    Args:
        decode: ids -> text.
        byte_tokens: ids of single bytes, of which a whole run decides whether it is text; held back to its end.
        is_left_out: id -> whether ``decode`` does as if it were not there, so that it ends no run of bytes.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        byte_tokens: Collection[int] = (),
        is_left_out: Callable[[int], bool] = lambda token: False,
    ):
        self._decode, self._byte_tokens, self._is_left_out = decode, byte_tokens, is_left_out
        self._told: list[int] = []  # tokens of the last piece
        self._new: list[int] = []  # tokens whose text is not told yet

    def add(self, token: int) -> str:
        """The next piece of text; "" while nothing is certain."""
        if self._is_left_out(token):
            return ""
        self._new.append(token)
        if token in self._byte_tokens:
            return ""
        piece = self._piece()
        if not piece or piece.endswith(UNFINISHED):
            return ""
        self._told, self._new = self._new, []
        return piece

    def rest(self) -> str:
        """The last piece: no more tokens come."""
        piece = self._piece() if self._new else ""
        self._told, self._new = self._new, []
        return piece

    def _piece(self) -> str:
        return self._decode([*self._told, *self._new])[len(self._decode(self._told)) if self._told else 0 :]


class Answer:
    """The new tokens of one row as text that only grows, cut where an end token or a stop string begins.

    Of several stop strings that one counts which ends first, and of those the longest, however tokens are cut.

    Args:
        detokenizer: used up by this answer.
        end: tokens that end it.
        stop: texts that end it.
        includes_stop: the end token or the stop string is part of the text.
        min_tokens: a stop string counts where it ends behind the text of so many tokens.

    Attributes:
        ids: all tokens up to the last one that was taken, end tokens included.
        text: what can be shown; all of it after ``finish``.
        is_over: ended by an end token or a stop string.
        stop_reason: the end token or the stop string, None before.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        end: Sequence[int] = (),
        stop: Sequence[str] = (),
        *,
        includes_stop: bool = False,
        min_tokens: int = 0,
    ):
        self._detokenizer, self._end, self._stop = detokenizer, frozenset(end), tuple(stop)
        self._includes_stop, self._min_tokens = includes_stop, min_tokens
        self._whole = ""  # with what may become a stop string
        self.ids: list[int] = []
        self.text, self.is_over = "", False
        self.stop_reason: int | str | None = None

    def add(self, tokens: Sequence[int]) -> str:
        """Take tokens and return what can be shown now; what may still become a stop string is held back."""
        shown = len(self.text)
        for token in tokens:
            if self.is_over:
                break
            self.ids.append(int(token))
            if token not in self._end:
                self._take(self._detokenizer.add(int(token)))
                continue
            piece = self._detokenizer.add(int(token)) if self._includes_stop else ""
            self._take(piece + self._detokenizer.rest())
            if not self.is_over:
                self.is_over, self.stop_reason = True, int(token)
        self.text = self._whole if self.is_over else self._certain()
        return self.text[shown:]

    def finish(self) -> str:
        """No more tokens come: the rest of the text."""
        shown = len(self.text)
        if not self.is_over:
            self._take(self._detokenizer.rest())
        self.text = self._whole
        return self.text[shown:]

    def _take(self, piece: str) -> None:
        """Add to the whole text, which ends at a stop string."""
        before = len(self._whole)
        self._whole += piece
        found = []
        for stop in self._stop if len(self.ids) > self._min_tokens else ():
            start = self._whole.find(stop, max(0, before - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        if found:
            end, start, self.stop_reason = min(found)
            self.is_over = True
            self._whole = self._whole[: end if self._includes_stop else start]

    def _certain(self) -> str:
        """Without the end that may be part of a stop string."""
        lengths = (n for stop in self._stop for n in range(1, len(stop)) if self._whole.endswith(stop[:n]))
        return self._whole[: len(self._whole) - max(lengths, default=0)]
