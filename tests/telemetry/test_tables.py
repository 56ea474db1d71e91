"""Tables can be read at any width: short columns beside each other, long text on lines of its own."""

from rlinf_embodied.telemetry.tables import described_table, text_table, wrapped

ROWS = [
    {"plan": "(env > policy) || actor", "s": "1.25", "why not": "the best"},
    {
        "plan": "env || (policy > actor)",
        "s": "10.50",
        "why not": "+9.25 s (740%); env computes 8 s on 1 devices, 2 s on 2",
    },
]


def test_long_columns_stand_below_their_row_and_are_never_cut():
    lines = described_table(ROWS, ("plan", "why not"), "plans:").splitlines()
    assert lines[0] == "plans:"
    assert lines[1].split() == ["#", "s"]
    assert lines[3].split() == ["1", "1.25"]
    assert lines[4] == "   plan     (env > policy) || actor"
    assert lines[5] == "   why not  the best"
    assert lines[8] == "   why not  +9.25 s (740%); env computes 8 s on 1 devices, 2 s on 2"


def test_a_terminal_wraps_them_at_words():
    text = described_table(ROWS, ("plan", "why not"), width=40)
    assert max(map(len, text.splitlines())) <= 40
    assert "computes 8 s on" in " ".join(text.split())
    assert "740%" in text
    assert wrapped("a: ", "one two", None) == "a: one two"
    assert wrapped("part  ", "word " * 8, 30).splitlines()[1].startswith("      word")


def test_a_table_is_as_wide_as_its_cells():
    lines = text_table([{"a": "x" * 100, "b": "1"}]).splitlines()
    assert lines[2] == "x" * 100 + "  1"
