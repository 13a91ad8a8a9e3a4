"""The pictures of a report, one a module; ``stage.py`` draws them all."""
