"""The one exception that means "the input is at fault, not the program"."""

from __future__ import annotations


class InputError(ValueError):
    """Bad input: the message names the value, the limit and the remedy.

    A subclass of `ValueError`, so that library users need to know nothing of it; the
    command line turns it into one sentence and exit status 2, without a traceback.
    """
