"""Words of a command line become a dataclass; what is wrong is one line with what to give in its place."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from rlinf_embodied.errors import ConfigError
from rlinf_embodied.words import chosen, exit_code, parse, parse_all


@dataclass(frozen=True, kw_only=True)
class Options:
    rounds: int = 5
    share: float = 0.5
    quick: bool = False
    out: str = ""


def test_a_command_takes_its_own_words_and_leaves_the_others():
    own, overrides = parse(Options, ["rounds=7", "env.num_envs=32", "out=a=b", "share=0.25", "quick"])
    assert own == Options(rounds=7, share=0.25, quick=True, out="a=b")
    assert overrides == ["env.num_envs=32"]
    assert parse(Options, ["quick=false", "rounds"]) == (Options(), ["rounds"])
    with pytest.raises(ConfigError, match=r"rounds is 'many', but it must be a int: use rounds=5"):
        parse(Options, ["rounds=many"])


def test_a_command_without_other_words_refuses_them_and_names_what_is_missing():
    assert parse_all(Options, ["out=a"], "x", needed=["out"]) == Options(out="a")
    with pytest.raises(ConfigError, match="'rate=1' is no argument of x: use some of rounds, share, quick, out"):
        parse_all(Options, ["rate=1"], "x")
    with pytest.raises(ConfigError, match=r"out is missing: x needs out=\.\.\., and takes rounds, share, quick, out"):
        parse_all(Options, [], "x", needed=["out"])


def test_cases_are_chosen_by_name_in_the_order_asked_for_and_all_without_names():
    cases = {"serial": 1, "apart": 2, "together": 3}
    assert list(chosen("together,serial", cases).items()) == [("together", 3), ("serial", 1)]
    assert chosen("", cases) == cases
    with pytest.raises(ConfigError, match="cases has 'pik', but there are serial, apart, together: use some of these"):
        chosen("serial,pik", cases)


def test_a_failure_is_one_line_and_exit_code_two(capsys):
    def command(words):
        if not words:
            raise ConfigError("out is missing: give one")
        return len(words)

    assert exit_code(command, ["a", "b", "c"]) == 3
    assert exit_code(command, []) == 2
    assert capsys.readouterr().err == "error: out is missing: give one\n"
