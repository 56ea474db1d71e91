"""The table of mutants fits the code: `python -m tests.mutants` runs them."""

from __future__ import annotations

import ast

from tests.mutants.table import ROOT, mutants


def test_a_mutant_changes_one_place_and_names_a_test() -> None:
    found = mutants()
    assert (
        len({mutant.name for mutant in found})
        == len(found)
        == (ROOT / "tests/mutants/table.txt").read_text().count(" @ ")
    )
    for mutant in found:
        assert (ROOT / mutant.file).read_text().count(mutant.old) == 1, mutant
        file, name = mutant.test.split("[")[0].split("::")
        body = ast.parse((ROOT / file).read_text()).body
        assert name in [node.name for node in body if isinstance(node, ast.FunctionDef)], mutant
