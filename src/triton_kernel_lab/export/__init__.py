"""The tracked results in the forms of other programs, one a module."""
