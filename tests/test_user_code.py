"""A mistake in code of the user's is shown by the user's lines alone, on every way from there to the terminal."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest

from rlinf_embodied.command_line import main
from rlinf_embodied.config import TrainConfig
from rlinf_embodied.errors import ConfigError, ObjectiveError, PlugInError
from rlinf_embodied.plug_ins import load_plug_in, raised_by_user


def raised(work) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        work()
    return caught.value


def test_only_the_lines_of_the_user_are_shown(monkeypatch) -> None:
    import json

    def mine():
        return json.loads("{")

    told = raised_by_user(raised(mine))
    assert told is not None
    first, *lines = told.splitlines()
    assert first.startswith("JSONDecodeError: ")
    assert all(line.startswith(f"  {__file__}, line ") for line in lines)
    assert lines[-1].endswith(', in mine: return json.loads("{")')
    with monkeypatch.context() as patch:
        patch.setattr("rlinf_embodied.plug_ins._OURS", (Path(__file__).parent,))
        assert raised_by_user(raised(mine)) is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            "import no_such_library\n",
            r"mine cannot be imported \(ModuleNotFoundError: .*no_such_library.*\n  .*mine\.py, line 1",
        ),
        (
            "1 / 0\n",
            r"mine cannot be imported \(ZeroDivisionError: .*\n  .*mine\.py, line 1, in <module>: 1 / 0\): correct",
        ),
        ("import json\njson.lods\n", r"mine cannot be imported \(AttributeError: .*lods.*\n  .*mine\.py, line 2"),
        ("def of(\n", r"mine cannot be imported \(.*line 1\)"),
        ("", r"mine cannot be imported \(module 'mine' has no attribute 'score'\): correct that"),
    ],
)
def test_a_module_that_cannot_be_imported_is_shown_where_it_fails(tmp_path, monkeypatch, content, words) -> None:
    (tmp_path / "mine.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    with pytest.raises(ConfigError, match=rf"reward\._target_ is 'mine\.score', but {words}"):
        load_plug_in("mine.score", "reward._target_", "completion", "problem")


@pytest.mark.parametrize("error", [PlugInError("mine.py, line 3"), ObjectiveError("the ratio is not 1")])
def test_the_command_shows_no_traceback_of_ours(monkeypatch, capsys, error) -> None:
    def work(config):
        raise pickle.loads(pickle.dumps(error))

    assert getattr(raised(lambda: main(work, TrainConfig, words=[])), "code", None) == 1
    assert capsys.readouterr().err == f"error: {error}\n"
