"""Environments of a run for other frameworks: Gymnasium, OpenEnv (and verifiers through it), a data set."""
