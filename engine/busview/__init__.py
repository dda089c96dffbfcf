"""Looks into the streams of a run: stored messages, depths, dead letters."""
