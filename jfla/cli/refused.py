"""The error of a command whose option cannot be had."""


class Refused(ValueError):
    """An option that cannot be had; `option` is its name."""

    def __init__(self, option: str, message: str):
        super().__init__(message)
        self.option = option
