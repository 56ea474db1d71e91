"""The API reference: made from the sources, in a form that no docstring can break; the site, where Sphinx is there."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from conftest import REPOSITORY

DOCS = REPOSITORY / "docs"


@pytest.fixture(scope="module")
def api_pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("api_pages", DOCS / "api_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_package_has_a_page_and_every_public_function_an_entry(api_pages: ModuleType, tmp_path: Path) -> None:
    names = api_pages.write_pages(REPOSITORY, tmp_path)
    assert {"rlinf_embodied.planning", "rlinf_embodied.config", "envs.batched", "policies.openvla"} <= set(names)
    flow = (tmp_path / "rlinf_embodied.planning.rst").read_text()
    for file in sorted((REPOSITORY / "rlinf_embodied/planning").glob("*.py")):
        for name in re.findall(r"^def ([a-z]\w*)\(", file.read_text(), re.MULTILINE):
            assert f".. py:function:: {name}(" in flow, f"{file.name}: {name}"


def test_every_page_is_in_the_table_of_contents() -> None:
    listed = re.findall(r"^([\w*/]+)$", (DOCS / "index.md").read_text(), re.MULTILINE)
    patterns = [re.compile(re.escape(name).replace(r"\*", "[^/]*")) for name in listed]
    pages = [str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.rglob("*.md")]
    missing = [page for page in pages if page != "index" and not any(p.fullmatch(page) for p in patterns)]
    assert missing == [], "docs/index.md lists every page"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_site_is_made_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    pytest.importorskip("furo")
    pytest.importorskip("myst_parser")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--quiet", str(DOCS), str(tmp_path)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    assert (tmp_path / "api/rlinf_embodied.planning.html").exists()
