"""`duoka` and `python -m duoka`."""

import signal

# Until `main` runs there is nothing to tidy up: a Ctrl-C among the imports ends it, where it was a traceback.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from duoka.cli import main

if __name__ == "__main__":
    main()
