"""Fixtures and settings that every test folder shares."""

from __future__ import annotations

import os

from hypothesis import settings

# Property tests have no deadline of their own: on a busy machine an example may take long, and
# pytest-timeout ends a test that hangs.
settings.register_profile("default", deadline=None, max_examples=50, print_blob=True)
settings.register_profile("thorough", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# Event loops report never-awaited coroutines, unowned tasks and calls from a wrong thread.
os.environ.setdefault("PYTHONASYNCIODEBUG", "1")
