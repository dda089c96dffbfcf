"""Settings of all tests."""

from hypothesis import settings

# A shared machine can be slow at any moment: the timeout of each test bounds them, not hypothesis.
settings.register_profile("spade", deadline=None)
settings.load_profile("spade")
