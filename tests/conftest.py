"""Set-up of all tests."""

import signal

# A shell that runs CI as a background job ignores SIGINT in it, and so would every process that the tests start: those
# that send Ctrl-C would wait for ever. Children inherit the default action once this process has a handler of its own.
signal.signal(signal.SIGINT, signal.default_int_handler)
