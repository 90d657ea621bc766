"""``python -m fsdp_compiled``: see ``cli``."""

import sys

from .cli import main

sys.exit(main())
