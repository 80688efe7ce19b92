"""How much longer than usual to look: ``GENPIPE_SOAK=20 make test``."""

import os

SOAK = int(os.environ.get("GENPIPE_SOAK", "1"))
"""How many times the usual work is to be done."""
