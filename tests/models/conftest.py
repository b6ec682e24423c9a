"""Makes the tiny models beside this file importable by the tests of models."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
