"""The library needs neither triton nor CUDA to be imported."""

from __future__ import annotations

import subprocess
import sys


def test_import_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import fsdp_compiled, fsdp_compiled.passes\n"
        "assert [m for m in sys.modules if m.startswith('triton') and sys.modules[m]] == []\n"
        "assert 'passes' not in sys.modules\n"
        "assert 'fsdp_compiled.testing' not in sys.modules\n"
        "print(*fsdp_compiled.__all__)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "fully_shard" in out.split()
