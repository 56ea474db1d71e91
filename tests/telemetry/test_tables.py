"""Short columns next to each other, long text on separate lines."""

from rlinf_embodied.telemetry.tables import described_table, text_table

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


def test_a_table_is_as_wide_as_its_cells():
    lines = text_table([{"a": "x" * 100, "b": "1"}]).splitlines()
    assert lines[2] == "x" * 100 + "  1"
