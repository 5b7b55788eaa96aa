"""Stop rules and incremental text, without an engine."""

from __future__ import annotations

import itertools
import time

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from jaxserve.engine.requests.output import Delta, OutputProcessor, StopMatcher, TextMaker, TokenRules
from jaxserve.request import SamplingParams
from tests.engine_host.fakes import EOS, SPECIAL, FakeTokenizer


def run(text: str | list[int], max_tokens: int = 1000, **fields: object) -> list[Delta]:
    """The deltas of a generation of these tokens (bytes), up to its end."""
    params = SamplingParams(**fields)  # pyright: ignore[reportArgumentType]
    detokenizer = FakeTokenizer().detokenizer((), skip_special_tokens=params.skip_special_tokens)
    processor = OutputProcessor(TokenRules(params, frozenset({EOS}), max_tokens), TextMaker(params, detokenizer))
    deltas: list[Delta] = []
    for token_id in text.encode() if isinstance(text, str) else text:
        deltas.append(processor.push((token_id,)))
        if deltas[-1].finish_reason is not None:
            return deltas
    return deltas


def summary(deltas: list[Delta]) -> tuple[str, str | None, str | int | None, int]:
    return "".join(delta.text for delta in deltas), deltas[-1].finish_reason, deltas[-1].stop_reason, len(deltas)


def oracle(text: str, stops: list[str], *, include: bool) -> tuple[str, str | None]:
    """The match that ends first, then the longest; by brute force."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=400, deadline=None)
@given(
    text=st.text("abé", max_size=40),
    stops=st.lists(st.text("abé", min_size=1, max_size=6), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 40), max_size=12),
    include=st.booleans(),
)
def test_a_stop_string_is_found_however_the_text_is_cut(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    matcher = StopMatcher(stops, include=include)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    released, matched = "", None
    final, _ = oracle(text, stops, include=include)
    for begin, end in itertools.pairwise(bounds):
        piece, matched = matcher.push(text[begin:end])
        released += piece
        assert final.startswith(released), "text was released that the match then cut"
        if matched is not None:
            break
    else:
        released += matcher.finish()
    assert (released, matched) == oracle(text, stops, include=include)


@settings(max_examples=200, deadline=None)
@given(text=st.text("ab€😀", max_size=30), stop=st.text("ab€😀", min_size=1, max_size=4), max_tokens=st.integers(1, 100))
def test_the_stream_is_the_whole_text_byte_by_byte(text: str, stop: str, max_tokens: int) -> None:
    if not text:
        return
    text_or_cut = text.encode()[:max_tokens].decode(errors="replace")
    expected, matched = oracle(text_or_cut, [stop], include=False)
    streamed, reason, stop_reason, num_tokens = summary(run(text, max_tokens, stop=(stop,)))
    if reason is None:  # the script ended first: what is held back is a beginning of the stop string
        assert expected.startswith(streamed) and stop.startswith(expected[len(streamed) :])
    else:
        assert (streamed, reason, stop_reason) == (expected, "stop" if matched else "length", matched)
    assert num_tokens <= max_tokens


class TestStopStrings:
    def test_nothing_of_it_is_emitted_before_it_fires(self) -> None:
        matcher = StopMatcher(["DEFGHIJ"])
        assert [matcher.push(piece) for piece in ("abcDEF", "G", "HI", "Jk")] == [("abc", None), ("", None), ("", None), ("", "DEFGHIJ")]

    def test_held_text_is_released_once_ruled_out(self) -> None:
        matcher = StopMatcher(["DEFGHIJ"])
        assert [matcher.push(piece) for piece in ("DEF", "DEX", "D")] == [("", None), ("DEFDEX", None), ("", None)]
        assert matcher.finish() == "D"

    def test_inside_one_token(self) -> None:
        assert StopMatcher(["lo w"]).push("hello world") == ("hel", "lo w")

    def test_at_the_very_start(self) -> None:
        assert summary(run("END and more", stop=("END",))) == ("", "stop", "END", 3)

    def test_which_one_fired_is_reported(self) -> None:
        assert summary(run("one two", stop=("zzz", "two"))) == ("one ", "stop", "two", 7)

    def test_kept_in_the_output_on_request(self) -> None:
        assert summary(run("one two three", stop=("two",), include_stop_str_in_output=True)) == ("one two", "stop", "two", 7)

    def test_completed_by_the_last_allowed_token(self) -> None:
        assert summary(run("abcd", 4, stop=("cd",))) == ("ab", "stop", "cd", 4)

    def test_begun_at_the_length_limit_is_released(self) -> None:
        assert summary(run("abcd", 3, stop=("cd",))) == ("abc", "length", None, 3)

    def test_begun_before_eos_is_released(self) -> None:
        assert summary(run([*b"abc", EOS], stop=("cd",))) == ("abc", "stop", None, 4)

    def test_many_long_ones_cost_little(self) -> None:
        """64 x 1,024 characters that all keep almost matching: linear, where a search of the window would take 1,000 times as long."""
        matcher = StopMatcher(["a" * (1000 + i) + "b" for i in range(64)])
        begin = time.thread_time()
        for _ in range(500):
            matcher.push("aaaa")
        assert time.thread_time() - begin < 5


class TestStopTokens:
    def test_eos_ends_without_text_or_reason(self) -> None:
        assert summary(run([*b"hi", EOS, *b"no"], skip_special_tokens=False)) == ("hi", "stop", None, 3)

    def test_ignored_eos_is_a_token_like_others(self) -> None:
        assert summary(run([*b"hi", EOS, *b"yes"], 6, ignore_eos=True)) == ("hiyes", "length", None, 6)
        assert summary(run([*b"hi", EOS, *b"yes"], 6, ignore_eos=True, skip_special_tokens=False)) == ("hi<eos>yes", "length", None, 6)

    def test_ignored_eos_may_still_be_a_stop_token(self) -> None:
        assert summary(run([*b"hi", EOS], ignore_eos=True, stop_token_ids=(EOS,))) == ("hi", "stop", EOS, 3)

    @pytest.mark.parametrize("token_id", [SPECIAL, ord("c")])
    def test_only_its_own_text_is_left_out(self, token_id: int) -> None:
        assert summary(run([*b"ab", token_id, *b"x"], stop_token_ids=(token_id,))) == ("ab", "stop", token_id, 3)

    def test_its_text_is_kept_on_request(self) -> None:
        assert summary(run("abc", stop_token_ids=(ord("c"),), include_stop_str_in_output=True)) == ("abc", "stop", ord("c"), 3)

    def test_beats_the_length_limit(self) -> None:
        assert summary(run([*b"ab", EOS], 3)) == ("ab", "stop", None, 3)


class TestText:
    def test_no_half_characters(self) -> None:
        deltas = run("a😀b", 6)
        assert [delta.text for delta in deltas] == ["a", "", "", "", "😀", "b"]

    def test_half_a_character_at_the_end_is_one_replacement(self) -> None:
        assert summary(run("a😀", 3)) == ("a\ufffd", "length", None, 3)

    def test_an_abort_stays_one(self) -> None:
        params = SamplingParams(stop=("\ufffd",))
        processor = OutputProcessor(TokenRules(params, frozenset(), 9), TextMaker(params, FakeTokenizer().detokenizer(())))
        processor.push((0xE2,))
        assert processor.finish("abort") == Delta("", "abort")
