"""Texts of tokens while they are made: whole characters only, stop strings across tokens, the text of all of them."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from moe_jax.text._answer import Answer, Detokenizer
from moe_jax.text._tokenizer import Tokenizer as Ours

LETTERS = ("a", "b", "c", "bc", "\N{REPLACEMENT CHARACTER}")


def decode_letters(ids):
    """Token t is the t-th of some texts; the last one is half a character."""
    return "".join(LETTERS[i] for i in ids).replace("\N{REPLACEMENT CHARACTER}" * 2, "é")


def test_stop_texts_are_never_shown():
    """What may become a stop text is held back until it is none; a stop text may span tokens and end within one."""
    answer = Answer(Detokenizer(decode_letters), stop=("abc", "cc"))
    assert [answer.add([t]) for t in (0, 1, 1, 2, 0)] == ["", "", "abb", "", "c"]
    assert (answer.add([3]), answer.is_over, answer.text, answer.stop_reason) == ("", True, "abbc", "abc")
    assert answer.add([0]) == answer.finish() == "" and answer.ids == [0, 1, 1, 2, 0, 3]
    shown = Answer(Detokenizer(decode_letters), stop=("abc",), includes_stop=True)
    assert shown.add([1, 0, 3, 0]) == "babc" and shown.ids == [1, 0, 3]


@pytest.mark.parametrize("includes_stop", [False, True])
def test_end_tokens_and_half_characters(includes_stop):
    answer = Answer(Detokenizer(decode_letters), end=(2,), includes_stop=includes_stop)
    assert [answer.add([t]) for t in (0, 4, 4, 1)] == ["a", "", "é", "b"]
    assert answer.add([4, 0]) == "�a" and not answer.is_over
    assert answer.add([4]) == "" and answer.add([2, 1]) == ("�c" if includes_stop else "�")
    assert answer.is_over and answer.ids == [0, 4, 4, 1, 4, 0, 4, 2] and answer.stop_reason == 2
    rest = Answer(Detokenizer(decode_letters), stop=("bcd",))
    assert rest.add([0, 3]) == "a" and rest.finish() == "bc" and rest.text == "abc"
    half = Answer(Detokenizer(decode_letters), stop=("�",))
    assert (half.add([0, 4]), half.finish(), half.is_over) == ("a", "", True), "the rest may hold a stop string"


def test_the_stop_string_that_ends_first_counts():
    """Whatever the order of the list, and whether one token completes several."""
    for stop in (("bcd", "c", "abc"), ("abc", "c", "bcd")):
        for tokens in ([0, 1, 2], [0, 3]):
            answer = Answer(Detokenizer(decode_letters), stop=stop)
            answer.add(tokens)
            assert (answer.text, answer.stop_reason) == ("", "abc")


def byte_level():
    """Tokens of one byte, of two, and of several, as in GPT-2's kind; two of them special."""
    chars = bytes_to_unicode()
    texts = [bytes([b]) for b in range(256)] + ["é".encode(), b"\x98\x80", "é".encode()[1:] + b"a", b" the", b"ab"]
    tokenizer = Tokenizer(models.WordLevel({"".join(chars[b] for b in t): i for i, t in enumerate(texts)}, "a"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|x|>", special=True)])
    return tokenizer


def bytes_to_unicode():
    """GPT-2's printable stand-ins for bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}


def sentencepiece():
    """Pieces with a mark for the blank before them, and bytes for what has no piece: Llama 2's decoder."""
    pieces = ["▁", "▁a", "▁the", "a", "b", "é", "▁▁", *(f"<0x{b:02X}>" for b in range(128, 256))]
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, "a"))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


def metaspace():
    tokenizer = sentencepiece()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def wordpiece():
    pieces = ["the", "##s", "a", ".", ",", "##é", "'", "do", "n't"]
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, "a"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def words():
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(8)}, "w0"))
    tokenizer.add_special_tokens([AddedToken("w9", special=True)])
    return tokenizer


KINDS = {f.__name__: f for f in (byte_level, sentencepiece, metaspace, wordpiece, words)}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    KINDS[request.param]().save(str(directory / "tokenizer.json"))
    return Ours(directory)


def cut(ids, rng):
    """The same ids in parts."""
    parts = []
    while ids:
        n = rng.randint(1, 4)
        parts.append(ids[:n])
        ids = ids[n:]
    return parts


def first_stop(text, stops):
    """(start, end) of the stop string that ends first, of those the longest: character by character."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end - max(map(len, found)), end
    return None


@settings(max_examples=150, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("skips", [True, False])
def test_any_cut_of_tokens_gives_the_text_of_all(tokenizer, skips, data):
    """Judged by tokenizers' decode of all ids, stop strings by a search in it; nothing shown is taken back."""
    size = tokenizer.backend.get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, size + 1), max_size=24))  # the last two are no tokens
    whole = tokenizer.decode(ids, skip_special_tokens=skips)
    rng = random.Random(data.draw(st.integers(0, 1000)))
    stops = []
    for _ in range(rng.randint(0, 3) if whole else 0):
        start = rng.randrange(len(whole))
        stops.append(whole[start : start + rng.randint(1, 4)])
    for includes_stop in (False, True):
        answer = Answer(tokenizer.detokenizer(skip_special_tokens=skips), stop=stops, includes_stop=includes_stop)
        pieces = [answer.add(part) for part in cut(ids, rng)]
        pieces.append(answer.finish())
        found = first_stop(whole, stops)
        expected = whole if found is None else whole[: found[1] if includes_stop else found[0]]
        assert "".join(pieces) == answer.text == expected
        assert answer.is_over == (found is not None)


@pytest.mark.parametrize("skips, between", [(True, "</s>"), (True, None), (False, None)])
def test_what_is_left_out_ends_no_run_of_bytes(tmp_path, skips, between):
    """C2 80 is a character and C2 80 80 are no characters, also around a skipped special token or an unknown id."""
    sentencepiece().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Ours(tmp_path)
    number = tokenizer.backend.get_vocab()
    unknown = len(number)
    ids = [number["<0xC2>"], number["<0x80>"], number[between] if between else unknown, number["<0x80>"]]
    assert tokenizer.decode(ids, skip_special_tokens=skips) == "���"
    answer = Answer(tokenizer.detokenizer(skip_special_tokens=skips))
    assert [answer.add([token]) for token in ids] == [""] * 4 and answer.finish() == "���"
    answer = Answer(tokenizer.detokenizer(skip_special_tokens=skips))
    assert answer.add([*ids[:3], number["a"]]) == "\x80a", "a piece ends the run"


def test_long_answers_take_linear_time(tokenizer):
    """What is decoded in all, counted in ids: a few for each token, not all those before it."""
    decoded = []

    def decode(ids):
        decoded.append(len(ids))
        return tokenizer.decode(ids)

    answer = Answer(Detokenizer(decode), stop=("none of it",))
    rng = random.Random(0)
    plain = [i for i in range(tokenizer.backend.get_vocab_size()) if tokenizer.decode([i]).isascii()]
    answer.add([rng.choice(plain) for _ in range(2000)])
    assert sum(decoded) < 2000 * 20


@pytest.mark.parametrize("least, text", [(0, ""), (1, "a"), (2, "a"), (3, "abab")])
def test_stop_texts_count_after_so_many_tokens(least, text):
    """Where they end behind them; what came before is text like any other."""
    answer = Answer(Detokenizer(decode_letters), stop=("a", "ba"), min_tokens=least)
    for token in (0, 1, 0, 1):
        answer.add([token])
    answer.finish()
    assert answer.text == text
