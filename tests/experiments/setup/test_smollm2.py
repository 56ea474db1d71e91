"""The pretrained model from a package index; downloading is left to the command."""

import pytest

from experiments.setup.smollm2 import Options, make
from rlinf_embodied.errors import ConfigError


def test_a_folder_that_is_there_is_not_overwritten(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"out is .*, but it is there already: use another folder"):
        make(Options(out=str(tmp_path)))
