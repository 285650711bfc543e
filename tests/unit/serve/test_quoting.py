# SPDX-License-Identifier: Apache-2.0
"""Quoting is proven by reading it back by systemd's rules (extract_first_word, specifiers, variables; env-file.c)."""

from __future__ import annotations

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.serve import quoting
from hypothesis import given
from hypothesis import strategies as st

text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
nasty = st.text(st.sampled_from("%$\"'\\ \t\n;#{}[]:,=-+!@|abcn0x\x01\x7fé"), max_size=12)
C_ESCAPES = dict(zip("ntrabfvs\\\"'", "\n\t\r\a\b\f\v \\\"'", strict=True))


def join_lines(config: str) -> list[str]:
    """Logical lines of a unit file: a backslash that ends a line, not itself escaped, joins it to the next."""
    lines, current = [], ""
    for line in config.split("\n"):
        escaped = False
        for character in line:
            escaped = not escaped and character == "\\"
        current += line[:-1] + " " if escaped else line
        if not escaped:
            lines.append(current)
            current = ""
    return lines


def unit_words(line: str) -> list[str]:
    """What systemd executes for the value of ExecStart=, from its rules."""
    words: list[str] = []
    current, quote, started, i = "", "", False, 0
    while i < len(line):
        character = line[i]
        if character == "\\":
            i += 1
            if line[i] == "x":
                current += chr(int(line[i + 1 : i + 3], 16))
                i += 2
            else:
                current += C_ESCAPES[line[i]]
            started = True
        elif quote:
            if character == quote:
                quote = ""
            else:
                current += character
        elif character in "\"'":
            quote, started = character, True
        elif character in " \t\n\r":
            if started:
                words.append(current)
            current, started = "", False
        else:
            assert not (character in ";#" and not started), "separator or comment"
            current, started = current + character, True
        i += 1
    assert not quote
    if started:
        words.append(current)
    return [variables(specifiers(word)) for word in words]


def specifiers(word: str) -> str:
    out, i = "", 0
    while i < len(word):
        if word[i] == "%":
            i += 1
            assert word[i] == "%", "a specifier"
        out += word[i]
        i += 1
    return out


def variables(word: str) -> str:
    out, i = "", 0
    while i < len(word):
        if word[i] == "$":
            i += 1
            assert word[i] == "$", "a variable"
        out += word[i]
        i += 1
    return out


def env_file(content: str) -> dict[str, str]:
    """systemd's parser of environment files, double-quoted values only."""
    result, i = {}, 0
    while i < len(content):
        name, i = content[i : content.index("=", i)], content.index("=", i) + 1
        assert content[i] == '"'
        i += 1
        value = ""
        while content[i] != '"':
            if content[i] == "\\" and content[i + 1] in '"\\`$':
                value += content[i + 1]
                i += 2
            elif content[i] == "\\" and content[i + 1] == "\n":
                i += 2
            else:
                value += content[i]
                i += 1
        assert content[i + 1] == "\n"
        i += 2
        result[name] = value
    return result


@given(st.lists(text | nasty))
def test_words_come_back(arguments: list[str]) -> None:
    assert unit_words(quoting.systemd_args(arguments)) == arguments


@given(st.lists(text | nasty))
def test_one_word_a_line_comes_back(arguments: list[str]) -> None:
    config = "ExecStart=/bin/x \\\n    " + quoting.systemd_args(arguments, " \\\n    ") + "\nNext=1"
    lines = join_lines(config)
    assert lines[1:] == ["Next=1"]
    assert unit_words(lines[0].removeprefix("ExecStart="))[1:] == arguments


@given(st.lists(text | nasty))
def test_a_word_never_leaves_its_line(arguments: list[str]) -> None:
    assert not set(quoting.systemd_args(arguments)) & set("\n\r\0\x0b\x0c")


def test_readable_where_possible() -> None:
    arguments = ["/data/models/tiny", "--served-model-name", "tiny", "--speculative-config", '{"method": "ngram"}']
    quoted = '/data/models/tiny --served-model-name tiny --speculative-config "{\\"method\\": \\"ngram\\"}"'
    assert quoting.systemd_args(arguments) == quoted


SPECIAL = {"": '""', "100%": '"100%%"', "$HOME": '"$$HOME"', ";": '";"', "#x": '"#x"'}


@pytest.mark.parametrize(("value", "quoted"), SPECIAL.items())
def test_special_words(value: str, quoted: str) -> None:
    assert quoting.systemd_args([value]) == quoted


@pytest.mark.parametrize("bad", ["a\0b", "\ud800", 5, None, True])
def test_refused_arguments(bad: object) -> None:
    with pytest.raises(quoting.QuotingError):
        quoting.systemd_args([bad])  # type: ignore[list-item]


def test_a_string_is_no_list() -> None:
    with pytest.raises(quoting.QuotingError, match="list of strings"):
        quoting.systemd_args("--port 8000")


file_text = st.text(st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from("\n\t\"'\\$` #;"))


@given(st.dictionaries(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]*", fullmatch=True), file_text))
def test_environment_comes_back(variables: dict[str, str]) -> None:
    assert env_file(quoting.environment_file(variables)) == variables


def test_environment_is_sorted() -> None:
    assert quoting.environment_file({"B": "x", "A": 'say "$HOME"'}) == 'A="say \\"\\$HOME\\""\nB="x"\n'


@pytest.mark.parametrize("bad", [{"A B": "x"}, {"1A": "x"}, {"A": "x\0"}, {"A": "\x01"}, {"A": 1}])
def test_refused_environment(bad: dict[str, str]) -> None:
    with pytest.raises(quoting.QuotingError):
        quoting.environment_file(bad)
