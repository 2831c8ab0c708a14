"""Do something around calls of a function."""


def nothing(*args, **options):
    pass


def wrapped(function, before=nothing, after=nothing):
    """Return `function` with calls of `before` and `after`, with the same arguments, around each call."""

    def call(*args, **options):
        before(*args, **options)
        result = function(*args, **options)
        after(*args, **options)
        return result

    return call
