"""What is here beside tests: scripts of other libraries, which are run, not imported."""

from __future__ import annotations

collect_ignore_glob = ["frameworks/*"]
