"""The version of psplus; every other place reads it here."""

__version__ = "0.1.0"
