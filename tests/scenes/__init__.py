"""Shared scenes of the tests: recipes, messages with defaults, worlds of fakes. No test stands here."""
