"""Decoding a whole model, token by token, beside the ways in which others do it."""
