"""Weights to and from transformers' families: one file a source of names, no import of transformers."""
