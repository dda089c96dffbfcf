"""The nano policy: a model of two million parameters and its warm start. Not part of the method.

Seed families play and write small games (``seeds``). The warm start trains a policy on their texts, so that
the whole loop runs on two CPU cores.
"""
