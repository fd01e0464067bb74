import signal

# A shell that starts a command in the background lets it ignore SIGINT, and so would all that the tests start and end.
signal.signal(signal.SIGINT, signal.default_int_handler)
