"""The one exception users are meant to see: what is wrong, what was found, what to do."""


class SpectrainError(ValueError):
    """Bad input, explained. The command line prints the message alone and exits with code 2."""
